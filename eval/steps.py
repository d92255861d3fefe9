"""`python -m eval steps`: what a decode step and its parts cost, in plain steps.

The models have a real pair's shape and random weights. All parts and both whole steps are timed in
turns, on the same cache, so that a slow moment of the machine hits them all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from rich.console import Console

from pallas_kernels.timing import interleave
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import DraftConfig
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.types import Accepted, DecodeState, TokenTree, Verified

from .abstract import abstract_drafter, abstract_state, abstract_target, bytes_of
from .plots import write_steps_chart
from .progress import make_progress
from .random_weights import random_drafter, random_target
from .report import describe_device, describe_run, write_report
from .shape_config import StepsSettings
from .step_parts import (
    fill_state,
    make_noise,
    run_accept,
    run_commit,
    run_draft,
    run_verify,
    set_back,
)
from .table import render_steps

DEFINITIONS = {
    "milliseconds": "lower quartile, median and upper quartile over repeats, of one turn",
    "in_plain_steps": "quartiles over repeats of the time / the plain step's of the same repeat; "
    "the step's is the acceptance length below which speculation gains nothing",
    "draft": "beam search and tree, copied tokens included",
    "verify": "one target call over the tree; a CPU leaves out dead slots at its end, of which "
    "there are none in a tree with copied tokens, for one is always found here",
    "accept": "the target's choice at every node, and the chain that spells it",
    "commit": "the accepted path into the cache, and all else that ends a step",
    "parts": "each of the four is a program of its own, which reads and writes what passes between "
    "them; in the whole step XLA joins and overlaps what it can, so their sum may exceed it",
    "step": "a speculative decode step as `generate` runs it, greedy, its noise and the question "
    "whether a row is left included",
    "plain": "the same with the one-node tree, as `generate_autoregressive` runs it",
    "cached": "tokens in every row's cache when a timed run begins; whole steps add their own",
}


class Combination(NamedTuple):
    """One row of the report."""

    draft: DraftConfig
    batch_size: int
    slots: int

    def cached(self, steps: int) -> int:
        """The fullest that a row may be before a run of so many steps: a step may add P tokens.

        The last writes P slots past its own, and the token buffer is one ahead of the cache.
        """
        return self.slots - (steps + 1) * self.draft.max_path - 1


def measure_steps(arguments: Sequence[str] | None = None) -> None:
    """Time every combination of trees, batches and caches, and report.

    Args:
      arguments: of the command line; None takes the process's own.

    Raises:
      InputError: a setting cannot be used, or it does not fit the device.
    """
    settings = parse_settings(
        StepsSettings,
        "What a decode step and its parts cost, in plain steps.",
        arguments,
        command="steps",
    )
    drafts = [draft for sizes in settings.trees for draft in sizes.build()]
    grid = [Combination(*one) for one in product(drafts, settings.batch_sizes, settings.slots)]
    _check(settings, grid)
    make_folder(settings.report_dir, "report_dir")
    dtype = jnp.dtype(settings.dtype)
    target = random_target(settings.target.build(), dtype)
    drafter = random_drafter(settings.drafter_config(), dtype)

    console = Console()
    with make_progress(console) as progress:
        rows = [
            measure(target, drafter, one, settings)
            for one in progress.track(grid, description="measure")
        ]
    report = {
        "rows": rows,
        "platform": jax.default_backend(),
        **describe_run(),
        "config": settings.model_dump(mode="json"),
        "target": asdict(target.config),
        "drafter": asdict(drafter.config),
        "definitions": DEFINITIONS,
    }
    path = settings.report_dir / "steps.json"
    write_report(report, path)
    write_steps_chart(rows, _title(settings), path.with_suffix(".png"))
    console.print(_title(settings), highlight=False)
    console.print(render_steps(rows))
    print("Parts are programs of their own: their sum may exceed the whole step.")
    print(f"The report: {path}, the chart: {path.with_suffix('.png')}")


def measure(
    target: Target, drafter: DraftModel, one: Combination, settings: StepsSettings
) -> dict[str, Any]:
    """One row of the report: every part and both whole steps, in turns."""
    timers = make_timers(target, drafter, one, settings.steps, settings.short_turns)
    for timer in timers.values():
        timer()  # compiles
    times = interleave(timers, settings.repeats)
    return {
        "beam_width": one.draft.beam_width,
        "draft_rounds": one.draft.draft_rounds,
        "num_nodes": one.draft.budget,
        "lookup_tokens": one.draft.lookup_tokens,
        "batch_size": one.batch_size,
        "slots": one.slots,
        "cached": one.cached(settings.steps),
        "milliseconds": {name: _quartiles(1000 * own) for name, own in times.items()},
        "in_plain_steps": {name: _quartiles(own / times["plain"]) for name, own in times.items()},
    }


def make_timers(
    target: Target, drafter: DraftModel, one: Combination, steps: int, short_turns: int
) -> dict[str, Callable[[], float]]:
    """Seconds of one turn of draft, verify, accept, commit, step and plain.

    There is one cache: every run that writes it hands it on to the next.
    """
    draft, cached = one.draft, one.cached(steps)
    max_path = draft.max_path
    zero = jnp.int32(0)
    layers = drafter.config.context_layers
    shapes = abstract_state(target, one.batch_size, one.slots, max_path, layers)
    state = set_back(fill_state(shapes), cached, max_path, done=False)
    noise = make_noise(state, max_path=max_path, vocab_size=target.config.vocab_size)
    held = [state]

    def search(state: DecodeState) -> TokenTree:
        return run_draft(target, drafter, state, noise, zero, draft=draft, turns=steps)

    tree = search(state)

    def verify(state: DecodeState) -> Verified:
        return run_verify(
            target, state, tree, zero, draft=draft, turns=steps, context_layers=layers
        )

    verified = verify(state)

    def choose(state: DecodeState) -> tuple[Int[Array, "B N"], Accepted]:
        logits, sampling = verified.logits, state.sampling
        return run_accept(logits, tree, noise, sampling, zero, max_path=max_path, turns=short_turns)

    chosen, accepted = choose(state)

    def commit(state: DecodeState) -> DecodeState:
        return run_commit(
            state,
            verified,
            chosen,
            accepted,
            zero,
            turns=short_turns,
            copies=draft.lookup_tokens,
        )

    def reading(program: Callable[[DecodeState], Any], turns: int) -> Callable[[], float]:
        def run() -> float:
            state = jax.block_until_ready(set_back(held[0], cached, max_path, done=False))
            started = time.perf_counter()
            jax.block_until_ready(program(state))
            return (time.perf_counter() - started) / turns

        return run

    def writing(
        program: Callable[[DecodeState], DecodeState], turns: int, max_path: int, *, done: bool
    ) -> Callable[[], float]:
        def run() -> float:
            state = jax.block_until_ready(set_back(held[0], cached, max_path, done=done))
            started = time.perf_counter()
            held[0] = jax.block_until_ready(program(state))
            return (time.perf_counter() - started) / turns

        return run

    def step(state: DecodeState) -> DecodeState:
        return decode(target, drafter, state, steps, draft=draft)

    def plain(state: DecodeState) -> DecodeState:
        # Without a drafter there are no context layers either.
        narrow = state._replace(context=state.context[:, -target.config.hidden_size :])
        return decode(target, None, narrow, steps, draft=None)

    return {
        "draft": reading(search, steps),
        "verify": reading(verify, steps),
        "accept": reading(choose, short_turns),
        "commit": writing(commit, short_turns, max_path, done=True),
        "step": writing(step, steps, max_path, done=False),
        "plain": writing(plain, steps, 1, done=False),
    }


def _check(settings: StepsSettings, grid: Sequence[Combination]) -> None:
    """Refuse what could not be run, before anything is drawn or compiled.

    Raises:
      InputError: a tree, the slots or the memory they need.
    """
    config, dtype = settings.target.build(), jnp.dtype(settings.dtype)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    target = abstract_target(config, dtype)
    weights = bytes_of((target, abstract_drafter(settings.drafter_config(), dtype)))
    for one in grid:
        check_pair(config, settings.drafter_config(), one.draft)
        if one.slots > config.max_position_embeddings:
            raise InputError(
                f"slots is {one.slots}, but the target has {config.max_position_embeddings} "
                "positions; give fewer."
            )
        if one.cached(settings.steps) < 1:
            raise InputError(
                f"slots is {one.slots}, which {settings.steps} steps of up to "
                f"{one.draft.max_path} tokens overrun; give more slots or fewer steps."
            )
        layers = settings.drafter_config().context_layers
        state = abstract_state(target, one.batch_size, one.slots, one.draft.max_path, layers)
        needed = weights + bytes_of(state)
        if limit is not None and needed > limit:
            raise InputError(
                f"slots={one.slots} with batch {one.batch_size} needs {needed / 1e9:.1f} GB for "
                f"weights and cache and the device has {limit / 1e9:.1f} GB; give fewer of one."
            )


def _title(settings: StepsSettings) -> str:
    target = settings.target
    return (
        f"{target.num_hidden_layers} layers of width {target.hidden_size}, vocabulary "
        f"{target.vocab_size}, random weights, {settings.dtype}; {describe_device()}"
    )


def _quartiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))]
