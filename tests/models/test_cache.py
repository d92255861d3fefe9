from typing import Any

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from redrafter_jax.models.cache import commit
from redrafter_jax.types import KVCache

jitted_commit = jax.jit(commit)

B, K, S, H, N, P = 3, 2, 12, 4, 6, 3


def two_layers(random: np.random.Generator, *shape: int) -> Any:
    return tuple(random.normal(size=(2, *shape)).astype(np.float32))


@given(st.integers(0, 2**32 - 1))
def test_commit_appends_the_path_to_the_decided_tokens(seed: int) -> None:
    random = np.random.default_rng(seed)
    # Up to the documented edge, `lengths + P == S`.
    lengths: Any = random.integers(0, S - P + 1, B).astype(np.int32)
    count = random.integers(0, P + 1, B).astype(np.int32)
    path = np.sort(random.integers(0, N, (B, P)), axis=1).astype(np.int32)
    cache = KVCache(two_layers(random, B, K, S, H), two_layers(random, B, K, S, H), lengths)
    keys, values = two_layers(random, B, N, K, H), two_layers(random, B, N, K, H)
    # On the host, for a device compiles every slice.
    after = jax.tree.map(np.asarray, jitted_commit(cache, keys, values, path, count))
    assert after.lengths.tolist() == (lengths + count).tolist()
    sides = zip(cache.keys + cache.values, after.keys + after.values, keys + values, strict=True)
    for before, now, nodes in sides:
        for row, length in enumerate(lengths):
            expected = before[row].copy()
            for step in range(count[row]):
                expected[:, length + step] = nodes[row, path[row, step]]
            decided = slice(length + count[row])
            np.testing.assert_array_equal(now[row, :, decided], expected[:, decided])
