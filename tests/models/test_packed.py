"""Passes in which the tokens of all rows are one row: each says what it says in its own row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import random_target, tiny_config
from trees import tree_of

from redrafter_jax.drafters.tree import pad_nodes
from redrafter_jax.models.cache import init_cache
from redrafter_jax.models.packed import forward_nodes, forward_tree_and_chunk
from redrafter_jax.models.target import Target
from redrafter_jax.types import KVCache, TokenTree

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Tokens that four rows have cached.
CACHED = [7, 3, 5, 0]
# A layer with a window, and one without.
CONFIG = tiny_config(sliding_window=4, windowed_layers=(0,))


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(CONFIG)


@pytest.fixture(scope="module")
def cache(target: Target) -> KVCache:
    tokens = jnp.asarray(np.random.default_rng(0).integers(24, size=(4, 8)), jnp.int32)
    empty = init_cache(CONFIG, 4, 32, jnp.float32)
    extend = jax.jit(target.merge().extend)
    return extend(tokens, empty, jnp.asarray(CACHED, jnp.int32))[1]


def rows_of(cache: KVCache, rows: slice) -> KVCache:
    return cache._replace(table=cache.table[rows], lengths=cache.lengths[rows])


def random_trees(nodes: int) -> tuple[TokenTree, list[list[int]]]:
    random = np.random.default_rng(2)
    parents = [oracles.random_parents(random, nodes, max_depth=4) for _ in range(2)]
    return tree_of(random.integers(24, size=(2, nodes)), parents), parents


def assert_alike(ours: Any, theirs: Any) -> None:
    for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=5e-5)


def test_some_nodes_say_what_they_say_among_all(target: Target, cache: KVCache) -> None:
    tree, parents = random_trees(9)
    cache = rows_of(cache, slice(2))
    # Three rows' worth of room: with every node all of its ancestors.
    kept = [0, *oracles.ancestors(parents[0], 8), 9, *(9 + n for n in range(1, 5))]
    nodes = sorted(set(kept))
    live = np.isin(np.arange(18), nodes).reshape(2, 9)
    padded = pad_nodes(tree, jnp.asarray(live))

    @jax.jit
    def run(target: Target, *given: Any) -> Any:
        tree, padded, cache, nodes = given
        decoder = target.merge()
        return forward_nodes(decoder, padded, cache, nodes), decoder.tree_forward(tree, cache)

    packed, whole = jax.tree.map(
        lambda leaf: np.asarray(leaf).reshape(18, -1)[nodes],
        run(target, tree, padded, cache, jnp.asarray(nodes, jnp.int32)),
    )
    assert_alike(packed, whole)


@pytest.mark.parametrize("layers", [(), (0,)])
def test_a_tree_and_a_chunk_say_in_one_pass_what_they_say_in_two(
    target: Target, cache: KVCache, layers: tuple[int, ...]
) -> None:
    tree, _ = random_trees(6)
    decoding, reading = rows_of(cache, slice(2)), rows_of(cache, slice(2, 4))
    chunk = jnp.asarray(np.random.default_rng(3).integers(24, size=(2, 5)), jnp.int32)

    @jax.jit
    def run(target: Target, *given: Any) -> Any:
        tree, decoding, chunk, reading = given
        decoder = target.merge()
        apart = (
            decoder.tree_forward(tree, decoding, layers),
            decoder.chunk_forward(chunk, reading, layers),
        )
        return forward_tree_and_chunk(decoder, tree, decoding, chunk, reading, layers), apart

    together, apart = run(target, tree, decoding, chunk, reading)
    assert_alike(together, apart)
