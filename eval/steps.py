"""`python -m eval steps`: what a decode step and its parts cost, in steps of the baseline.

The models have a real pair's shape and random weights. For a tree, a batch and a cache all parts
and both whole steps are timed in turns under every sampling, on the same cache, so that a slow
moment of the machine hits them all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.timing import interleave
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.requests import prepare
from redrafter_jax.types import DecodeState, TokenTree, Verified

from .abstract import abstract_drafter, abstract_state, abstract_target, bytes_of
from .metrics import quartiles
from .plots import write_steps_chart
from .progress import track
from .random_weights import random_drafter, random_target
from .report import describe_device, write_report
from .shape_config import StepsSettings
from .step_parts import fill_state, run_finish, run_noise, run_propose, run_verify, set_back
from .table import describe_sampling, render_steps, show

PARTS = ("propose", "verify", "finish", "noise", "step", "baseline")

DEFINITIONS = {
    "milliseconds": "lower quartile, median and upper quartile over repeats, of one turn",
    "in_baseline_steps": "quartiles over repeats of the time / the baseline step's under the same "
    "sampling in the same repeat; the step's is the acceptance length below which speculation "
    "gains nothing",
    "over_first_sampling": "quartiles over repeats of the step's time / the same step's under the "
    "first sampling of the list in the same repeat",
    "propose": "the drafter's tree, prompt lookup included",
    "verify": "one target call over the tree",
    "finish": "the target's choice at every node, the accepted path and its commit to the cache",
    "noise": "of the positions of a speculative step; greedy rows have none",
    "parts": "propose, verify, finish and noise are programs of their own, which read and write "
    "what passes between them; the whole step fuses and overlaps them, so their sum may exceed it",
    "step": "a speculative decode step as `generate` runs it, noise and loop condition included",
    "baseline": "the same with the one-node tree, as `generate_autoregressive` runs it",
    "cached": "tokens in every row's cache when a timed run begins; whole steps add their own",
}


class Combination(NamedTuple):
    """What is timed in turns, under every sampling."""

    draft: DraftConfig
    batch_size: int
    slots: int

    def cached(self, steps: int) -> int:
        """The fullest that a row may be before a run of so many steps: a step may add P tokens.

        The last writes P slots past its own, and the token buffer is one ahead of the cache.
        """
        return self.slots - (steps + 1) * self.draft.max_path - 1


def measure_steps(settings: StepsSettings) -> None:
    """Time every combination of trees, batches, caches and samplings, and report.

    Raises:
      InputError: a setting cannot be used, or it does not fit the device.
    """
    drafts = [draft for sizes in settings.trees for draft in sizes.build()]
    grid = [Combination(*one) for one in product(drafts, settings.batch_sizes, settings.slots)]
    _check(settings, grid)
    make_folder(settings.report_dir, "report_dir")
    dtype = jnp.dtype(settings.dtype)
    target = random_target(settings.target.build(), dtype)
    drafter = random_drafter(settings.drafter_config(), dtype)
    rows = [
        row
        for one in track(grid, len(grid), "measure")
        for row in measure(target, drafter, one, settings)
    ]
    path = settings.report_dir / "steps.json"
    shapes = {"target": asdict(target.config), "drafter": asdict(drafter.config)}
    write_report(path, {"rows": rows, **shapes}, settings, DEFINITIONS)
    title = (
        f"{settings.target.num_hidden_layers} layers of width {settings.target.hidden_size}, "
        f"vocabulary {settings.target.vocab_size}, random weights, {settings.dtype}; "
        f"{describe_device()}"
    )
    write_steps_chart(rows, title, path.with_suffix(".png"))
    show(path, title, render_steps(rows), "The parts' sum may exceed the whole step.", chart=True)


def measure(
    target: Target, drafter: DraftModel, one: Combination, settings: StepsSettings
) -> list[dict[str, Any]]:
    """A row of the report for each sampling: every part and both whole steps, in turns."""
    names = [describe_sampling(config) for config in settings.samplings]
    bound = bind_drafter(drafter, one.draft)
    held = [fill_state(abstract_state(target, bound, one.batch_size, one.slots))]
    timers = {
        f"{name}: {part}": timer
        for name, config in zip(names, settings.samplings, strict=True)
        for part, timer in make_timers(target, bound, one, config, held, settings).items()
    }
    for timer in timers.values():
        timer()  # compiles
    times = interleave(timers, settings.repeats)

    def row(name: str) -> dict[str, Any]:
        own = {part: times[f"{name}: {part}"] for part in PARTS}
        first = times[f"{names[0]}: step"]
        return {
            "beam_width": one.draft.beam_width,
            "draft_rounds": one.draft.draft_rounds,
            "num_nodes": one.draft.budget,
            "lookup_tokens": one.draft.lookup_tokens,
            "batch_size": one.batch_size,
            "slots": one.slots,
            "sampling": name,
            "cached": one.cached(settings.steps),
            "milliseconds": {part: quartiles(1000 * own[part]) for part in PARTS},
            "in_baseline_steps": {part: quartiles(own[part] / own["baseline"]) for part in PARTS},
            "over_first_sampling": quartiles(own["step"] / first),
        }

    return [row(name) for name in names]


def make_timers(
    target: Target,
    drafter: Drafter,
    one: Combination,
    config: SamplingConfig,
    held: list[DecodeState],
    settings: StepsSettings,
) -> dict[str, Callable[[], float]]:
    """Seconds of one turn of each of `PARTS` under one sampling.

    There is one cache, in `held`: every run that writes it hands it on to the next.
    """
    cached, turns, short_turns = one.cached(settings.steps), settings.steps, settings.short_turns
    zero, sizes = jnp.int32(0), (drafter.max_path, target.config.vocab_size)
    rows = [[0]] * one.batch_size
    sampling = prepare(target.config, rows, 1, config, None, (), 1)[0].sampling

    def timer(
        program: Callable[[DecodeState], Any],
        turns: int,
        *,
        writes: bool = False,
        done: bool = False,
        drafter: Drafter = drafter,
    ) -> Callable[[], float]:
        def run() -> float:
            state = set_back(held[0], cached, drafter, sampling, done=done)
            state = jax.block_until_ready(state)
            started = time.perf_counter()
            result = jax.block_until_ready(program(state))
            seconds = time.perf_counter() - started
            if writes:
                held[0] = result
            return seconds / turns

        return run

    def noise(state: DecodeState) -> Float[Array, "B P V"]:
        return run_noise(state, zero, max_path=sizes[0], vocab_size=sizes[1], turns=short_turns)

    def propose(state: DecodeState) -> TokenTree:
        return run_propose(target, drafter, state, drawn, zero, turns=turns)

    def verify(state: DecodeState) -> Verified:
        layers = drafter.context_layers
        return run_verify(target, state, tree, zero, context_layers=layers, turns=turns)

    def finish(state: DecodeState) -> DecodeState:
        return run_finish(drafter, state, tree, verified, drawn, zero, turns=short_turns)

    def step(state: DecodeState) -> DecodeState:
        return decode(target, drafter, state, turns)

    def baseline(state: DecodeState) -> DecodeState:
        ended = decode(target, RootOnly(), state._replace(drafter=()), turns)
        return ended._replace(drafter=state.drafter)

    state = set_back(held[0], cached, drafter, sampling, done=False)
    drawn = noise(state)
    tree = propose(state)
    verified = verify(state)
    return {
        "propose": timer(propose, turns),
        "verify": timer(verify, turns),
        # Rows that are done take all of the work and none of the slots.
        "finish": timer(finish, short_turns, writes=True, done=True),
        "noise": timer(noise, short_turns),
        "step": timer(step, turns, writes=True),
        "baseline": timer(baseline, turns, writes=True, drafter=RootOnly()),
    }


def _check(settings: StepsSettings, grid: Sequence[Combination]) -> None:
    """Refuse what could not be run, before anything is drawn or compiled.

    Raises:
      InputError: a tree, the slots or the memory they need.
    """
    config, dtype = settings.target.build(), jnp.dtype(settings.dtype)
    drafter_config = settings.drafter_config()
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    target = abstract_target(config, dtype)
    drafter = abstract_drafter(drafter_config, dtype)
    for one in grid:
        check_pair(config, drafter_config, one.draft)
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
        bound = bind_drafter(drafter, one.draft)
        state = abstract_state(target, bound, one.batch_size, one.slots)
        needed = bytes_of((target, drafter, state))
        if limit is not None and needed > limit:
            raise InputError(
                f"slots={one.slots} with batch {one.batch_size} needs {needed / 1e9:.1f} GB for "
                f"weights and cache and the device has {limit / 1e9:.1f} GB; give fewer of one."
            )
