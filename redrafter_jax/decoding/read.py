"""Prefill: reads prompts into the cache in chunks, and chooses the first token after a prompt."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.decoding.accept import decide
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import root_tree
from redrafter_jax.models.cache import join_layers, split_layers
from redrafter_jax.models.target import Decoder
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import Decided, KVCache, Sampling

# Tokens of a chunk. A GPU reads every weight once per chunk, in the time that an H200 needs to
# multiply it by some 200 tokens (990 TFLOP/s over 4.8 TB/s at two bytes); the kernel's block is
# 256. A CPU's time grows with the number of tokens, padding included.
_CHUNK = {"cpu": 64}
_CHUNK_ELSEWHERE = 256


def chunk_length() -> int:
    """Return C, the number of tokens of a chunk on this platform."""
    return _CHUNK.get(jax.default_backend(), _CHUNK_ELSEWHERE)


def lookahead(drafter: Drafter) -> int:
    """Return the number of tokens after a cached token that its entries also depend on.

    It is 1 for a drafter with layers of its own, whose entry at a token depends on the next token.
    """
    return 0 if drafter.cache is None else 1


class ReadChunk(NamedTuple):
    """The result of reading a chunk of each row's prompt.

    Attributes:
      own: the drafter's state.
      cache: the cache with the chunk's entries.
      root: the first new token of rows whose prompt ends in the chunk; garbage for other rows.
      logits: the target's scores from which `root` was chosen; on a mesh possibly a shard of V.
      hidden: the target's hidden states at the tokens of the chunk, as in `Decided`.
    """

    own: Any
    cache: KVCache
    root: Int[Array, " B"]
    logits: Float[Array, "B 1 V"]
    hidden: Float[Array, "B C Z"]


def read_chunk(
    decoder: Decoder,
    drafter: Drafter,
    own: Any,
    cache: KVCache,
    tokens: Int[Array, "B Cplus1"],
    lengths: Int[Array, " B"],
    sampling: Sampling,
) -> ReadChunk:
    """Read C tokens of each prompt, and choose the root for prompts that end in the chunk.

    Args:
      decoder: the target.
      drafter: the drafter, which reads the same tokens.
      own: the drafter's state.
      cache: the cache, whose lengths are the start of the chunk; it must have room for the chunk.
      tokens: the C tokens and the token after them; arbitrary past the end of a prompt.
      lengths: number of prompt tokens; for a row that reads nothing, the number of cached tokens.
      sampling: sampling settings of the rows.
    """
    start, C = cache.lengths, tokens.shape[1] - 1
    chunk, V = tokens[:, :C], decoder.config.vocab_size
    count = jnp.clip(lengths - start, 0, C)
    target_layers, own_layers = split_layers(cache, len(decoder.layers))
    layers = drafter.layers(decoder.config)
    hidden, target_layers = decoder.extend(chunk, target_layers, count, layers)
    last = jnp.clip(lengths - 1 - start, 0, C - 1)
    ends = (start + C >= lengths) & (start < lengths)

    def choose() -> tuple[Int[Array, " B"], Float[Array, "B 1 part"]]:
        # The prompt's last token is the root of a one-node tree; the choice there is the new token.
        at_end = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        logits = decoder.logits(at_end)
        tree = root_tree(jnp.take_along_axis(chunk, last[:, None], axis=1)[:, 0])
        root, _ = decide(tree, logits, draw_noise(sampling, lengths, 1, V), sampling)
        return root[:, 0], logits

    def skip() -> tuple[Int[Array, " B"], Float[Array, "B 1 part"]]:
        return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(choose))

    root, logits = jax.lax.cond(ends.any(), choose, skip)
    at_last = ends[:, None] & (jnp.arange(C) == last[:, None])
    following = jnp.where(at_last, root[:, None], tokens[:, 1:])
    decided = Decided(chunk, following, hidden, start, count)
    own, own_layers = drafter.read(decoder, own, own_layers, decided)
    cache = join_layers(target_layers, own_layers)
    return ReadChunk(own, cache._replace(lengths=start + count), root, logits, hidden)
