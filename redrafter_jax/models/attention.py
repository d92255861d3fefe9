"""Attention of the target; only this module imports the kernels for attention and cache writes."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.tree_attention import PAGE as PAGE
from pallas_kernels.tree_attention import tree_attention as tree_attention

# Queries per block. Blocks bound the scores to [B, Q, 128, T], and skip the keys after the block.
_BLOCK = 128


def prefill_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    segments: Int[Array, "B T"] | None = None,
    beside: tuple[Float[Array, "B T J K H"], Float[Array, "B T J K H"]] | None = None,
) -> Float[Array, "B T Q H"]:
    """Causal self-attention over left-aligned sequences, with a float32 softmax.

    Rows may end in padding, which the causal mask hides from all real tokens.

    Args:
      q: queries.
      k: keys.
      v: values.
      scale: factor on the scores before the softmax.
      window: number of positions that a token attends to, its own position included; None for all
        positions up to its own.
      segments: number of each token's sequence, for rows that hold several sequences. Tokens of
        different sequences do not attend to each other. None for one sequence per row.
      beside: J further keys and values per position; only the token at this position attends to
        them.
    """
    T = q.shape[1]
    reach = T if window is None else window - 1
    blocks = []
    for start in range(0, T, _BLOCK):
        first, end = max(0, start - reach), min(start + _BLOCK, T)
        block = q[:, start:end], k[:, first:end], v[:, first:end]
        together = None
        if segments is not None:
            together = segments[:, start:end, None] == segments[:, None, first:end]
        own = beside and (beside[0][:, start:end], beside[1][:, start:end])
        blocks.append(_causal_block(*block, start - first, scale, window, together, own))
    return jnp.concatenate(blocks, axis=1)


def _causal_block(
    q: Float[Array, "B block Q H"],
    k: Float[Array, "B keys K H"],
    v: Float[Array, "B keys K H"],
    offset: int,
    scale: float,
    window: int | None,
    together: Bool[Array, "B block keys"] | None,
    beside: tuple[Float[Array, "B block J K H"], Float[Array, "B block J K H"]] | None,
) -> Float[Array, "B block Q H"]:
    """Attention of one block of queries; query i has the position of key `offset + i`."""
    B, block, Q, H = q.shape
    keys, K = k.shape[1:3]
    grouped = q.reshape(B, block, K, Q // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32)
    own, key = offset + jnp.arange(block)[:, None], jnp.arange(keys)
    visible = own >= key
    if window is not None:
        visible &= own - key < window
    if together is not None:
        visible = visible & together[:, None, None]
    scores = jnp.where(visible, scores * scale, -jnp.inf)
    if beside is not None:
        of_own = jnp.einsum(
            "BTKGH,BTJKH->BKGTJ", grouped, beside[0], preferred_element_type=jnp.float32
        )
        scores = jnp.concatenate([scores, of_own * scale], axis=-1)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    cast = weights.astype(v.dtype)
    weighted = jnp.einsum(
        "BKGTS,BSKH->BTKGH", cast[..., :keys], v, preferred_element_type=jnp.float32
    )
    if beside is not None:
        weighted += jnp.einsum(
            "BKGTJ,BTJKH->BTKGH", cast[..., keys:], beside[1], preferred_element_type=jnp.float32
        )
    total = weights.sum(axis=-1).transpose(0, 3, 1, 2)[..., None]
    return (weighted / total).reshape(B, block, Q, H).astype(q.dtype)


def write_rows(
    layers: tuple[Shaped[Array, "pages K page H"], ...],
    fresh: tuple[Shaped[Array, "B T K H"], ...],
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
) -> tuple[Shaped[Array, "pages K page H"], ...]:
    """Write new rows into cache layers, each at a page and a slot; return the layers.

    See `pallas_kernels.write_rows.write_rows`.
    """
    from pallas_kernels.write_rows import write_rows as write  # only needed while tracing a step

    return write(layers, fresh, page, slot)
