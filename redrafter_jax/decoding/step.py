"""One decode step: propose a tree, verify it in one target call, finish with what is accepted."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.config import TreeConfig
from redrafter_jax.config.drafting import longest_path
from redrafter_jax.decoding.accept import decide, is_stop
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import merge_trees, pad_nodes, root_tree, share_nodes
from redrafter_jax.models.cache import commit, first_layers, join_layers, split_layers
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.mesh import per_shard
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import (
    Decided,
    DecodeState,
    KVCache,
    StepTrace,
    TokenTree,
    Verified,
    View,
)


@per_shard
def decode_step(
    target: Target, drafter: Drafter, state: DecodeState, *, tree: TreeConfig | None
) -> tuple[DecodeState, StepTrace]:
    """One decode step by itself; loops are made of `verified_step`.

    Args:
      target: the target model.
      drafter: the drafter, checked for this target.
      state: from `read_rows` with this drafter, or from the step before.
      tree: the shape of the tree; None is the root alone, as in autoregressive decoding.
    """
    state, trace, _ = verified_step(target.merge(), drafter, state, tree)
    return state, trace


def verified_step(
    decoder: Decoder, drafter: Drafter, state: DecodeState, tree: TreeConfig | None
) -> tuple[DecodeState, StepTrace, Verified]:
    """One decode step within a compiled program: propose, verify, finish, read the path.

    Args:
      decoder: the merged target.
      drafter: the drafter, checked for this target.
      state: the state that reading a prompt, or the step before, has left.
      tree: the shape of the tree; None is the root alone.

    Returns:
      The state; what was decided; the target's scores and hidden states over the tree.
    """
    noise = step_noise(state, longest_path(tree), decoder.config.vocab_size)
    seen = as_asked(state)
    drafted = propose(decoder, drafter, seen, noise, tree)
    nodes = None
    if tree is not None and (total := tree.shared_nodes(len(state.root))):
        drafted, nodes = share_nodes(drafted, ~state.done, total)
    return decide_step(decoder, drafter, state, seen.cache, drafted, noise, nodes)


def as_asked(state: DecodeState) -> DecodeState:
    """The state as models see it in a step.

    Attention goes as far as the longest text, and those of rows that are done are not asked.
    """
    lengths = jnp.where(state.done, 0, state.cache.lengths)
    return state._replace(cache=state.cache._replace(lengths=lengths))


def decide_step(
    decoder: Decoder,
    drafter: Drafter,
    state: DecodeState,
    cache: KVCache,
    drafted: TokenTree,
    noise: Float[Array, "B P V"],
    nodes: Int[Array, " M"] | None = None,
) -> tuple[DecodeState, StepTrace, Verified]:
    """What follows in a step once a tree is proposed; returns what `verified_step` does.

    Args:
      decoder: the merged target.
      drafter: the drafter.
      state: the state before the step.
      cache: of the state `as_asked`.
      drafted: the tree.
      noise: from `step_noise`.
      nodes: as in `verify`.
    """
    verified = verify(decoder, drafted, cache, drafter.layers(decoder.config), nodes)
    after, trace = finish(decoder, state, drafted, verified, noise)
    return read_path(decoder, drafter, state, after, verified, trace), trace, verified


def step_noise(state: DecodeState, max_path: int, vocab_size: int) -> Float[Array, "B P V"]:
    """The noise of the P positions after the root."""
    return draw_noise(state.sampling, state.cache.lengths + 1, max_path, vocab_size)


def propose(
    decoder: Decoder,
    drafter: Drafter,
    state: DecodeState,
    noise: Float[Array, "B P V"],
    tree: TreeConfig | None,
) -> TokenTree:
    """The drafter's tree, and the nodes that prompt lookup adds; rows may draft nothing."""
    if tree is None:
        return root_tree(state.root)
    view = View(state.tokens, state.cache.lengths, state.root, state.sampling)
    target_layers, own_layers = split_layers(state.cache, decoder.config)
    cache = join_layers(first_layers(target_layers, drafter.target_layers), own_layers)
    return draft(decoder, drafter, state.own, cache, view, state.speculates, noise, tree)


def draft(
    decoder: Decoder,
    drafter: Drafter,
    own: Any,
    cache: KVCache,
    view: View,
    speculates: Bool[Array, " B"],
    noise: Float[Array, "B P V"],
    tree: TreeConfig,
) -> TokenTree:
    """`propose` from what the drafter itself sees: its state, its layers and the rows."""
    asked = tree.without_lookup
    drafted = drafter.propose(decoder, own, cache, view, noise[:, : asked.max_path], asked)
    if tree.lookup_tokens:
        from redrafter_jax.drafters.lookup import look_up

        # The drafter may propose the first tokens too; a longer chain still adds C nodes.
        looked_up = look_up(view, tree.draft_rounds + tree.lookup_tokens)
        drafted = merge_trees(drafted, looked_up, tree.lookup_tokens)
    return pad_nodes(drafted, speculates[:, None] | (drafted.depth == 0))


def verify(
    decoder: Decoder,
    tree: TokenTree,
    cache: KVCache,
    context_layers: tuple[int, ...] = (),
    nodes: Int[Array, " M"] | None = None,
) -> Verified:
    """One target pass over the tree, or some of its nodes, as `share_nodes` gives them.

    The cache, of the tokens above the root, is only read.
    """
    target_layers, _ = split_layers(cache, decoder.config)
    return decoder.tree_forward(tree, target_layers, context_layers, nodes)


def read_path(
    decoder: Decoder,
    drafter: Drafter,
    before: DecodeState,
    after: DecodeState,
    verified: Verified,
    trace: StepTrace,
) -> DecodeState:
    """The state after a step, with what the drafter reads of the path that was accepted."""
    decided = decided_path(before, verified, trace)
    target_layers, own_layers = split_layers(after.cache, decoder.config)
    own_layers = own_layers._replace(lengths=decided.start)
    own, own_layers = drafter.read(decoder, before.own, own_layers, decided)
    return after._replace(own=own, cache=join_layers(target_layers, own_layers))


def decided_path(before: DecodeState, verified: Verified, trace: StepTrace) -> Decided:
    """The path that a step accepted, as drafters read it."""
    path = trace.accepted.path
    following = jnp.take_along_axis(trace.chosen, path, axis=1)
    return Decided(
        tokens=jnp.concatenate([before.root[:, None], following[:, :-1]], axis=1),
        following=following,
        hidden=jnp.take_along_axis(verified.hidden, path[..., None], axis=1),
        start=before.cache.lengths,
        count=trace.gained,
    )


def finish(
    decoder: Decoder,
    state: DecodeState,
    tree: TokenTree,
    verified: Verified,
    noise: Float[Array, "B P V"],
) -> tuple[DecodeState, StepTrace]:
    """Accept and commit a path; a row ends at its stop token or its limit.

    Returns:
      The state after the step, before the drafter reads the path, and what was decided.
    """
    chosen, accepted = decide(tree, verified.logits, noise, state.sampling)
    gained = jnp.take_along_axis(chosen, accepted.path, axis=1)
    P = gained.shape[1]
    order = jnp.arange(P)
    stops = is_stop(gained, state.stop_tokens) & (order < accepted.count[:, None])
    until_stop = jnp.min(jnp.where(stops, order + 1, P), axis=1)
    room = state.limits - (state.cache.lengths + 1)
    count = jnp.minimum(jnp.minimum(accepted.count, until_stop), room)
    count = jnp.where(state.done, 0, count)
    kept = order < count[:, None]

    # What the target chose has read every layer's cache: only then may it be written. XLA for CPUs
    # would write the baseline's one token at once and copy the whole cache for its readers.
    # The barrier is around where it is written alone: keys and values would be copied for it.
    lengths, chosen = jax.lax.optimization_barrier((state.cache.lengths, chosen))
    target_layers, own_layers = split_layers(state.cache._replace(lengths=lengths), decoder.config)
    keys, values = verified.keys, verified.values
    cache = join_layers(commit(target_layers, keys, values, accepted.path, count), own_layers)
    newest = jnp.maximum(count - 1, 0)[:, None]
    root = jnp.take_along_axis(gained, newest, axis=1)[:, 0]
    active = ~state.done
    after = state._replace(
        tokens=_write(state.tokens, gained, state.cache.lengths + 1),
        cache=cache,
        root=jnp.where(active, root, state.root),
        done=state.done | (stops & kept).any(axis=1) | (cache.lengths + 1 >= state.limits),
    )
    return after, StepTrace(tree, chosen, accepted, count)


def _write(
    rows: Shaped[Array, "B S"], fresh: Shaped[Array, "B M"], start: Int[Array, " B"]
) -> Shaped[Array, "B S"]:
    """The rows with fresh entries from `start` on; there is room for them."""
    own = jnp.arange(len(rows))[:, None]
    places = start[:, None] + jnp.arange(fresh.shape[1])
    return rows.at[own, places].set(fresh, mode="drop", unique_indices=True)
