"""The cache in pages against lists of tokens."""

from typing import Any

import jax
import numpy as np
from cached import layers_of
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.tree_attention import PAGE
from redrafter_jax.models.cache import commit
from redrafter_jax.types import KVCache

jitted_commit = jax.jit(commit)

B, K, M, H, N, P = 3, 2, 2, 4, 6, 3
S = M * PAGE


def two_layers(random: np.random.Generator, *shape: int) -> Any:
    return tuple(random.normal(size=(2, *shape)).astype(np.float32))


def random_cache(random: np.random.Generator, lengths: Any) -> KVCache:
    """Rows whose pages lie anywhere, in a pool with pages that are nobody's."""
    pages = B * M + 2
    table: Any = random.permutation(pages)[: B * M].reshape(B, M).astype(np.int32)
    keys, values = (two_layers(random, pages, K, PAGE, H) for _ in range(2))
    return KVCache(keys, values, table, lengths)


def others(cache: KVCache, table: Any) -> list[np.ndarray]:
    """Pages that are in no row."""
    rest = np.setdiff1d(np.arange(len(cache.keys[0])), table)
    return [np.asarray(layer)[rest] for layer in (*cache.keys, *cache.values)]


@given(st.integers(0, 2**32 - 1))
def test_commit_appends_the_path_to_the_decided_tokens_and_changes_nothing_else(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths: Any = random.integers(0, S + 1, B).astype(np.int32)
    # Of a row that is full, nothing.
    count = np.minimum(random.integers(0, P + 1, B), S - lengths).astype(np.int32)
    path = np.sort(random.integers(0, N, (B, P)), axis=1).astype(np.int32)
    cache = random_cache(random, lengths)
    keys, values = two_layers(random, B, N, K, H), two_layers(random, B, N, K, H)
    after = jitted_commit(cache, keys, values, path, count)
    assert after.lengths.tolist() == (lengths + count).tolist()
    for before, now, nodes in zip(layers_of(cache), layers_of(after), keys + values, strict=True):
        for row, length in enumerate(lengths):
            for step in range(count[row]):
                before[row, :, length + step] = nodes[row, path[row, step]]
        np.testing.assert_array_equal(now, before)
    for before, now in zip(others(cache, cache.table), others(after, cache.table), strict=True):
        np.testing.assert_array_equal(now, before)
