"""Prefill: reads prompts into the cache in chunks, and chooses the first new token of each row."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.decoding.accept import decide
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import root_tree
from redrafter_jax.models.cache import join_layers, split_layers
from redrafter_jax.models.target import Decoder, Passed, append_chunk
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import Decided, KVCache, Sampling

# Tokens of a chunk. A GPU reads every weight once per chunk. In the time of this read, an H200 can
# multiply the weight by about 200 tokens (990 TFLOP/s over 4.8 TB/s, two bytes per weight); the
# kernel's block is 256. On a CPU the time grows with the number of tokens, padding included, so
# chunks are short.
_CHUNK = {"cpu": 64}
_CHUNK_ELSEWHERE = 256


def chunk_length() -> int:
    """Return C, the number of tokens in a chunk of a prompt, on this platform."""
    return _CHUNK.get(jax.default_backend(), _CHUNK_ELSEWHERE)


def joins_steps() -> bool:
    """Return whether to read a chunk and decode a step in one target pass rather than in two.

    One pass reads the weights once instead of twice. This is faster where reading the weights takes
    most of a step's time: on all platforms except CPUs.
    """
    return jax.default_backend() != "cpu"


def lookahead(drafter: Drafter) -> int:
    """Return the number of following tokens on which the cache entries of a token depend.

    The number is 1 for a drafter with its own layers in the cache, because such a layer may read
    each token together with the next token. Otherwise the number is 0.
    """
    return 0 if drafter.cache is None else 1


class ReadChunk(NamedTuple):
    """The result of reading a chunk of each row's prompt.

    Attributes:
      own: the drafter's state.
      cache: the cache, to which the keys and values of the chunk have been added.
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
    """Read C tokens of each prompt, and choose the first new token if a prompt ends in the chunk.

    Args:
      decoder: the target.
      drafter: the drafter, which reads the same tokens.
      own: the drafter's state.
      cache: the cache, with room for the chunk; its `lengths` are the positions at which the chunk
        starts.
      tokens: the C tokens of the chunk and the token after them; arbitrary past the end of a
        prompt.
      lengths: number of prompt tokens; for a row that reads nothing, the number of cached tokens.
      sampling: sampling settings of the rows.
    """
    target_layers, _ = split_layers(cache, len(decoder.layers))
    layers = drafter.layers(decoder.config)
    passed = decoder.chunk_forward(tokens[:, :-1], target_layers, layers)
    return finish_chunk(decoder, drafter, own, cache, tokens, lengths, sampling, passed)


def finish_chunk(
    decoder: Decoder,
    drafter: Drafter,
    own: Any,
    cache: KVCache,
    tokens: Int[Array, "B Cplus1"],
    lengths: Int[Array, " B"],
    sampling: Sampling,
    passed: Passed,
) -> ReadChunk:
    """Run the part of `read_chunk` after `passed`, the target's pass over the C tokens."""
    start, C = cache.lengths, tokens.shape[1] - 1
    chunk, V = tokens[:, :C], decoder.config.vocab_size
    count = jnp.clip(lengths - start, 0, C)
    target_layers, own_layers = split_layers(cache, len(decoder.layers))
    hidden, target_layers = append_chunk(target_layers, passed, count)
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
