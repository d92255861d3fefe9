"""What no row needs costs a CPU no time, and nobody sees whether it was verified."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool
from tiny_models import random_target, tiny_config

from redrafter_jax import DraftConfig, make_mesh
from redrafter_jax.decoding.tree_pass import prefix_sizes, tree_pass
from redrafter_jax.drafters.tree import graft, root_tree
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import per_part, place
from redrafter_jax.types import KVCache, TokenTree, Verified

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (DraftConfig(4, 4), ()),
        (DraftConfig(4, 4, num_nodes=12), ()),
        # 4 final beams of 4 tokens have 8 to 17 nodes, the root included.
        (DraftConfig(4, 4, final_beams_only=True), (12,)),
        (DraftConfig(4, 4, num_nodes=14, final_beams_only=True), (12,)),
        (DraftConfig(4, 4, num_nodes=12, final_beams_only=True), ()),
        (DraftConfig(6, 4, num_nodes=12, lookup_tokens=8), (4,)),
        (DraftConfig(4, 4, final_beams_only=True, lookup_tokens=2), (12, 17)),
        (DraftConfig(4, 4, num_nodes=10, final_beams_only=True, lookup_tokens=4), (6,)),
        (DraftConfig(2, 2, num_nodes=1), ()),
    ],
    ids=str,
)
def test_prefix_sizes(draft: DraftConfig, expected: tuple[int, ...]) -> None:
    assert prefix_sizes(draft) == expected


# A tree of three slots: the root, one drafted node and one copied node.
DRAFT = DraftConfig(beam_width=1, draft_rounds=1, lookup_tokens=1)
S = 16
TINY = tiny_config(num_hidden_layers=1)


def trees(drafted: list[bool], copied: list[bool]) -> TokenTree:
    """A tree per row, in which the second and the third slot are alive or not."""
    B = len(drafted)
    roots = root_tree(jnp.arange(B, dtype=jnp.int32))
    second = graft(roots, jnp.full((B, 1), 5, jnp.int32), jnp.asarray(drafted), 1)
    tree = graft(second, jnp.asarray([[7, 8]] * B, jnp.int32), jnp.asarray(copied), 1)
    live = [[True, *slots] for slots in zip(drafted, copied, strict=True)]
    assert (tree.tokens >= 0).tolist() == live
    return tree


def some_cache(target: Target, rows: int) -> KVCache:
    """Random keys and values; the rows are of different lengths."""
    config = target.config
    shape = (config.num_hidden_layers, rows, config.num_key_value_heads, S, config.head_dim)
    keys = tuple(jax.random.normal(jax.random.key(0), shape))
    values = tuple(jax.random.normal(jax.random.key(1), shape))
    return KVCache(keys, values, jnp.arange(3, 3 + rows, dtype=jnp.int32))


def verify(
    target: Target, tree: TokenTree, cache: KVCache, done: Bool[Array, " B"], draft: DraftConfig
) -> Verified:
    return tree_pass(target.merge(), tree, cache, done, draft, (0,))


def verify_whole(target: Target, tree: TokenTree, cache: KVCache) -> Verified:
    return target.merge().tree_forward(tree, cache, (0,))


YES, NO = True, False


@pytest.mark.parametrize(
    ("drafted", "copied", "done", "size"),
    [
        ([YES, YES], [NO, NO], [NO, NO], 2),
        ([YES, YES], [NO, YES], [NO, NO], 3),
        ([YES, YES], [YES, YES], [NO, NO], 3),
        ([NO, NO], [NO, NO], [NO, NO], 2),
        # As many live nodes as the smaller size has slots, but not in these.
        ([NO, NO], [YES, YES], [NO, NO], 3),
        ([YES, YES], [NO, YES], [NO, YES], 2),
        ([YES, YES], [YES, YES], [YES, YES], 2),
    ],
)
def test_what_rows_need_comes_out_as_of_the_whole_tree(
    drafted: list[bool], copied: list[bool], done: list[bool], size: int
) -> None:
    target, tree = random_target(TINY), trees(drafted, copied)
    cache = some_cache(target, 2)
    verified = jax.jit(verify, static_argnums=4)(target, tree, cache, jnp.asarray(done), DRAFT)
    expected = jax.jit(verify_whole)(target, tree, cache)
    needed = np.asarray(tree.tokens >= 0) & ~np.asarray(done)[:, None]
    for ours, theirs in zip(jax.tree.leaves(verified), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours[needed], theirs[needed], rtol=1e-4, atol=1e-5)
        # What was left out is zero, and only that.
        assert not ours[:, size:].any()
        assert np.asarray(ours[:, :size] != 0).mean() > 0.99


def test_a_tree_smaller_than_its_draft_is_verified_whole() -> None:
    target, tree = random_target(TINY), root_tree(jnp.arange(2, dtype=jnp.int32))
    cache = some_cache(target, 2)
    draft = DraftConfig(beam_width=4, draft_rounds=4, final_beams_only=True)
    verified = verify(target, tree, cache, jnp.zeros(2, bool), draft)
    np.testing.assert_allclose(
        verified.logits, verify_whole(target, tree, cache).logits, rtol=1e-4, atol=1e-5
    )


def test_devices_verify_what_their_own_rows_need() -> None:
    target, tree, mesh = random_target(TINY), trees([YES, YES], [NO, YES]), make_mesh(2, 2)
    cache, done = some_cache(target, 2), jnp.zeros(2, bool)

    def hidden(target: Target, tree: TokenTree, cache: KVCache, done: Array) -> Array:
        # Each layer's products are summed over the two devices that share a row.
        return verify(target, tree, cache, done, DRAFT).hidden

    expected = jax.jit(verify_whole)(target, tree, cache).hidden
    split = place((target, tree, cache, done), mesh)
    verified = jax.jit(partial(per_part, hidden, mesh))(*split)
    np.testing.assert_allclose(verified[0, :2], expected[0, :2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(verified[1], expected[1], rtol=1e-4, atol=1e-5)
    assert not verified[0, 2:].any()
