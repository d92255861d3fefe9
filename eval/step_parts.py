"""The parts of a decode step as programs that a clock can time: each many times in a row.

They are propose, verify, finish and the noise of `redrafter_jax.decoding.step`, on the arrays of a
real step; beside them the whole step and the baseline's.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.timing import empty_like, repeat, take_turns
from redrafter_jax.config import SamplingConfig
from redrafter_jax.decoding.prefill import no_counts
from redrafter_jax.decoding.step import decode, finish, step_noise, verify
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.models.target import Target
from redrafter_jax.progress import track
from redrafter_jax.requests import Batch, prepare
from redrafter_jax.types import DecodeState, Sampling, TokenTree, Verified

from .random_pair import random_state

StepPart = Literal["propose", "verify", "finish", "noise"]
Timing = Literal[StepPart, "step", "baseline"]


class Between(NamedTuple):
    """What the parts of one step hand on to each other."""

    noise: Float[Array, "B P V"]
    tree: TokenTree
    verified: Verified


def begin(target: Target, drafter: Drafter, state: DecodeState) -> Between:
    """A step up to what is left for `finish`."""
    decoder = target.merge()
    noise = step_noise(state, drafter.max_path, target.config.vocab_size)
    tree = drafter.prepare(decoder).propose(decoder, state, noise)
    verified = verify(decoder, tree, state.cache, drafter.context_layers)
    return Between(noise, tree, verified)


@dataclass
class HandedOn:
    """What the runs of one drafter hand on to each other: it is donated to each of them.

    Attributes:
      drafter: the drafter's state.
      between: what passes between the parts; None before the first of them has run.
    """

    drafter: Any
    between: Between | None = None


@partial(jax.jit, static_argnames=("part", "turns"), donate_argnames=("state", "between"))
def run_part(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    between: Between,
    zero: Int[Array, ""],
    *,
    part: StepPart,
    turns: int,
) -> tuple[DecodeState, Between]:
    """The part so many times on the same arrays, which come back with what its last turn wrote.

    Args:
      target: the target.
      drafter: from `bind_drafter`.
      state: before the step; donated. Only `finish` changes it: give it rows that are done, which
        take all of its work and none of the slots.
      between: from `begin`; donated.
      zero: as in `pallas_kernels.timing.repeat`.
      part: of a step.
      turns: how many.
    """
    decoder = target.merge()
    prepared = drafter.prepare(decoder)

    def turn(
        carry: tuple[DecodeState, Between], none: Int[Array, ""]
    ) -> tuple[DecodeState, Between]:
        state, (noise, tree, verified) = carry
        # Numbers that every part begins with, as if they differed from turn to turn.
        lengths, tokens = state.cache.lengths + none, tree.tokens + none
        cache = state.cache._replace(lengths=lengths)
        if part == "noise":
            varied = state._replace(cache=cache)
            noise = step_noise(varied, drafter.max_path, target.config.vocab_size)
        elif part == "propose":
            own = jax.tree.map(lambda leaf: leaf + none.astype(leaf.dtype), state.drafter)
            varied = state._replace(root=state.root + none, cache=cache, drafter=own)
            tree = prepared.propose(decoder, varied, noise)
        elif part == "verify":
            varied = tree._replace(tokens=tokens)
            verified = verify(decoder, varied, cache, drafter.context_layers)
        else:
            varied = tree._replace(depth=tree.depth + none, tokens=tokens)
            warm = state.sampling._replace(temperature=state.sampling.temperature + none)
            after, trace = finish(state._replace(sampling=warm), varied, verified, noise)
            state = after._replace(drafter=drafter.observe(state.drafter, verified, trace))
        return state, Between(noise, tree, verified)

    return repeat(turn, (state, between), turns, zero)


def time_parts(
    target: Target,
    drafters: Sequence[Drafter],
    samplings: Sequence[SamplingConfig],
    batch_size: int,
    slots: int,
    *,
    parts: Sequence[Timing],
    cached: int,
    turns: int,
    short_turns: int,
    repeats: int,
    name: str | None = None,
) -> list[list[dict[Timing, Float[np.ndarray, " repeats"]]]]:
    """Seconds of one turn of each part, all of them timed in turns.

    Args:
      target: the target.
      drafters: from `bind_drafter`, of one head.
      samplings: how tokens are chosen.
      batch_size: B.
      slots: S, cache slots per row.
      parts: which.
      cached: tokens in every row's cache when a run begins; `room_for` says what must be left.
      turns: of propose, verify and whole steps in a run.
      short_turns: of finish and of the noise, which may take microseconds.
      repeats: runs of each.
      name: of the progress; None shows none.

    Returns:
      For every drafter, under every sampling.
    """
    held = [random_state(target, drafters[0], batch_size, slots)]
    width = (len(drafters[0].context_layers) + 1) * target.config.hidden_size
    dtype = held[0].cache.keys[0].dtype
    hidden = jax.random.normal(jax.random.key(3), (batch_size, width), dtype)
    # Copied, because the state is donated.
    handed = [HandedOn(jax.tree.map(jnp.copy, drafter.init(hidden))) for drafter in drafters]

    def key(place: int, row: int, part: Timing) -> tuple[int, int, Timing]:
        # The baseline beside all drafters is one.
        return place, row * (part != "baseline"), part

    timers: dict[tuple[int, int, Timing], Callable[[], float]] = {}
    for (place, config), (row, drafter) in product(enumerate(samplings), enumerate(drafters)):
        made = make_timers(
            target,
            drafter,
            held,
            handed[row],
            config,
            cached=cached,
            turns=turns,
            short_turns=short_turns,
        )
        timers |= {key(place, row, part): made[part] for part in parts}
    first, others = take_turns(timers, 1), take_turns(timers, repeats)
    if name is not None:
        first = track(first, len(timers), f"{name}: compile and warm up")
        others = track(others, len(timers) * repeats, name)
    for _ in first:
        pass
    seconds = defaultdict(list)
    for which, taken in others:
        seconds[which].append(taken)
    return [
        [
            {part: np.asarray(seconds[key(place, row, part)]) for part in parts}
            for place in range(len(samplings))
        ]
        for row in range(len(drafters))
    ]


def room_for(steps: int, max_path: int) -> int:
    """Slots that a row must have left for so many steps of paths up to `max_path`.

    The last step writes P slots past its own, and the token buffer is one ahead of the cache.
    """
    return (steps + 1) * max_path + 1


def make_timers(
    target: Target,
    drafter: Drafter,
    held: list[DecodeState],
    handed: HandedOn,
    config: SamplingConfig,
    *,
    cached: int,
    turns: int,
    short_turns: int,
) -> dict[Timing, Callable[[], float]]:
    """Seconds of one turn of each part, of the whole step and of the baseline's.

    Args:
      target: the target.
      drafter: from `bind_drafter`.
      held: the only state, which every run hands on to the next; but for its `drafter`.
      handed: by the drafter's runs in the same way.
      config: how tokens are chosen.
      cached: tokens in every row's cache when a run begins.
      turns: of propose, verify and whole steps in a run.
      short_turns: of finish and of the noise, which may take microseconds.
    """
    zero, rows = jnp.int32(0), [[0]] * len(held[0].root)
    sampling = prepare(target.config, Batch(rows, 1, config), 1)[0].sampling

    def run_turns(state: DecodeState, part: StepPart, turns: int) -> DecodeState:
        if handed.between is None:
            handed.between = empty_like(begin, target, drafter, state)
        state, handed.between = run_part(
            target, drafter, state, handed.between, zero, part=part, turns=turns
        )
        return state

    def timer(
        run: Callable[[DecodeState], DecodeState],
        turns: int,
        drafter: Drafter = drafter,
        handed: HandedOn = handed,
        *,
        done: bool = False,
    ) -> Callable[[], float]:
        def seconds() -> float:
            state = set_back(held[0], cached, drafter, sampling, done=done)
            state = jax.block_until_ready(state._replace(drafter=handed.drafter))
            started = time.perf_counter()
            ended = jax.block_until_ready(run(state))
            taken = time.perf_counter() - started
            handed.drafter, held[0] = ended.drafter, ended._replace(drafter=())
            return taken / turns

        return seconds

    def whole(drafter: Drafter, handed: HandedOn) -> Callable[[], float]:
        return timer(lambda state: decode(target, drafter, state, turns), turns, drafter, handed)

    def part(name: StepPart, turns: int) -> Callable[[], float]:
        return timer(partial(run_turns, part=name, turns=turns), turns, done=name == "finish")

    return {
        "propose": part("propose", turns),
        "verify": part("verify", turns),
        "finish": part("finish", short_turns),
        "noise": part("noise", short_turns),
        "step": whole(drafter, handed),
        "baseline": whole(RootOnly(), HandedOn(())),
    }


def set_back(
    state: DecodeState, cached: int, drafter: Drafter, sampling: Sampling, *, done: bool
) -> DecodeState:
    """The state with `cached` tokens in every row and no counts; its other arrays are reused."""
    B = len(state.root)
    return state._replace(
        cache=state.cache._replace(lengths=jnp.full(B, cached, jnp.int32)),
        done=jnp.full(B, done),
        # Copied, because the state is donated.
        sampling=jax.tree.map(jnp.copy, sampling),
        stats=no_counts(state.root, drafter.max_path, len(drafter.names)),
    )
