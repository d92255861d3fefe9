"""Prompts into the cache, a chunk of fixed size at a time, and each row's first token."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.decoding.accept import decide, is_stop, log_probs_of
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import root_tree
from redrafter_jax.models.cache import init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.mesh import per_shard
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import DecodeState, DecodeStats, KVCache, Requests

# Tokens of a chunk. A GPU reads every weight once per chunk, in the time that an H200 needs to
# multiply it by some 200 tokens (990 TFLOP/s over 4.8 TB/s at two bytes), and the kernel takes 256.
# A CPU computes for as long as there are tokens, padding included.
_CHUNK = {"cpu": 64}
_CHUNK_ELSEWHERE = 256


def chunk_length() -> int:
    """C, tokens of a chunk that suit this platform."""
    return _CHUNK.get(jax.default_backend(), _CHUNK_ELSEWHERE)


class PrefixCache(NamedTuple):
    """Texts decoded before, and the cache that holds the first `cache.lengths` tokens of each.

    `PrefixCache(state.tokens, state.cache)` is what a decode state leaves to the next prompt.
    """

    tokens: Int[Array, "B S"]
    cache: KVCache


def empty_prefix(target: Target, batch: int, slots: int) -> PrefixCache:
    """Nothing yet, in the shape of S slots per row."""
    dtype = target.merge().dtype
    cache = init_cache(target.config, batch, slots, dtype)
    return PrefixCache(jnp.zeros((batch, slots), jnp.int32), cache)


@partial(
    jax.jit,
    static_argnames=("chunk", "log_probs", "context_layers"),
    donate_argnames="prefix",
)
@per_shard
def prefill(
    target: Target,
    requests: Requests,
    prefix: PrefixCache | None = None,
    *,
    chunk: int | None = None,
    log_probs: bool = False,
    context_layers: tuple[int, ...] = (),
) -> DecodeState:
    """Run the target over the prompts and choose each row's first token.

    The state's `drafter` is the hidden states at each prompt's last token, for `begin_drafting`.
    It compiles once for each number of rows, slots and stop tokens, each `chunk`, `log_probs` and
    `context_layers`, and with and without a prefix; not for each length of the prompts. Trees to
    come matter only through the slots.

    Args:
      target: the target model.
      requests: the checked and padded prompts.
      prefix: of the same rows and slots, donated. Where a prompt begins with the same tokens,
        their keys and values are taken from it; None starts from nothing.
      chunk: tokens per pass; None takes what suits the platform.
      log_probs: keep the log-probability of every new token.
      context_layers: of the drafter that will read the state.
    """
    last, cache = read_requests(target, requests, prefix, chunk, context_layers)
    state, logits = choose_first(target, requests, last, cache, max_path=1)
    if not log_probs:
        return state
    B, S = requests.tokens.shape
    whole = all_gather(logits, target.config.vocab_size)
    chosen = log_probs_of(whole, state.root[:, None])[:, 0]
    kept = jnp.zeros((B, S)).at[jnp.arange(B), requests.lengths].set(chosen)
    return state._replace(log_probs=kept)


def choose_first(
    target: Target,
    requests: Requests,
    last: Float[Array, "B Z"],
    cache: KVCache,
    max_path: int,
) -> tuple[DecodeState, Float[Array, "B 1 part"]]:
    """Each row's first token, from what `read_requests` returns; P is of the steps to come.

    Returns:
      The state after prefill, without log-probabilities, and the scores that the first tokens were
      chosen by; on a mesh maybe a part of V.
    """
    B = len(requests.lengths)
    logits = target.merge().logits(last[:, None])
    lengths = requests.lengths
    noise = draw_noise(requests.sampling, lengths, 1, target.config.vocab_size)
    rows = jnp.arange(B)
    # The prompt's last token is the root of a one-node tree, whose choice is the first new token.
    root, _ = decide(
        root_tree(requests.tokens[rows, lengths - 1]), logits, noise, requests.sampling
    )
    state = DecodeState(
        tokens=requests.tokens.at[rows, lengths].set(root[:, 0]),
        cache=cache,
        drafter=last,
        root=root[:, 0],
        done=is_stop(root, requests.stop_tokens)[:, 0] | (lengths + 1 >= requests.limits),
        limits=requests.limits,
        stop_tokens=requests.stop_tokens,
        sampling=requests.sampling,
        stats=zero_stats(lengths, max_path),
        log_probs=None,
    )
    return state, logits


def begin_drafting(state: DecodeState, drafter: Drafter) -> DecodeState:
    """The state of `prefill` with the drafter's own, and with counts for its trees."""
    stats = zero_stats(state.root, drafter.max_path, len(drafter.names))
    return state._replace(drafter=drafter.init(state.drafter), stats=stats)


@partial(jax.jit, static_argnames=("max_path", "sources"))
def zero_stats(like: Int[Array, " B"], max_path: int, sources: int = 0) -> DecodeStats:
    """Zeros for rows that lie on the devices as `like` does; O `sources`, 0 counts for none."""

    def zeros(width: int) -> Int[Array, "B width"]:
        return jnp.repeat(like[:, None] * 0, width, axis=1)

    return DecodeStats(zeros(max_path), zeros(sources) if sources else None, like * 0)


def read_requests(
    target: Target,
    requests: Requests,
    prefix: PrefixCache | None = None,
    chunk: int | None = None,
    context_layers: tuple[int, ...] = (),
) -> tuple[Float[Array, "B Z"], KVCache]:
    """The hidden states at the end of each prompt, and the cache with all prompts in it.

    The last chunk of a row ends with its prompt, so that it begins at or before what is still to
    be read and never runs past the slots. A row whose prompt is read repeats its last
    chunk while longer ones go on, to the same result. The arguments are those of `prefill`.
    """
    decoder, lengths = target.merge(), requests.lengths
    B, S = requests.tokens.shape
    C = min(S, chunk or chunk_length())
    if prefix is None:
        prefix, known = empty_prefix(target, B, S), jnp.zeros(B, jnp.int32)
    else:
        cached = jnp.arange(S) < prefix.cache.lengths[:, None]
        same = cached & (requests.tokens == prefix.tokens)
        # There is a first difference: a cache is never full to its last slot.
        known = jnp.argmin(same, axis=1).astype(jnp.int32)
    last_begin = jnp.maximum(lengths - C, 0)
    chunks = jnp.maximum(jnp.max((lengths - known + C - 1) // C), 1)

    def read(
        index: Int[Array, ""], carry: tuple[KVCache, Float[Array, "B Z"]]
    ) -> tuple[KVCache, Float[Array, "B Z"]]:
        cache, _ = carry
        begin = jnp.minimum(known + index * C, last_begin)
        fresh = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (C,)))(
            requests.tokens, begin
        )
        hidden, cache = decoder.extend(fresh, cache._replace(lengths=begin), context_layers)
        end = jnp.clip(lengths - 1 - begin, 0, C - 1)
        return cache, jnp.take_along_axis(hidden, end[:, None, None], axis=1)[:, 0]

    width = (len(context_layers) + 1) * target.config.hidden_size
    nothing = jnp.zeros((B, width), prefix.cache.keys[0].dtype)
    cache, last = jax.lax.fori_loop(0, chunks, read, (prefix.cache, nothing))
    return last, cache._replace(lengths=lengths)
