"""A short benchmark of the device: how fast it decodes, runs forward passes and trains."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from redrafter_jax.engine.messages import Request
from redrafter_jax.models.target import Target

from ..config import TrainSettings
from ..data.types import Windows
from ..features import compute_features
from ..gradients import layers_read
from ..initial import new_drafter
from ..optimizer import make_optimizer
from ..regenerate.session import STEPS, make_engine
from ..step import init_state, train_step

# Seconds for which a timed call is repeated.
_SECONDS = 3.0
# Number of prompt tokens when decoding is timed; it is small, because prefill is a small part of
# writing.
_PROMPT_TOKENS = 16


class Rates(NamedTuple):
    """Throughput of the stages of a fit, and the time to start them.

    Attributes:
      alone: tokens per second of plain decoding of one row.
      written: tokens per second of decoding many rows together.
      read: tokens per second of a forward pass with top-k search.
      trained: positions per second of optimizer steps over features.
      starting: seconds to load the target and to compile these four programs.
    """

    alone: float
    written: float
    read: float
    trained: float
    starting: float


def measure_rates(
    load: Callable[[], Target], settings: TrainSettings, rows: int, top_k: int
) -> Rates:
    """Time each stage on random tokens in the array shapes of the fit.

    Args:
      load: function that loads the target.
      settings: settings of the training stage.
      rows: number of texts that the target decodes together.
      top_k: number of most likely tokens that a forward pass keeps per position.
    """
    begun = time.perf_counter()
    target = load()
    starting = time.perf_counter() - begun
    T, B = settings.data.sequence_length, settings.optimizer.batch_size
    V = target.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, V, (B, T), np.int32)
    segments, mask = np.ones((B, T), np.int32), np.ones((B, T), bool)
    sources = [(Windows(tokens, mask, segments), 1.0)]
    drafter = new_drafter(target, settings.drafter, settings.draft_rounds, sources, 0)
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    layers, raw = layers_read(drafter.config, target.config)
    chunk = settings.loss.chunk_length

    def read() -> Any:
        return compute_features(
            target,
            tokens,
            segments,
            context_layers=layers,
            raw_layers=raw,
            top_k=top_k,
            chunk_length=chunk,
        )

    hidden, top = read()
    state = init_state(drafter, optimizer)

    def step() -> Any:
        nonlocal state
        batch = (tokens, mask, segments, hidden, top.log_probs, top.token_ids)
        state, metrics = train_step(
            state,
            target,
            drafter.graphdef,
            *(jnp.asarray(part)[None] for part in batch),
            rounds=settings.draft_rounds,
            loss_settings=settings.loss,
            optimizer=optimizer,
        )
        return metrics

    timed = [
        _decoding(target, 1, T),
        _decoding(target, rows, T),
        _Timed(B * T, read),
        _Timed(B * T, step),
    ]
    rates: list[float] = []
    for part in timed:
        first, seconds = _seconds(part.call, part.calls)
        starting += first
        rates.append(part.tokens / seconds)
    return Rates(*rates, starting=starting)


class _Timed(NamedTuple):
    """A call to time, the number of tokens that it processes, and how often it can be called."""

    tokens: int
    call: Callable[[], Any]
    calls: int = 1 << 30


def _decoding(target: Target, rows: int, length: int) -> _Timed:
    """A call that decodes `rows` rows together for `STEPS` steps, after a short prompt."""
    engine = make_engine(target, None, None, rows, length, ())
    prompt = [0] * min(_PROMPT_TOKENS, length // 2)
    for number in range(rows):
        engine.submit(Request(prompt, length - len(prompt), number))
    # Prefill produces the first new token.
    calls = (length - len(prompt) - 1) // STEPS
    return _Timed(rows * STEPS, lambda: engine.advance(passes=None), calls)


def _seconds(call: Callable[[], Any], most: int) -> tuple[float, float]:
    """The seconds of the first call, which compiles, and the median of up to `most` later calls."""
    begun = time.perf_counter()
    jax.block_until_ready(call())
    first = time.perf_counter() - begun
    times: list[float] = []
    while not times or (sum(times) < _SECONDS and len(times) < most - 1):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return first, float(np.median(times))
