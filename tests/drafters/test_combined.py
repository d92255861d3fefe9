"""Two drafters in one tree: what the second adds to the first's, drawn by hand and at random."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import DRAWN, ROOT, B, R, W, numpy_tree, random_beams

from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.combined import merge_trees
from redrafter_jax.drafters.tree import chain_tree
from redrafter_jax.types import TokenTree

pytestmark = pytest.mark.usefixtures("quick_compilation")


@partial(jax.jit, static_argnames="count")
def merge_chain(tree: TokenTree, drafted: jax.Array, found: jax.Array, count: int) -> TokenTree:
    return merge_trees(tree, chain_tree(tree.tokens[:, 0], drafted, found), count, sources=1)


def merged(tree: TokenTree, drafted: list[list[int]], found: list[bool], count: int) -> TokenTree:
    """The tree with the first of a chain's nodes that it lacks."""
    whole = merge_chain(
        jax.tree.map(jnp.asarray, tree),
        jnp.asarray(drafted, jnp.int32),
        jnp.asarray(found),
        count=count,
    )
    return jax.tree.map(np.asarray, whole)


def test_a_chain_goes_on_from_the_nodes_that_the_tree_has_of_it() -> None:
    tree = merged(numpy_tree(ROOT, DRAWN, DraftConfig(2, 2)), [[3, 6, 8, 3]], [True], 2)
    assert tree.tokens.tolist() == [[7, 3, 5, 4, 6, 8, 3]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1, 4, 5]]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2, 3, 4]]
    np.testing.assert_allclose(tree.log_probs, [[0, -1, -2, -1.5, -1.8, -1.8, -1.8]])
    assert tree.mask[0, 5:].astype(int).tolist() == [[1, 1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1]]
    assert not tree.mask[0, :5, 5:].any()
    assert tree.origin.tolist() == [[-1, 0, 0, 0, 0, 1, 1]]


def paths_of(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The tokens that lead to every live node."""
    parents = tree.parents[row].tolist()
    live = np.flatnonzero(tree.tokens[row] >= 0)
    return [
        tuple(tree.tokens[row, oracles.ancestors(parents, int(node))[::-1]].tolist())
        for node in live
    ]


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 6]), st.sampled_from([1, 2, 5]))
def test_a_chain_adds_its_next_tokens_and_nothing_twice(
    seed: int, budget: int | None, count: int
) -> None:
    random = np.random.default_rng(seed + 1)
    root, beams = random_beams(seed)
    tree = numpy_tree(root, beams, DraftConfig(W, R, num_nodes=budget))
    found = random.random(B) < 0.8
    # Half of them begin as some path of the tree does.
    drafted = random.integers(0, 6, (B, R + count))
    for row in range(B):
        paths = paths_of(tree, row)
        known = paths[random.integers(len(paths))][1:]
        if random.random() < 0.5:
            drafted[row, : len(known)] = known
    whole = merged(tree, drafted.tolist(), found.tolist(), count)
    for row in range(B):
        before, after = set(paths_of(tree, row)), paths_of(whole, row)
        spelt = [(root[row], *drafted[row, :end].tolist()) for end in range(R + count + 1)]
        start = max(end for end in range(R + 1) if spelt[end] in before)
        new = set(spelt[start + 1 : start + count + 1]) if found[row] else set()
        assert len(set(after)) == len(after), "siblings differ"
        assert set(after) == before | new
        assert len(after) == len(before) + len(new)
        live = whole.tokens[row] >= 0
        parents = np.asarray(whole.parents[row]).tolist()
        assert all(parents[node] < node for node in np.flatnonzero(live)[1:]), "parents come first"
        expected = np.where(live[:, None], oracles.ancestor_mask(parents), np.eye(len(live)))
        assert (whole.mask[row] == expected).all()
        assert whole.depth[row][live].tolist() == [len(path) - 1 for path in after]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 12]))
def test_trees_are_merged_node_by_node(seed: int, count: int) -> None:
    root, beams = random_beams(seed)
    _, other_beams = random_beams(seed + 1)
    draft = DraftConfig(W, R)
    tree, other = numpy_tree(root, beams, draft), numpy_tree(root, other_beams, draft)
    merge = jax.jit(merge_trees, static_argnums=(2, 3))
    whole = jax.tree.map(np.asarray, merge(tree, other, count, 1))
    for row in range(B):
        before, offered = paths_of(tree, row), paths_of(other, row)
        new = [path for path in offered if path not in before][:count]
        assert paths_of(whole, row) == before + new
        live = whole.tokens[row] >= 0
        parents = whole.parents[row].tolist()
        expected = np.where(live[:, None], oracles.ancestor_mask(parents), np.eye(len(live)))
        assert (whole.mask[row] == expected).all()
        assert whole.origin[row][live].tolist() == [-1] + [0] * (len(before) - 1) + [1] * len(new)
