"""One decode step: propose a tree, verify it in one target call, accept and commit a path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from redrafter_jax.config import TreeConfig
from redrafter_jax.config.drafting import longest_path
from redrafter_jax.decoding.accept import decide, is_stop
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import merge_trees, pad_nodes, root_tree, share_nodes
from redrafter_jax.models.cache import commit, first_layers, join_layers, split_layers
from redrafter_jax.models.target import Decoder, Passed, Target
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
    """Run one decode step as a separate program; within a program, call `verified_step` instead.

    Args:
      target: the target model.
      drafter: the drafter, checked for this target by `bind_models`.
      state: the state from `read_rows` with this drafter, or from the previous step.
      tree: the shape of the tree; with None, the tree is only the root, as in autoregressive
        decoding.

    Returns:
      The state after the step, and the step's trace.
    """
    state, trace, _ = verified_step(target.merge(), drafter, state, tree)
    return state, trace


def verified_step(
    decoder: Decoder, drafter: Drafter, state: DecodeState, tree: TreeConfig | None
) -> tuple[DecodeState, StepTrace, Verified]:
    """Run one decode step within a compiled program, from the proposal to reading the path.

    Args:
      decoder: the target, as returned by `Target.merge`.
      drafter: the drafter, checked for this target by `bind_models`.
      state: the state after reading a prompt, or after the previous step.
      tree: the shape of the tree; with None, the tree is only the root.

    Returns:
      The state after the step, the step's trace, and the target's outputs over the tree.
    """
    noise = step_noise(state, longest_path(tree), decoder.config.vocab_size)
    seen = as_asked(state)
    drafted = propose(decoder, drafter, seen, noise, tree)
    nodes = None
    if tree is not None and (total := tree.shared_nodes(len(state.root))):
        drafted, nodes = share_nodes(drafted, ~state.done, total)
    return decide_step(decoder, drafter, state, seen.cache, drafted, noise, nodes)


def as_asked(state: DecodeState) -> DecodeState:
    """Return the state with cache length 0 for rows that are done, so that attention skips them."""
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
    """Run the part of a step after the proposal; the result is that of `verified_step`.

    The target verifies the tree, `finish` updates the rows, and the drafter reads the accepted
    path.

    Args:
      decoder: the target, as returned by `Target.merge`.
      drafter: the drafter.
      state: the state before the step.
      cache: the cache of `state`, with length 0 in rows that are done, from `as_asked(state)`.
      drafted: the proposed tree.
      noise: noise from `step_noise`.
      nodes: indices of the nodes to verify, as in `verify`.
    """
    verified = verify(decoder, drafted, cache, drafter.layers(decoder.config), nodes)
    return *settle_step(decoder, drafter, state, drafted, verified, noise), verified


def settle_step(
    decoder: Decoder,
    drafter: Drafter,
    state: DecodeState,
    drafted: TokenTree,
    verified: Verified,
    noise: Float[Array, "B P V"],
) -> tuple[DecodeState, StepTrace]:
    """Run the part of a step after the verification: update the rows, read the accepted path."""
    after, trace = finish(decoder, state, drafted, verified, noise)
    return read_path(decoder, drafter, state, after, verified, trace), trace


def step_noise(state: DecodeState, max_path: int, vocab_size: int) -> Float[Array, "B P V"]:
    """Return the noise at the P positions after the root, from `draw_noise`."""
    return draw_noise(state.sampling, state.cache.lengths + 1, max_path, vocab_size)


def propose(
    decoder: Decoder,
    drafter: Drafter,
    state: DecodeState,
    noise: Float[Array, "B P V"],
    tree: TreeConfig | None,
) -> TokenTree:
    """Draft the next tree of every row, with the nodes that prompt lookup adds."""
    if tree is None:
        return root_tree(state.root)
    view = View(state.tokens, state.cache.lengths, state.root, state.sampling)
    target_layers, own_layers = split_layers(state.cache, len(decoder.layers))
    cache = join_layers(first_layers(target_layers, drafter.target_layers), own_layers)
    asked = tree.without_lookup
    drafted = drafter.propose(decoder, state.own, cache, view, noise[:, : asked.max_path], asked)
    if tree.lookup_tokens:
        from redrafter_jax.drafters.lookup import look_up

        # The drafter's tree may already hold the first tokens of the chain, up to its own depth.
        # The chain is longer by this depth, so that C nodes can be added all the same.
        looked_up = look_up(view, tree.draft_rounds + tree.lookup_tokens)
        drafted = merge_trees(drafted, looked_up, tree.lookup_tokens)
    return pad_nodes(drafted, state.speculates[:, None] | (drafted.depth == 0))


def verify(
    decoder: Decoder,
    tree: TokenTree,
    cache: KVCache,
    context_layers: tuple[int, ...] = (),
    nodes: Int[Array, " M"] | None = None,
) -> Verified:
    """Run one target pass over the tree; the cache is only read.

    The cache holds the tokens before the root. `nodes` are indices into the B * N nodes of the
    batch, from `share_nodes`. If they are given, the pass computes only these M nodes.
    """
    target_layers, _ = split_layers(cache, len(decoder.layers))
    if nodes is not None:
        from redrafter_jax.models.packed import forward_nodes

        return forward_nodes(decoder, tree, target_layers, nodes, context_layers)
    return decoder.tree_forward(tree, target_layers, context_layers)


def verify_with_chunk(
    decoder: Decoder,
    tree: TokenTree,
    cache: KVCache,
    chunk: Int[Array, "G C"],
    chunk_cache: KVCache,
    context_layers: tuple[int, ...] = (),
) -> tuple[Verified, Passed]:
    """Run `verify` and the target pass of `read_chunk`, for G other rows, as one target pass."""
    from redrafter_jax.models.packed import forward_tree_and_chunk

    target_layers, _ = split_layers(cache, len(decoder.layers))
    chunk_layers, _ = split_layers(chunk_cache, len(decoder.layers))
    return forward_tree_and_chunk(decoder, tree, target_layers, chunk, chunk_layers, context_layers)


def read_path(
    decoder: Decoder,
    drafter: Drafter,
    before: DecodeState,
    after: DecodeState,
    verified: Verified,
    trace: StepTrace,
) -> DecodeState:
    """Let the drafter read the accepted path, and return the state after the step.

    `before` is the state before the step, and `after` is the state that `finish` returns.
    """
    decided = decided_path(before, verified, trace)
    target_layers, own_layers = split_layers(after.cache, len(decoder.layers))
    # `finish` has already advanced lengths; drafters write from the path's start.
    own_layers = own_layers._replace(lengths=decided.start)
    own, own_layers = drafter.read(decoder, before.own, own_layers, decided)
    return after._replace(own=own, cache=join_layers(target_layers, own_layers))


def decided_path(before: DecodeState, verified: Verified, trace: StepTrace) -> Decided:
    """Return the accepted path of a step as the input of `Drafter.read`."""
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
    """Accept a path, and write its keys and values to the cache.

    A row ends where the path reaches a stop token or the row's limit.

    Returns:
      The state after the step, in which the drafter has not read the path yet; and the trace.
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

    # Barrier: all reads of the cache must precede the in-place write, or XLA copies the cache (as
    # it does on CPUs for autoregressive decoding). It ties `lengths`, which say where to write, to
    # `chosen`, which depends on all reads; keys and values in a barrier would be copied.
    lengths, chosen = jax.lax.optimization_barrier((state.cache.lengths, chosen))
    cache = state.cache._replace(lengths=lengths)
    target_layers, own_layers = split_layers(cache, len(decoder.layers))
    keys, values = verified.keys, verified.values
    cache = join_layers(commit(target_layers, keys, values, accepted.path, count), own_layers)
    newest = jnp.maximum(count - 1, 0)[:, None]
    root = jnp.take_along_axis(gained, newest, axis=1)[:, 0]
    active = ~state.done
    after = state._replace(
        tokens=write_tokens(state.tokens, gained, state.cache.lengths + 1),
        cache=cache,
        root=jnp.where(active, root, state.root),
        done=state.done | (stops & kept).any(axis=1) | (cache.lengths + 1 >= state.limits),
    )
    return after, StepTrace(tree, chosen, accepted, count)


def write_tokens(
    rows: Shaped[Array, "B S"], fresh: Shaped[Array, "B M"], start: Int[Array, " B"]
) -> Shaped[Array, "B S"]:
    """Write M fresh entries to each row from index `start` on; each row must have room for M."""
    own = jnp.arange(len(rows))[:, None]
    places = start[:, None] + jnp.arange(fresh.shape[1])
    return rows.at[own, places].set(fresh, mode="drop", unique_indices=True)
