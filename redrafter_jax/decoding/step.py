"""One decode step: propose a tree, verify it in one target call, finish with what is accepted."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.decoding.accept import decide, is_stop, log_probs_of
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.errors import InputError
from redrafter_jax.models.cache import commit
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.mesh import per_shard
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import DecodeState, DecodeStats, KVCache, StepTrace, TokenTree, Verified


@per_shard
def decode_step(
    target: Target, drafter: Drafter, state: DecodeState
) -> tuple[DecodeState, StepTrace]:
    """Propose a tree, verify it, keep what the target chose itself.

    Args:
      target: the target model.
      drafter: from `bind_drafter`, checked for this target.
      state: from `start` for this drafter, or the step before.

    Raises:
      InputError: the state was made for shorter paths than the drafter's.
    """
    state, trace, _ = verified_step(target.merge(), drafter, state)
    return state, trace


def verified_step(
    decoder: Decoder, drafter: Drafter, state: DecodeState
) -> tuple[DecodeState, StepTrace, Verified]:
    """`decode_step` with the target's answers over the tree, for whoever reads its scores."""
    P = state.stats.accept_counts.shape[1]
    if drafter.max_path > P:
        raise InputError(
            f"The decode state has room for paths of {P} nodes, but the drafter's have "
            f"{drafter.max_path}; start one for this drafter, or call begin_drafting after prefill."
        )
    noise = step_noise(state, drafter.max_path, decoder.config.vocab_size)
    tree = drafter.propose(decoder, state, noise)
    verified = verify(decoder, tree, state.cache, drafter.context_layers)
    state, trace = finish(state, tree, verified, noise)
    observed = drafter.observe(state.drafter, verified, trace)
    return state._replace(drafter=observed), trace, verified


def step_noise(state: DecodeState, max_path: int, vocab_size: int) -> Float[Array, "B P V"]:
    """The noise of the P positions after the root."""
    return draw_noise(state.sampling, state.cache.lengths + 1, max_path, vocab_size)


def verify(
    decoder: Decoder, tree: TokenTree, cache: KVCache, context_layers: tuple[int, ...] = ()
) -> Verified:
    """One target pass over the tree; the cache, of the tokens above the root, is only read."""
    return decoder.tree_forward(tree, cache, context_layers)


def finish(
    state: DecodeState, tree: TokenTree, verified: Verified, noise: Float[Array, "B P V"]
) -> tuple[DecodeState, StepTrace]:
    """Accept and commit a path; a row ends at its stop token or its limit.

    Returns:
      The state after the step, but for the drafter's own, and what was decided.
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
    keys, values, chosen = jax.lax.optimization_barrier((verified.keys, verified.values, chosen))
    cache = commit(state.cache, keys, values, accepted.path, count)
    newest = jnp.maximum(count - 1, 0)[:, None]
    root = jnp.take_along_axis(gained, newest, axis=1)[:, 0]
    active = ~state.done
    # The state may count longer paths than this tree's.
    lengths = jnp.arange(state.stats.accept_counts.shape[1])
    accepted_by = state.stats.accepted_by
    if accepted_by is not None:
        origin = jnp.take_along_axis(tree.origin, accepted.path, axis=1)
        by = origin[..., None] == jnp.arange(accepted_by.shape[1])
        accepted_by = accepted_by + (by & kept[..., None]).sum(axis=1)
    log_probs = state.log_probs
    if log_probs is not None:
        whole = all_gather(verified.logits, noise.shape[-1])
        ours = jnp.take_along_axis(log_probs_of(whole, chosen), accepted.path, axis=1)
        log_probs = _write(log_probs, ours, state.cache.lengths + 1)
    after = state._replace(
        tokens=_write(state.tokens, gained, state.cache.lengths + 1),
        cache=cache,
        root=jnp.where(active, root, state.root),
        done=state.done | (stops & kept).any(axis=1) | (cache.lengths + 1 >= state.limits),
        stats=DecodeStats(
            accept_counts=state.stats.accept_counts + (lengths == count[:, None] - 1),
            accepted_by=accepted_by,
            steps=state.stats.steps + active,
        ),
        log_probs=log_probs,
    )
    return after, StepTrace(tree, chosen, accepted, count)


def _write(
    rows: Shaped[Array, "B S"], fresh: Shaped[Array, "B M"], start: Int[Array, " B"]
) -> Shaped[Array, "B S"]:
    return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(rows, fresh, start)


@partial(jax.jit, donate_argnames="state")
@per_shard
def decode(
    target: Target, drafter: Drafter, state: DecodeState, max_steps: Int[Array, ""] | int
) -> DecodeState:
    """Decode steps until every row is done, `max_steps` at most; the state is donated.

    Who calls it more than once prepares the drafter before, or each call does it anew.
    """
    prepared = drafter.prepare(Lender(target))

    def unfinished(carry: tuple[Array, DecodeState]) -> Bool[Array, ""]:
        count, state = carry
        return (count < max_steps) & ~state.done.all()

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        count, state = carry
        after, _ = decode_step(target, prepared, state)
        return count + 1, after

    _, state = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))
    return state
