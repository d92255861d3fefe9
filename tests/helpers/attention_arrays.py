"""Random arguments of tree attention, and what attention in float64 makes of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles

from pallas_kernels.tree_attention import PAGE


class Case(NamedTuple):
    """One call; a row for each length."""

    lengths: tuple[int, ...]
    nodes: int
    group: int  # query heads per key head
    slots: int
    head_dim: int = 64
    heads: int = 1  # of keys
    dtype: Any = jnp.bfloat16
    cores: int = 132


def random_inputs(case: Case, garbage: float | None = np.nan) -> dict[str, Any]:
    """A random tree for each row; slots past the lengths hold `garbage`, None for numbers.

    The cache is [B K S H], for `paged`.
    """
    keys = iter(jax.random.split(jax.random.key(case.nodes), 5))

    def draw(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape).astype(case.dtype)

    B, N, K, S, H = len(case.lengths), case.nodes, case.heads, case.slots, case.head_dim
    lengths = jnp.asarray(case.lengths, jnp.int32)
    inputs = {
        "q": draw(B, N, K * case.group, H),
        "k_cache": draw(B, K, S, H),
        "v_cache": draw(B, K, S, H),
        "lengths": lengths,
        "k_tree": draw(B, N, K, H),
        "v_tree": draw(B, N, K, H),
    }
    if garbage is not None:
        unused = jnp.arange(S)[:, None] >= lengths[:, None, None, None]
        for name in "k_cache", "v_cache":
            inputs[name] = jnp.where(unused, jnp.asarray(garbage, case.dtype), inputs[name])
    random = np.random.default_rng(N)
    trees = [oracles.random_parents(random, N, max_depth=5) for _ in range(B)]
    masks = [oracles.ancestor_mask(parents) for parents in trees]
    return inputs | {"mask": jnp.asarray(masks)}


def paged(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of tree attention: the slots of every row in pages, which lie anywhere."""
    B, K, S, H = inputs["k_cache"].shape
    M = -(-S // PAGE)
    table = np.random.default_rng(S).permutation(B * M).reshape(B, M)

    def cut(slots: Any) -> Any:
        # Past the last slot there is garbage too.
        padded = jnp.pad(slots, ((0, 0), (0, 0), (0, M * PAGE - S), (0, 0)), constant_values=np.nan)
        pages = padded.reshape(B, K, M, PAGE, H).transpose(0, 2, 1, 3, 4)
        return jnp.zeros((B * M, K, PAGE, H), slots.dtype).at[table].set(pages)

    cache = {name: cut(inputs[name]) for name in ("k_cache", "v_cache")}
    return inputs | cache | {"table": jnp.asarray(table, jnp.int32)}


def newest(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """The same, but only the last `count` nodes attend."""
    return inputs | {name: inputs[name][:, -count:] for name in ("q", "mask")}


def expected_output(inputs: dict[str, Any], scale: float, window: int = 10**6) -> np.ndarray:
    """Row by row over the decided tokens and the tree, in float64."""
    wide = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    rows = []
    for row, length in enumerate(inputs["lengths"]):
        past = [wide[f"{kind}_cache"][row].transpose(1, 0, 2)[:length] for kind in "kv"]
        tree = [wide[f"{kind}_tree"][row] for kind in "kv"]
        keys, values = (np.concatenate(parts) for parts in zip(past, tree, strict=True))
        mask = np.asarray(inputs["mask"][row])
        visible = np.concatenate([np.ones((len(mask), length), bool), mask], axis=1)
        # A node is as deep as it has ancestors.
        positions = length + mask.sum(axis=1) - 1
        visible &= positions[:, None] - np.append(np.arange(length), positions) < window
        rows.append(oracles.attention(wide["q"][row], keys, values, visible, scale))
    return np.stack(rows)
