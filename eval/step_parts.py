"""The parts of a decode step as programs that a clock can time: each many times in a row.

They are propose, verify and finish of `redrafter_jax.decoding.step`, on the arrays of a real step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.timing import empty_like, repeat
from redrafter_jax.decoding.step import finish, step_noise, verify
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.program import program
from redrafter_jax.types import DecodeState, DecodeStats, Sampling, TokenTree, Verified

Zero = Int[Array, ""]


@program(static_argnames="turns")
def run_propose(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    noise: Float[Array, "B P V"],
    zero: Zero,
    *,
    turns: int,
) -> TokenTree:
    """The drafter's tree."""
    decoder = target.merge()
    prepared = drafter.prepare(decoder)

    def turn(none: Zero) -> TokenTree:
        fresh = state._replace(
            root=state.root + none,
            cache=state.cache._replace(lengths=state.cache.lengths + none),
            drafter=jax.tree.map(lambda leaf: leaf + none.astype(leaf.dtype), state.drafter),
        )
        return prepared.propose(decoder, fresh, noise, state.sampling)

    return _repeat_alone(turn, turns, zero)


@program(static_argnames=("context_layers", "turns"))
def run_verify(
    target: Target,
    state: DecodeState,
    tree: TokenTree,
    zero: Zero,
    *,
    context_layers: tuple[int, ...],
    turns: int,
) -> Verified:
    """The target's pass over the tree; its cache is only read."""
    decoder = target.merge()

    def turn(none: Zero) -> Verified:
        cache = state.cache._replace(lengths=state.cache.lengths + none)
        return verify(decoder, tree._replace(tokens=tree.tokens + none), cache, context_layers)

    return _repeat_alone(turn, turns, zero)


@program(static_argnames="turns", donate_argnames="state")
def run_finish(
    drafter: Drafter,
    state: DecodeState,
    tree: TokenTree,
    verified: Verified,
    noise: Float[Array, "B P V"],
    zero: Zero,
    *,
    turns: int,
) -> DecodeState:
    """Choice, acceptance, commit, and what the drafter keeps of it; the state is donated."""

    def turn(state: DecodeState, none: Zero) -> DecodeState:
        fresh = tree._replace(depth=tree.depth + none, tokens=tree.tokens + none)
        warm = state.sampling._replace(temperature=state.sampling.temperature + none)
        after, trace = finish(state._replace(sampling=warm), fresh, verified, noise)
        return after._replace(drafter=drafter.observe(state.drafter, verified, trace))

    return repeat(turn, state, turns, zero)


@program(static_argnames=("max_path", "vocab_size", "turns"))
def run_noise(
    state: DecodeState, zero: Zero, *, max_path: int, vocab_size: int, turns: int
) -> Float[Array, "B P V"]:
    """The noise of one step from this state."""

    def turn(none: Zero) -> Float[Array, "B P V"]:
        cache = state.cache._replace(lengths=state.cache.lengths + none)
        return step_noise(state._replace(cache=cache), max_path, vocab_size)

    return _repeat_alone(turn, turns, zero)


def _repeat_alone(turn: Callable[[Zero], Any], turns: int, zero: Zero) -> Any:
    """The last of so many turns, none of which reads what the one before returned."""
    return repeat(lambda _, none: turn(none), empty_like(turn, zero), turns, zero)


def set_back(
    state: DecodeState, cached: int, drafter: Drafter, sampling: Sampling, *, done: bool
) -> DecodeState:
    """The state with `cached` tokens in every row and no counts; its other arrays are reused.

    Rows that are done take all of a step's work and none of its slots.
    """
    B, sources = len(state.root), len(drafter.names)
    return state._replace(
        cache=state.cache._replace(lengths=jnp.full(B, cached, jnp.int32)),
        done=jnp.full(B, done),
        # Copied, because the state may be donated.
        sampling=jax.tree.map(jnp.copy, sampling),
        stats=DecodeStats(
            accept_counts=jnp.zeros((B, drafter.max_path), jnp.int32),
            accepted_by=jnp.zeros((B, sources), jnp.int32) if sources else None,
            steps=jnp.zeros(B, jnp.int32),
        ),
    )


def fill_state(shapes: DecodeState) -> DecodeState:
    """A greedy state whose cache is random, as is the drafter's own, and whose rows never end.

    Args:
      shapes: from `eval.abstract.abstract_state`.
    """
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    arrays = [
        jax.random.normal(key, leaf.shape, leaf.dtype)
        if leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    state: DecodeState = jax.tree.unflatten(structure, arrays)
    return state._replace(
        limits=jnp.full_like(state.limits, jnp.iinfo(jnp.int32).max),
        stop_tokens=jnp.full_like(state.stop_tokens, -1),
    )
