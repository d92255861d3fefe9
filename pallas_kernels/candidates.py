"""What `pallas_kernels.bench` times: ways to compute tree attention, and a copy to hold them to."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels.timing import repeat
from pallas_kernels.tree_attention import tree_attention

CHILDREN = 4  # of every node of the tree that is timed; its shape costs nothing


class Case(NamedTuple):
    """Shapes of one call: S keys to see, the last N of them the tree's own."""

    query_heads: int
    key_heads: int
    head_dim: int
    batch: int
    slots: int
    nodes: int
    dtype: str

    @property
    def cache_bytes(self) -> int:
        """The keys and values of S tokens, once: what every implementation must read."""
        size = 2 * self.batch * self.key_heads * self.slots * self.head_dim
        return size * jnp.dtype(self.dtype).itemsize


class Inputs(NamedTuple):
    """Queries, pairs of keys and values that are read in turns, and what else `attend` takes."""

    q: Float[Array, "B N Q H"]
    caches: tuple[tuple[Array, Array], ...]
    rest: tuple[Array, ...]


class Candidate(NamedTuple):
    """A way to compute tree attention."""

    prepare: Callable[[Inputs], Inputs]  # from what `draw_tree_inputs` gives to what `attend` takes
    attend: Callable[..., Float[Array, "B N Q H"]]  # of queries, keys, values, a 0, and the rest


def draw_tree_inputs(case: Case, caches: int) -> Inputs:
    """Random arrays in the layout of `tree_attention`; S - N tokens are cached and N are nodes.

    The rest is lengths, the tree's keys and values, and its mask.
    """
    keys = iter(jax.random.split(jax.random.key(0), 2 * caches + 3))
    B, N, K, S, H = case.batch, case.nodes, case.key_heads, case.slots, case.head_dim

    def draw(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.dtype(case.dtype))

    q = draw(B, N, case.query_heads, H)
    pairs = tuple((draw(B, K, S, H), draw(B, K, S, H)) for _ in range(caches))
    tree = draw(B, N, K, H), draw(B, N, K, H), jnp.broadcast_to(tree_mask(N), (B, N, N))
    return Inputs(q, pairs, (jnp.full(B, S - N, jnp.int32), *tree))


def tree_mask(nodes: int) -> Bool[np.ndarray, "N N"]:
    """The ancestor mask of a tree whose node i is a child of node (i - 1) // 4."""
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[(node - 1) // CHILDREN]
    return mask


def _join_tree(inputs: Inputs, *, by_slots: bool = False) -> Inputs:
    """The same tokens for `jax.nn.dot_product_attention`: the tree at the end of each cache.

    The rest is its mask, [B 1 N S]. Caches are [B S K H] by slots, else [B K S H].
    """
    _, k_tree, v_tree, mask = inputs.rest
    B, N = mask.shape[:2]
    past = inputs.caches[0][0].shape[2] - N

    def join(cache: Float[Array, "B K S H"], tree: Float[Array, "B N K H"]) -> Array:
        joined = cache.at[:, :, past:].set(tree.swapaxes(1, 2))
        return joined.swapaxes(1, 2) if by_slots else joined

    caches = tuple((join(k, k_tree), join(v, v_tree)) for k, v in inputs.caches)
    visible = jnp.concatenate([jnp.ones((B, N, past), bool), mask], axis=2)
    return Inputs(inputs.q, caches, (visible[:, None],))


def _tree_attention(
    q: Array, keys: Array, values: Array, zero: Array, lengths: Array, *tree: Array, name: Any
) -> Array:
    arrays = q, keys, values, lengths + zero, *tree
    return tree_attention(*arrays, scale=q.shape[-1] ** -0.5, implementation=name)


def _dot_product(
    q: Array, keys: Array, values: Array, zero: Array, mask: Array, *, name: Any
) -> Array:
    if name == "xla":
        # It multiplies head by head, so XLA takes this transposition back.
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    q = q + zero.astype(q.dtype)
    return jax.nn.dot_product_attention(q, keys, values, mask=mask, implementation=name)


CANDIDATES = {
    "mosaic_gpu": Candidate(lambda inputs: inputs, partial(_tree_attention, name="mosaic_gpu")),
    "reference": Candidate(lambda inputs: inputs, partial(_tree_attention, name="reference")),
    "dot_product xla": Candidate(_join_tree, partial(_dot_product, name="xla")),
    "dot_product cudnn": Candidate(
        partial(_join_tree, by_slots=True), partial(_dot_product, name="cudnn")
    ),
}


def attention_program(attend: Callable[..., Array], turns: int) -> Callable[..., Array]:
    """From `Inputs` and 0 to the last outputs; every turn reads each of the caches once.

    The outputs of one call are the queries of the next, so no call can start before it.
    """
    attend = jax.jit(attend)  # traced and lowered once for all caches

    def run(inputs: Inputs, zero: Int[Array, ""]) -> Float[Array, "B N Q H"]:
        def turn(q: Array, none: Int[Array, ""]) -> Array:
            for keys, values in inputs.caches:
                q = attend(q, keys, values, none, *inputs.rest)
            return q

        return repeat(turn, inputs.q, turns, zero)

    return jax.jit(run)


def copy_program(turns: int) -> Callable[..., UInt[Array, " n"]]:
    """Reads and writes the whole array in every turn; the array is donated."""

    def run(array: UInt[Array, " n"], zero: Int[Array, ""]) -> UInt[Array, " n"]:
        return repeat(
            lambda array, none: array + (none + 1).astype(array.dtype), array, turns, zero
        )

    return jax.jit(run, donate_argnums=0)
