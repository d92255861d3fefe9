"""The end of a decode step: the accepted path into the state, and which rows it ends."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from redrafter_jax.decoding.accept import is_stop, log_probs_of
from redrafter_jax.models.cache import commit
from redrafter_jax.types import Accepted, DecodeState, DecodeStats, Verified


def advance(
    state: DecodeState,
    verified: Verified,
    chosen: Int[Array, "B N"],
    accepted: Accepted,
    copies: int,
) -> DecodeState:
    """Commit the accepted path; a row ends at its stop token or its limit.

    Args:
      state: before the step.
      verified: the target's answers over the tree.
      chosen: its next token at every node.
      accepted: from `accept`.
      copies: how many of the tree's nodes, its last ones, are copied.
    """
    gained = jnp.take_along_axis(chosen, accepted.path, axis=1)
    P = gained.shape[1]
    order = jnp.arange(P)
    stops = is_stop(gained, state.stop_tokens) & (order < accepted.count[:, None])
    until_stop = jnp.min(jnp.where(stops, order + 1, P), axis=1)
    room = state.limits - (state.cache.lengths + 1)
    count = jnp.minimum(jnp.minimum(accepted.count, until_stop), room)
    count = jnp.where(state.done, 0, count)

    # What the target chose has read every layer's cache: only then may it be written. XLA for CPUs
    # would write plain decoding's one token at once and copy the whole cache for its readers.
    keys, values, chosen = jax.lax.optimization_barrier((verified.keys, verified.values, chosen))
    cache = commit(state.cache, keys, values, accepted.path, count)
    newest = jnp.maximum(count - 1, 0)[:, None]
    node = jnp.take_along_axis(accepted.path, newest, axis=1)
    context = jnp.take_along_axis(verified.hidden, node[..., None], axis=1)[:, 0]
    root = jnp.take_along_axis(gained, newest, axis=1)[:, 0]
    stopped = (stops & (order < count[:, None])).any(axis=1)
    active = ~state.done
    copied = (accepted.path >= chosen.shape[1] - copies) & (order < count[:, None])
    log_probs = state.log_probs
    if log_probs is not None:
        ours = jnp.take_along_axis(log_probs_of(verified.logits, chosen), accepted.path, axis=1)
        log_probs = _write(log_probs, ours, state.cache.lengths + 1)
    return state._replace(
        tokens=_write(state.tokens, gained, state.cache.lengths + 1),
        cache=cache,
        context=jnp.where(active[:, None], context, state.context),
        root=jnp.where(active, root, state.root),
        done=state.done | stopped | (cache.lengths + 1 >= state.limits),
        stats=DecodeStats(
            accept_counts=state.stats.accept_counts + (order == count[:, None] - 1),
            copied_tokens=state.stats.copied_tokens + copied.sum(axis=1),
            steps=state.stats.steps + active,
        ),
        log_probs=log_probs,
    )


def _write(
    rows: Shaped[Array, "B S"], fresh: Shaped[Array, "B M"], start: Int[Array, " B"]
) -> Shaped[Array, "B S"]:
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
        rows, fresh, start
    )
