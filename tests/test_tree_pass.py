"""Dead slots cost a CPU no time, and nobody sees whether they were verified."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from tiny_models import random_target, tiny_config

from redrafter_jax import DraftConfig, make_mesh
from redrafter_jax.sharding import per_part, place
from redrafter_jax.target import Target
from redrafter_jax.tree import graft, root_tree
from redrafter_jax.tree_pass import prefix_sizes, tree_pass
from redrafter_jax.types import KVCache, TokenTree, Verified

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Two nodes of the beams, three copied ones.
COPYING = DraftConfig(beam_width=1, draft_rounds=1, lookup_tokens=3)
S = 16


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (DraftConfig(4, 4), (17,)),
        (DraftConfig(4, 4, num_nodes=12), (12,)),
        # 4 final beams of 4 tokens have 8 to 17 nodes, the root included.
        (DraftConfig(4, 4, final_beams_only=True), (12, 17)),
        (DraftConfig(4, 4, num_nodes=6, final_beams_only=True), (6,)),
        (DraftConfig(6, 4, num_nodes=12, lookup_tokens=8), (4, 12)),
        (DraftConfig(4, 4, final_beams_only=True, lookup_tokens=2), (12, 17, 19)),
        (DraftConfig(2, 2, num_nodes=1), (1,)),
        (DraftConfig(2, 2, num_nodes=3, lookup_tokens=2), (1, 3)),
    ],
    ids=str,
)
def test_prefix_sizes(draft: DraftConfig, expected: tuple[int, ...]) -> None:
    assert prefix_sizes(draft) == expected


def copying_trees(found: list[bool]) -> TokenTree:
    """The root and one child; below it three copied tokens in the rows that have a copy."""
    B = len(found)
    chain = root_tree(jnp.arange(B, dtype=jnp.int32))
    one = graft(chain, jnp.full((B, 1), 5, jnp.int32), jnp.ones(B, bool), 1)
    copied = jnp.asarray([[5, 7, 8, 9]] * B, jnp.int32)
    return graft(one, copied, jnp.asarray(found), 3)


def some_cache(target: Target, rows: int) -> KVCache:
    """Random keys and values; the rows are of different lengths."""
    config = target.config
    shape = (config.num_hidden_layers, rows, config.num_key_value_heads, S, config.head_dim)
    keys = tuple(jax.random.normal(jax.random.key(0), shape))
    values = tuple(jax.random.normal(jax.random.key(1), shape))
    return KVCache(keys, values, jnp.arange(3, 3 + rows, dtype=jnp.int32))


def verify(target: Target, tree: TokenTree, cache: KVCache) -> Verified:
    return tree_pass(target.merge(), tree, cache, COPYING, (0,))


def verify_whole(target: Target, tree: TokenTree, cache: KVCache) -> Verified:
    return target.merge().tree_forward(tree, cache, (0,))


@pytest.mark.parametrize(
    ("found", "width"), [([False, False], 2), ([False, True], 5), ([True, True], 5)]
)
def test_live_nodes_come_out_as_of_the_whole_tree(found: list[bool], width: int) -> None:
    target, tree = random_target(), copying_trees(found)
    cache = some_cache(target, 2)
    verified = jax.jit(verify)(target, tree, cache)
    expected = jax.jit(verify_whole)(target, tree, cache)
    live = np.asarray(tree.tokens) >= 0
    assert live.sum(axis=1).tolist() == [5 if copy else 2 for copy in found]
    for ours, theirs in zip(jax.tree.leaves(verified), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours[live], theirs[live], rtol=1e-4, atol=1e-5)
        # What was not computed is zero, and only that.
        assert not ours[:, width:].any()
        assert np.asarray(ours[:, :width] != 0).mean() > 0.99


def test_devices_verify_as_many_slots_as_their_own_rows_need() -> None:
    config = tiny_config(num_hidden_layers=1)
    target, tree, mesh = random_target(config), copying_trees([False, True]), make_mesh(2, 2)

    def hidden(target: Target, tree: TokenTree, cache: KVCache) -> Array:
        # Each layer's products are summed over the two devices that share a row.
        return verify(target, tree, cache).hidden

    cache = some_cache(target, 2)
    expected = jax.jit(verify_whole)(target, tree, cache).hidden
    split = place((target, tree, cache), mesh)
    verified = jax.jit(partial(per_part, hidden, mesh))(*split)
    np.testing.assert_allclose(verified[0, :2], expected[0, :2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(verified[1], expected[1], rtol=1e-4, atol=1e-5)
    assert not verified[0, 2:].any()
