import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trees import tree_of

from redrafter_jax.models.cache import append, commit, init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.types import KVCache

jitted_commit = jax.jit(commit)

B, K, S, H, L, N, P = 3, 2, 12, 4, 2, 6, 3


def random_cache(random: np.random.Generator, lengths: object) -> KVCache:
    def side() -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(random.normal(size=(B, K, S, H)), jnp.float32) for _ in range(L))

    return KVCache(side(), side(), jnp.asarray(lengths, jnp.int32))


def random_nodes(random: np.random.Generator) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(random.normal(size=(B, N, K, H)), jnp.float32) for _ in range(L))


@given(st.integers(0, 2**32 - 1))
def test_commit_appends_the_path_to_the_decided_tokens(seed: int) -> None:
    random = np.random.default_rng(seed)
    # Up to the documented edge, `lengths + P == S`.
    lengths = random.integers(0, S - P + 1, B)
    count = random.integers(0, P + 1, B)
    path = np.sort(random.integers(0, N, (B, P)), axis=1)
    cache, keys, values = random_cache(random, lengths), random_nodes(random), random_nodes(random)
    after = jitted_commit(
        cache, keys, values, jnp.asarray(path, jnp.int32), jnp.asarray(count, jnp.int32)
    )
    assert after.lengths.tolist() == (lengths + count).tolist()
    # On the host, for a device compiles every slice.
    cache, after, keys, values = jax.tree.map(np.asarray, (cache, after, keys, values))
    sides = zip(cache.keys + cache.values, after.keys + after.values, keys + values, strict=True)
    for before, now, nodes in sides:
        for row in range(B):
            length = lengths[row]
            np.testing.assert_array_equal(now[row, :, :length], before[row, :, :length])
            for step in range(count[row]):
                np.testing.assert_array_equal(
                    now[row, :, length + step], nodes[row, path[row, step]]
                )


def test_committed_paths_are_the_cache_of_plain_decoding(target: Target) -> None:
    prefixes = np.asarray([[3, 1, 4, 1], [5, 9, 0, 0]], np.int32)
    lengths = jnp.asarray([4, 2], jnp.int32)
    #  root --+-- 1 ---- 3
    #         +-- 2 ---- 4
    tokens = jnp.asarray([[7, 3, 5, 4, 6], [8, 2, 9, 1, 0]], jnp.int32)
    tree = tree_of(tokens, [[0, 0, 0, 1, 2]] * 2)

    @jax.jit
    def decode(target: Target) -> tuple[KVCache, KVCache]:
        decoder = target.merge()
        empty = init_cache(target.config, 2, 16, jnp.float32)
        _, keys, values = decoder.forward(jnp.asarray(prefixes))
        cache = append(empty, keys, values, lengths)
        verified = decoder.tree_forward(tree, cache)
        # Row 0 accepts 0-2-4 and row 1 accepts the root alone.
        path = jnp.asarray([[0, 2, 4], [0, 0, 0]], jnp.int32)
        committed = commit(cache, verified.keys, verified.values, path, jnp.asarray([3, 1]))
        texts = jnp.asarray([[3, 1, 4, 1, 7, 5, 6], [5, 9, 8, 0, 0, 0, 0]], jnp.int32)
        _, keys, values = decoder.forward(texts)
        return committed, append(empty, keys, values, jnp.asarray([7, 3], jnp.int32))

    committed, plain = decode(target)
    assert committed.lengths.tolist() == plain.lengths.tolist() == [7, 3]
    for ours, theirs in zip(
        committed.keys + committed.values, plain.keys + plain.values, strict=True
    ):
        for row, length in enumerate((7, 3)):
            np.testing.assert_allclose(
                ours[row, :, :length], theirs[row, :, :length], rtol=0, atol=2e-5
            )
