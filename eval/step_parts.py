"""The parts of a decode step as programs to be timed, each many times in a row.

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
from redrafter_jax.decoding.prefill import zero_stats
from redrafter_jax.decoding.step import decode, finish, step_noise, verify
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Target
from redrafter_jax.progress import track
from redrafter_jax.engine.requests import Batch, pad_requests
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


@dataclass
class Buffers:
    """What each run of a drafter passes on to the next, to which it is donated.

    `drafter` is the drafter's state; `between` is None before the first run of a part.
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
    """Timed runs on one cache: each donates its state to the next, except the drafter's.

    A run begins with `cached` tokens in every row's cache; `slots_needed` is what it needs beyond.
    """

    target: Target
    state: DecodeState
    cached: int

    def seconds(
        self, part: Timing, turns: int, drafter: Drafter, buffers: Buffers, sampling: Sampling
    ) -> float:
        """Seconds per turn of a run of so many; `buffers` are those of the drafter."""
        state = reset_state(self.state, self.cached, drafter, sampling, done=part == "finish")
        state = jax.block_until_ready(state._replace(drafter=buffers.drafter))
        if part in ("step", "baseline"):
            started = time.perf_counter()
            state = decode(self.target, drafter, state, turns)
        else:
            if buffers.between is None:
                buffers.between = empty_like(begin_step, self.target, drafter, state)
            zero = jax.block_until_ready(jnp.int32(0))
            started = time.perf_counter()
            state, buffers.between = run_part(
                self.target, drafter, state, buffers.between, zero, part=part, turns=turns
            )
        state = jax.block_until_ready(state)
        taken = time.perf_counter() - started
        buffers.drafter, self.state = state.drafter, state._replace(drafter=())
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

    The drafters are of one head. `turns` has the number of turns in a run of each part. A run
    begins with `cached` tokens in every row's cache. Without a name no progress is shown.

    Returns:
      For every sampling and every drafter the seconds of each part.
    """
    timer = StepTimer(target, random_state(target, drafters[0], batch_size, slots), cached)
    width = (len(drafters[0].context_layers) + 1) * target.config.hidden_size
    dtype = timer.state.cache.keys[0].dtype
    hidden = jax.random.normal(jax.random.key(3), (batch_size, width), dtype)
    # Copied, because the state is donated.
    buffers = [Buffers(jax.tree.map(jnp.copy, drafter.init(hidden))) for drafter in drafters]

    def key(index: int, row: int, part: Timing) -> tuple[int, int, Timing]:
        # All drafters share one baseline.
        return index, row * (part != "baseline"), part

    timers: dict[tuple[int, int, Timing], Callable[[], float]] = {}
    for (index, config), (row, drafter), part in product(
        enumerate(samplings), enumerate(drafters), turns
    ):
        sampling = pad_requests(target.config, Batch([[0]] * batch_size, 1, config), 1)[0].sampling
        own = (RootOnly(), Buffers(())) if part == "baseline" else (drafter, buffers[row])
        timers[key(index, row, part)] = partial(timer.seconds, part, turns[part], *own, sampling)

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
            {part: np.asarray(seconds[key(index, row, part)]) for part in turns}
            for row, _ in enumerate(drafters)
        ]
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
