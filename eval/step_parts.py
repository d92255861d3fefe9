"""The parts of a decode step as separate programs, timed over many iterations.

The parts, from `redrafter_jax.decoding.step`, are propose (drafting), verify (the target call),
finish (the accepted path, and the drafter's reading of it) and the sampling noise. They run on the
arrays of a whole step. The whole step and the baseline's step are timed too.
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
from redrafter_jax.config import SamplingConfig, TreeConfig
from redrafter_jax.config.drafting import longest_path
from redrafter_jax.decoding.step import finish, propose, read_path, step_noise, verify
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.engine.device import decode_rows
from redrafter_jax.engine.requests import Batch, check_batch
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Target
from redrafter_jax.types import DecodeState, Sampling, TokenTree, Verified

from .abstract import random_state
from .row_sampling import stack_sampling

StepPart = Literal["propose", "verify", "finish", "noise"]
Timing = Literal[StepPart, "step", "baseline"]


class StepArrays(NamedTuple):
    """Arrays that the parts of one step pass to each other.

    Attributes:
      noise: sampling noise of the P positions that the step may decide.
      drafted: the draft tree.
      verified: the target's outputs at the nodes of the tree.
    """

    noise: Float[Array, "B P V"]
    drafted: TokenTree
    verified: Verified


def begin_step(
    target: Target, drafter: Drafter, state: DecodeState, *, tree: TreeConfig
) -> StepArrays:
    """Run the parts of a step before finish: the noise, propose and verify."""
    decoder = target.merge()
    noise = step_noise(state, longest_path(tree), target.config.vocab_size)
    drafted = propose(decoder, drafter, state, noise, tree)
    verified = verify(decoder, drafted, state.cache, drafter.layers(decoder.config))
    return StepArrays(noise, drafted, verified)


@partial(jax.jit, static_argnames=("tree", "part", "turns"), donate_argnames=("state", "between"))
def run_part(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    between: StepArrays,
    zero: Int[Array, ""],
    *,
    tree: TreeConfig,
    part: StepPart,
    turns: int,
) -> tuple[DecodeState, StepArrays]:
    """Run a part `turns` times on the same arrays; return the arrays after the last iteration.

    `drafter` is the result of `Drafter.prepare`, and `between` that of `begin_step`. `state` and
    `between` are donated. Only the part "finish" changes the state. For this part, all rows should
    be done: finish does the same work for such rows but uses no cache slots. `zero` is the
    argument of `repeat`.
    """
    decoder = target.merge()

    def turn(
        carry: tuple[DecodeState, StepArrays], none: Int[Array, ""]
    ) -> tuple[DecodeState, StepArrays]:
        state, (noise, drafted, verified) = carry
        # Make every part depend on the loop, so that XLA cannot hoist it out.
        lengths, tokens = state.cache.lengths + none, drafted.tokens + none
        cache = state.cache._replace(lengths=lengths)
        if part == "noise":
            varied = state._replace(cache=cache)
            noise = step_noise(varied, longest_path(tree), target.config.vocab_size)
        elif part == "propose":
            own = jax.tree.map(lambda leaf: leaf + none.astype(leaf.dtype), state.own)
            varied = state._replace(root=state.root + none, cache=cache, own=own)
            drafted = propose(decoder, drafter, varied, noise, tree)
        elif part == "verify":
            varied = drafted._replace(tokens=tokens)
            verified = verify(decoder, varied, cache, drafter.layers(decoder.config))
        else:
            varied = drafted._replace(depth=drafted.depth + none, tokens=tokens)
            sampling = state.sampling._replace(temperature=state.sampling.temperature + none)
            before = state._replace(sampling=sampling)
            after, trace = finish(decoder, before, varied, verified, noise)
            state = read_path(decoder, drafter, before, after, verified, trace)
        return state, StepArrays(noise, drafted, verified)

    return repeat(turn, (state, between), turns, zero)


@dataclass
class StepTimer:
    """Timed runs on one cache: each run donates its state to the next.

    Attributes:
      target: the target.
      drafter: the drafter, from `Drafter.prepare`.
      tree: shape of the draft trees.
      state: decode state; its cache has at least `slots_needed` slots more than `cached`.
      cached: number of tokens in the cache of every row when a run begins.
      between: arrays that the parts pass to each other; None before the first run.
    """

    target: Target
    drafter: Drafter
    tree: TreeConfig
    state: DecodeState
    cached: int
    between: StepArrays | None = None

    def seconds(self, part: Timing, turns: int, sampling: Sampling) -> float:
        """Time a run of `turns` iterations of a part; return the seconds per iteration."""
        # The baseline passes on the drafter's part of the state without reading it.
        drafter, tree = (RootOnly(), None) if part == "baseline" else (self.drafter, self.tree)
        state = reset_state(self.state, self.cached, sampling, done=part == "finish")
        rows, zero = jnp.arange(len(state.root)), jnp.int32(0)
        if self.between is None:
            begin = partial(begin_step, tree=self.tree)
            self.between = empty_like(begin, self.target, self.drafter, state)
        jax.block_until_ready((state, rows, zero, self.between))
        started = time.perf_counter()
        if part in ("step", "baseline"):
            state, _ = decode_rows(self.target, drafter, state, rows, turns, tree=tree, steps=turns)
        else:
            state, self.between = run_part(
                self.target,
                drafter,
                state,
                self.between,
                zero,
                tree=self.tree,
                part=part,
                turns=turns,
            )
        self.state = jax.block_until_ready(state)
        return (time.perf_counter() - started) / turns


def time_parts(
    target: Target,
    drafter: Drafter,
    tree: TreeConfig,
    samplings: Sequence[SamplingConfig],
    batch_size: int,
    slots: int,
    *,
    turns: Mapping[Timing, int],
    cached: int,
    repeats: int,
) -> list[dict[Timing, Float[np.ndarray, " repeats"]]]:
    """Time all parts of a step under every sampling.

    Args:
      target: the target.
      drafter: the drafter.
      tree: shape of the draft trees.
      samplings: sampling settings.
      batch_size: B, number of rows.
      slots: S, number of cache slots per row.
      turns: number of iterations of a run, for each part.
      cached: number of tokens in the cache of every row when a run begins.
      repeats: number of timed runs of each part under each sampling. One run of every part under
        every sampling comes before the next repeat.

    Returns:
      For each sampling, the seconds per iteration of every run, by part.
    """
    state = random_state(target, drafter, batch_size, slots)
    timer = StepTimer(target, drafter.prepare(Lender(target)), tree, state, cached)
    timers: dict[tuple[int, Timing], Callable[[], float]] = {}
    for index, config in enumerate(samplings):
        rows = check_batch(target.config, Batch([[0]] * batch_size, 1, config))
        sampling = stack_sampling(target.config, rows)
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
    """Return the free slots that a row needs for `steps` steps of up to P = `max_path` tokens each.

    The last step writes P slots beyond its path, and the token buffer is one token ahead of the
    cache.
    """
    return (steps + 1) * max_path + 1


def reset_state(state: DecodeState, cached: int, sampling: Sampling, *, done: bool) -> DecodeState:
    """Return the state with `cached` tokens in every row; all other arrays are reused.

    `sampling` are the sampling settings of the rows, and `done` whether the rows are done.
    """
    B = len(state.root)
    return state._replace(
        cache=state.cache._replace(lengths=jnp.full(B, cached, jnp.int32)),
        done=jnp.full(B, done),
        # Copied, because the state is donated.
        sampling=jax.tree.map(jnp.copy, sampling),
    )
