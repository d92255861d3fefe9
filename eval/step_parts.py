"""The parts of a decode step as programs to be timed, each many times in a row.

They are propose, verify, finish and the noise of `redrafter_jax.decoding.step`, on the arrays of a
real step; beside them the whole step and the baseline's.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.timing import empty_like, repeat, take_turns
from redrafter_jax.config import SamplingConfig
from redrafter_jax.decoding.prefill import zero_stats
from redrafter_jax.decoding.step import decode, finish, step_noise, verify
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Target
from redrafter_jax.requests import Batch, pad_requests
from redrafter_jax.types import DecodeState, Sampling, TokenTree, Verified

from .abstract import random_state

StepPart = Literal["propose", "verify", "finish", "noise"]
Timing = Literal[StepPart, "step", "baseline"]


class StepArrays(NamedTuple):
    """What the parts of one step pass on to each other."""

    noise: Float[Array, "B P V"]
    tree: TokenTree
    verified: Verified


def begin_step(target: Target, drafter: Drafter, state: DecodeState) -> StepArrays:
    """A step without `finish`."""
    decoder = target.merge()
    noise = step_noise(state, drafter.max_path, target.config.vocab_size)
    tree = drafter.propose(decoder, state, noise)
    verified = verify(decoder, tree, state.cache, drafter.context_layers)
    return StepArrays(noise, tree, verified)


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
    """Run the part so many times on the same arrays; returns them as its last turn left them.

    `state` and `between`, from `begin_step`, are donated. Only `finish` changes the state: give it
    rows that are done, which cost all of its work and take no slots.
    """
    decoder = target.merge()
    prepared = drafter.prepare(Lender(target))

    def turn(
        carry: tuple[DecodeState, StepArrays], none: Int[Array, ""]
    ) -> tuple[DecodeState, StepArrays]:
        state, (noise, tree, verified) = carry
        # Every part depends on these, which XLA must take to differ from turn to turn.
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
            sampling = state.sampling._replace(temperature=state.sampling.temperature + none)
            after, trace = finish(state._replace(sampling=sampling), varied, verified, noise)
            state = after._replace(drafter=drafter.observe(state.drafter, verified, trace))
        return state, StepArrays(noise, tree, verified)

    return repeat(turn, (state, between), turns, zero)


@dataclass
class StepTimer:
    """Timed runs on one cache, each of which donates its state to the next.

    A run begins with `cached` tokens in every row's cache; `slots_needed` is what it needs beyond.
    `between` is None before the first run of a part.
    """

    target: Target
    drafter: Drafter
    state: DecodeState
    cached: int
    between: StepArrays | None = None

    def seconds(self, part: Timing, turns: int, sampling: Sampling) -> float:
        """Seconds per turn of a run of so many."""
        own = self.state.drafter
        drafter = RootOnly() if part == "baseline" else self.drafter
        state = reset_state(self.state, self.cached, drafter, sampling, done=part == "finish")
        if part == "baseline":
            state = state._replace(drafter=())
        state = jax.block_until_ready(state)
        if part in ("step", "baseline"):
            started = time.perf_counter()
            state = decode(self.target, drafter, state, turns)
        else:
            if self.between is None:
                self.between = empty_like(begin_step, self.target, drafter, state)
            zero = jax.block_until_ready(jnp.int32(0))
            started = time.perf_counter()
            state, self.between = run_part(
                self.target, drafter, state, self.between, zero, part=part, turns=turns
            )
        state = jax.block_until_ready(state)
        taken = time.perf_counter() - started
        self.state = state._replace(drafter=own) if part == "baseline" else state
        return taken / turns


def time_parts(
    target: Target,
    drafter: Drafter,
    samplings: Sequence[SamplingConfig],
    batch_size: int,
    slots: int,
    *,
    turns: Mapping[Timing, int],
    cached: int,
    repeats: int,
) -> list[dict[Timing, Float[np.ndarray, " repeats"]]]:
    """For every sampling the seconds of one turn of each part, all of them timed in turns.

    `turns` has the number of turns in a run of each part. A run begins with `cached` tokens in
    every row's cache.
    """
    timer = StepTimer(target, drafter, random_state(target, drafter, batch_size, slots), cached)
    timers: dict[tuple[int, Timing], Callable[[], float]] = {}
    for index, config in enumerate(samplings):
        sampling = pad_requests(target.config, Batch([[0]] * batch_size, 1, config), 1)[0].sampling
        for part, count in turns.items():
            timers[index, part] = partial(timer.seconds, part, count, sampling)
    for _ in take_turns(timers, 1):  # compile and warm up
        pass
    seconds = defaultdict(list)
    for which, taken in take_turns(timers, repeats):
        seconds[which].append(taken)
    return [
        {part: np.asarray(seconds[index, part]) for part in turns}
        for index, _ in enumerate(samplings)
    ]


def slots_needed(steps: int, max_path: int) -> int:
    """Free slots that a row needs for so many steps of paths up to `max_path` (P).

    The last step writes P slots past its own, and the token buffer is one ahead of the cache.
    """
    return (steps + 1) * max_path + 1


def reset_state(
    state: DecodeState, cached: int, drafter: Drafter, sampling: Sampling, *, done: bool
) -> DecodeState:
    """The state with `cached` tokens in every row and no counts; its other arrays are reused."""
    B = len(state.root)
    return state._replace(
        cache=state.cache._replace(lengths=jnp.full(B, cached, jnp.int32)),
        done=jnp.full(B, done),
        # Copied, because the state is donated.
        sampling=jax.tree.map(jnp.copy, sampling),
        stats=zero_stats(state.root, drafter.max_path, len(drafter.names)),
    )
