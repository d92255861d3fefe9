"""Speculative and plain decoding of the same prompts, in turns, with a clock."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.generation import collect, start
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.requests import prepare
from redrafter_jax.types import DecodeState, Requests


class Method(NamedTuple):
    """A way of decoding: speculative, or plain where drafter and draft are None."""

    target: Target
    drafter: DraftModel | None
    draft: DraftConfig | None


class Batch(NamedTuple):
    """Prompts decoded together and how; the arguments of `redrafter_jax.generate`."""

    prompts: list[list[int]]
    seeds: list[int]
    max_new_tokens: int
    sampling: SamplingConfig
    eos_token_ids: tuple[int, ...] | None


class Run(NamedTuple):
    """One decoding of one batch.

    Attributes:
      tokens: per row, the new tokens.
      steps: per row, target calls after prefill.
      accept_counts: as in `redrafter_jax.Generation`.
      copied_tokens: as there.
      prefill_seconds: from lists of prompts to each row's first token, chosen on the device.
      decode_seconds: from there to all tokens on the host.
    """

    tokens: list[list[int]]
    steps: list[int]
    accept_counts: Int[np.ndarray, "B P"]
    copied_tokens: list[int]
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """Wall time of the whole call."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def new_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(row) for row in self.tokens)

    @property
    def decoded_tokens(self) -> int:
        """New tokens of all rows, without the one per row that prefill decides."""
        return self.new_tokens - len(self.tokens)


class Pair(NamedTuple):
    """The same batch decoded both ways, one right after the other."""

    batch: int
    repeat: int
    speculative: Run
    plain: Run


def make_batches(
    prompts: Sequence[list[int]],
    batch_size: int,
    first_seed: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
    eos_token_ids: tuple[int, ...] | None,
) -> list[Batch]:
    """The prompts in their order, the last batch as small as it comes; seeds count prompts."""
    seeds = [first_seed + index for index in range(len(prompts))]
    return [
        Batch(
            prompts=list(prompts[first : first + batch_size]),
            seeds=seeds[first : first + batch_size],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_ids=eos_token_ids,
        )
        for first in range(0, len(prompts), batch_size)
    ]


def one_per_shape(
    methods: Sequence[Method], batches: Sequence[Batch]
) -> list[tuple[Method, Batch]]:
    """For each method the first batch of every array shape: running these compiles everything."""
    chosen = []
    for method in methods:
        seen = set()
        for batch in batches:
            requests, _ = prepare_batch(method, batch)
            shape = requests.tokens.shape
            if shape not in seen:
                seen.add(shape)
                chosen.append((method, batch))
    return chosen


def measure(
    speculative: Method, plain: Method, batches: Sequence[Batch], repeats: int
) -> Iterator[Pair]:
    """Time both methods on every batch, `repeats` times over; run `one_per_shape` before.

    The two runs of a pair follow each other at once, so that a slow minute of the machine hits
    both, and which one goes first changes from pair to pair.
    """
    for repeat in range(repeats):
        for index, batch in enumerate(batches):
            if (repeat + index) % 2 == 0:
                ours = decode_batch(speculative, batch)
                theirs = decode_batch(plain, batch)
            else:
                theirs = decode_batch(plain, batch)
                ours = decode_batch(speculative, batch)
            yield Pair(index, repeat, ours, theirs)


def decode_batch(method: Method, batch: Batch) -> Run:
    """What `generate` and `generate_autoregressive` do, with a look at the clock after prefill.

    Raises:
      InputError: a prompt or a seed does not fit, as in `generate`.
    """
    target, drafter, draft = method
    started = time.perf_counter()
    state, slots = begin(method, batch)
    state = jax.block_until_ready(state)
    prefilled = time.perf_counter()
    state = decode(target, drafter, state, slots, draft=draft)
    result = collect(state, batch.prompts)
    ended = time.perf_counter()
    return Run(
        tokens=result.tokens,
        steps=result.steps,
        accept_counts=result.accept_counts,
        copied_tokens=result.copied_tokens,
        prefill_seconds=prefilled - started,
        decode_seconds=ended - prefilled,
    )


def begin(method: Method, batch: Batch) -> tuple[DecodeState, int]:
    """The batch after prefill, and its cache slots per row: no row takes more decode steps.

    Raises:
      InputError: a prompt or a seed does not fit, as in `generate`.
    """
    return start(
        method.target,
        batch.prompts,
        batch.max_new_tokens,
        batch.sampling,
        batch.seeds,
        batch.eos_token_ids,
        max_path=_max_path(method),
        context_layers=context_layers_of(method.drafter),
    )


def prepare_batch(method: Method, batch: Batch) -> tuple[Requests, int]:
    """The batch as arrays where the target lies, and its cache slots per row."""
    requests, slots = prepare(
        method.target.config,
        batch.prompts,
        batch.max_new_tokens,
        batch.sampling,
        batch.seeds,
        batch.eos_token_ids,
        _max_path(method),
    )
    return place(requests, method.target.mesh), slots


def _max_path(method: Method) -> int:
    return method.draft.max_path if method.draft else 1
