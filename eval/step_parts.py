"""A decode step and its four parts as programs that a clock can time: each many times in a row.

The parts are those of `redrafter_jax.decoding.step.decode_step`, on the arrays of a real step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from redrafter_jax.decoding.finish import advance
from redrafter_jax.decoding.tree_pass import tree_pass

from pallas_kernels.timing import empty_like, repeat
from redrafter_jax.config import DraftConfig
from redrafter_jax.decoding.accept import accept, choose_tokens
from redrafter_jax.decoding.step import draft_scorer, draft_tree
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.program import program
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import Accepted, DecodeState, DecodeStats, Sampling, TokenTree, Verified

Zero = Int[Array, ""]


@program(static_argnames=("draft", "turns"))
def run_draft(
    target: Target,
    drafter: DraftModel,
    state: DecodeState,
    noise: Float[Array, "B P V"],
    zero: Zero,
    *,
    draft: DraftConfig,
    turns: int,
) -> TokenTree:
    """The beam search and the tree, with what it copies."""
    decoder = target.merge()
    scorer = draft_scorer(decoder, drafter)

    def turn(_: TokenTree | None, none: Zero) -> TokenTree:
        cache = state.cache._replace(lengths=state.cache.lengths + none)
        fresh = state._replace(root=state.root + none, cache=cache)
        return draft_tree(decoder, drafter, fresh, noise, state.sampling, draft, scorer)

    return repeat(turn, empty_like(turn, None, zero), turns, zero)


@program(static_argnames=("draft", "turns", "context_layers"))
def run_verify(
    target: Target,
    state: DecodeState,
    tree: TokenTree,
    zero: Zero,
    *,
    draft: DraftConfig,
    turns: int,
    context_layers: tuple[int, ...] = (),
) -> Verified:
    """The target's pass over the tree, its cache left as it is."""
    decoder = target.merge()

    def turn(_: Verified | None, none: Zero) -> Verified:
        cache = state.cache._replace(lengths=state.cache.lengths + none)
        fresh = tree._replace(tokens=tree.tokens + none)
        return tree_pass(decoder, fresh, cache, state.done, draft, context_layers)

    return repeat(turn, empty_like(turn, None, zero), turns, zero)


@program(static_argnames=("max_path", "turns"))
def run_accept(
    logits: Float[Array, "B N V"],
    tree: TokenTree,
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    zero: Zero,
    *,
    max_path: int,
    turns: int,
) -> tuple[Int[Array, "B N"], Accepted]:
    """The target's choice at every node, and the chain of nodes that spell it."""

    def turn(
        _: tuple[Int[Array, "B N"], Accepted] | None, none: Zero
    ) -> tuple[Int[Array, "B N"], Accepted]:
        fresh = tree._replace(depth=tree.depth + none, tokens=tree.tokens + none)
        warm = sampling._replace(temperature=sampling.temperature + none)
        chosen = choose_tokens(logits, fresh.depth, noise, warm)
        return chosen, accept(fresh, chosen, max_path)

    return repeat(turn, empty_like(turn, None, zero), turns, zero)


@program(static_argnames=("turns", "copies"), donate_argnames="state")
def run_commit(
    state: DecodeState,
    verified: Verified,
    chosen: Int[Array, "B N"],
    accepted: Accepted,
    zero: Zero,
    *,
    turns: int,
    copies: int,
) -> DecodeState:
    """The accepted path into the cache, and all else that ends a step; the state is donated."""

    def turn(state: DecodeState, none: Zero) -> DecodeState:
        return advance(state, verified, chosen + none, accepted, copies)

    return repeat(turn, state, turns, zero)


@program(static_argnames=("max_path", "vocab_size"))
def make_noise(state: DecodeState, *, max_path: int, vocab_size: int) -> Float[Array, "B P V"]:
    """The noise of one step from this state."""
    return draw_noise(state.sampling, state.cache.lengths + 1, max_path, vocab_size)


def set_back(state: DecodeState, cached: int, max_path: int, *, done: bool) -> DecodeState:
    """The state with `cached` tokens in every row and P of `max_path`; its arrays are reused.

    Rows that are done take all of a step's work and none of its slots.
    """
    B = len(state.root)
    return state._replace(
        cache=state.cache._replace(lengths=jnp.full(B, cached, jnp.int32)),
        done=jnp.full(B, done),
        stats=DecodeStats(
            accept_counts=jnp.zeros((B, max_path), jnp.int32),
            copied_tokens=jnp.zeros(B, jnp.int32),
            steps=jnp.zeros(B, jnp.int32),
        ),
    )


def fill_state(shapes: DecodeState) -> DecodeState:
    """A greedy state whose cache and context are random, and whose rows never end.

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
