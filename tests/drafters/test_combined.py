"""Two drafters in one tree: what the second adds to the first's, drawn by hand and at random."""

from functools import partial

import jax
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
def merged(tree: TokenTree, other: TokenTree, count: int) -> TokenTree:
    return merge_trees(tree, other, count, sources=1)


def test_a_chain_goes_on_from_the_nodes_that_the_tree_has_of_it() -> None:
    chain = jax.jit(chain_tree)(np.asarray(ROOT), np.asarray([[3, 6, 8, 3]]), np.asarray([True]))
    tree = merged(numpy_tree(ROOT, DRAWN, DraftConfig(2, 2)), chain, 2)
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


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 12]))
def test_trees_are_merged_node_by_node(seed: int, count: int) -> None:
    root, beams = random_beams(seed)
    _, other_beams = random_beams(seed + 1)
    draft = DraftConfig(W, R)
    tree, other = numpy_tree(root, beams, draft), numpy_tree(root, other_beams, draft)
    whole = jax.tree.map(np.asarray, merged(tree, other, count))
    for row in range(B):
        before, offered = paths_of(tree, row), paths_of(other, row)
        new = [path for path in offered if path not in before][:count]
        assert paths_of(whole, row) == before + new
        assert len(set(before + new)) == len(before + new), "siblings differ"
        live = whole.tokens[row] >= 0
        parents = whole.parents[row].tolist()
        assert all(parents[node] < node for node in np.flatnonzero(live)[1:]), "parents come first"
        expected = np.where(live[:, None], oracles.ancestor_mask(parents), np.eye(len(live)))
        assert (whole.mask[row] == expected).all()
        assert whole.depth[row][live].tolist() == [len(path) - 1 for path in before + new]
        assert whole.origin[row][live].tolist() == [-1] + [0] * (len(before) - 1) + [1] * len(new)
