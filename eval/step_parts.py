"""The parts of a decode step as programs that a clock can time: each many times in a row.

They are propose, verify, finish and the noise of `redrafter_jax.decoding.step`, on the arrays of a
real step; beside them the whole step and the baseline's.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from .abstract import random_state

StepPart = Literal["propose", "verify", "finish", "noise"]
Timing = Literal[StepPart, "step", "baseline"]


class StepArrays(NamedTuple):
    """What the parts of one step hand on to each other."""

    noise: Float[Array, "B P V"]
    tree: TokenTree
    verified: Verified


def begin_step(target: Target, drafter: Drafter, state: DecodeState) -> StepArrays:
    """A step up to what is left for `finish`."""
    decoder = target.merge()
    noise = step_noise(state, drafter.max_path, target.config.vocab_size)
    tree = drafter.prepare(decoder).propose(decoder, state, noise)
    verified = verify(decoder, tree, state.cache, drafter.context_layers)
    return StepArrays(noise, tree, verified)


@dataclass
class DrafterBuffers:
    """What the runs of one drafter hand on to each other, donated to each: its state first.

    Nothing has passed between the parts before the first of them has run.
    """

    drafter: Any
    between: StepArrays | None = None


@partial(jax.jit, static_argnames=("part", "turns"), donate_argnames=("state", "between"))
def run_part(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    between: StepArrays,
    zero: Int[Array, ""],
    *,
    part: StepPart,
    turns: int,
) -> tuple[DecodeState, StepArrays]:
    """The part so many times on the same arrays, which come back with what its last turn wrote.

    `state` and `between`, from `begin`, are donated. Only `finish` changes the state: give it rows
    that are done, which take all of its work and none of the slots.
    """
    decoder = target.merge()
    prepared = drafter.prepare(decoder)

    def turn(
        carry: tuple[DecodeState, StepArrays], none: Int[Array, ""]
    ) -> tuple[DecodeState, StepArrays]:
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
        return state, StepArrays(noise, tree, verified)

    return repeat(turn, (state, between), turns, zero)


@dataclass
class Runs:
    """Timed runs on one cache: each hands its state, which is donated, on to the next.

    There is no other state, but for its `drafter`. A run begins with `cached` tokens in every row's
    cache; `room_for` says what must be left.
    """

    target: Target
    state: DecodeState
    cached: int

    def seconds(
        self, part: Timing, turns: int, drafter: Drafter, handed: DrafterBuffers, sampling: Sampling
    ) -> float:
        """Of one turn in a run of so many; `handed` is what the drafter's last run handed on."""
        state = set_back(self.state, self.cached, drafter, sampling, done=part == "finish")
        state = jax.block_until_ready(state._replace(drafter=handed.drafter))
        if part in ("step", "baseline"):
            started = time.perf_counter()
            state = decode(self.target, drafter, state, turns)
        else:
            if handed.between is None:
                handed.between = empty_like(begin_step, self.target, drafter, state)
            zero = jax.block_until_ready(jnp.int32(0))
            started = time.perf_counter()
            state, handed.between = run_part(
                self.target, drafter, state, handed.between, zero, part=part, turns=turns
            )
        state = jax.block_until_ready(state)
        taken = time.perf_counter() - started
        handed.drafter, self.state = state.drafter, state._replace(drafter=())
        return taken / turns


def time_parts(
    target: Target,
    drafters: Sequence[Drafter],
    samplings: Sequence[SamplingConfig],
    batch_size: int,
    slots: int,
    *,
    turns: Mapping[Timing, int],
    cached: int,
    repeats: int,
    name: str | None = None,
) -> list[list[dict[Timing, Float[np.ndarray, " repeats"]]]]:
    """Seconds of one turn of each part, all of them timed in turns.

    The drafters are of one head. `turns` states which parts are timed and how many turns a run has,
    `cached` the tokens in every row's cache when one begins. Without a name no progress is shown.

    Returns:
      Under every sampling, for every drafter.
    """
    runs = Runs(target, random_state(target, drafters[0], batch_size, slots), cached)
    width = (len(drafters[0].context_layers) + 1) * target.config.hidden_size
    dtype = runs.state.cache.keys[0].dtype
    hidden = jax.random.normal(jax.random.key(3), (batch_size, width), dtype)
    # Copied, because the state is donated.
    handed = [DrafterBuffers(jax.tree.map(jnp.copy, drafter.init(hidden))) for drafter in drafters]

    def key(place: int, row: int, part: Timing) -> tuple[int, int, Timing]:
        # The baseline beside all drafters is one.
        return place, row * (part != "baseline"), part

    timers: dict[tuple[int, int, Timing], Callable[[], float]] = {}
    for (place, config), (row, drafter), part in product(
        enumerate(samplings), enumerate(drafters), turns
    ):
        sampling = prepare(target.config, Batch([[0]] * batch_size, 1, config), 1)[0].sampling
        own = (RootOnly(), DrafterBuffers(())) if part == "baseline" else (drafter, handed[row])
        timers[key(place, row, part)] = partial(runs.seconds, part, turns[part], *own, sampling)

    def take(repeats: int, what: str) -> Iterator[tuple[tuple[int, int, Timing], float]]:
        taken = take_turns(timers, repeats)
        return taken if name is None else track(taken, len(timers) * repeats, name + what)

    for _ in take(1, ": compile and warm up"):
        pass
    seconds = defaultdict(list)
    for which, taken in take(repeats, ""):
        seconds[which].append(taken)
    return [
        [
            {part: np.asarray(seconds[key(place, row, part)]) for part in turns}
            for row, _ in enumerate(drafters)
        ]
        for place, _ in enumerate(samplings)
    ]


def room_for(steps: int, max_path: int) -> int:
    """Slots that a row must have left for so many steps of paths up to `max_path`.

    The last step writes P slots past its own, and the token buffer is one ahead of the cache.
    """
    return (steps + 1) * max_path + 1


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
