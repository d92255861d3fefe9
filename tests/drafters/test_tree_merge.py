"""Two trees as one: what the second adds to the first, drawn by hand and at random."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import DRAWN, ROOT, B, R, W, live_paths, numpy_tree, random_beams

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.tree import chain_tree, merge_trees

pytestmark = pytest.mark.usefixtures("quick_compilation")


merged = partial(jax.jit, static_argnames="count")(merge_trees)


def test_a_chain_goes_on_from_the_nodes_that_the_tree_has_of_it() -> None:
    chain = jax.jit(chain_tree)(np.asarray(ROOT), np.asarray([[3, 6, 8, 3]]), np.asarray([True]))
    chain = chain._replace(log_probs=np.asarray([[0, -0.25, -0.5, -1.0, -2.0]], np.float32))
    tree = merged(numpy_tree(ROOT, DRAWN, TreeConfig(2, 2)), chain, 2)
    drawn = [(7,), (7, 3), (7, 5), (7, 3, 4), (7, 3, 6)]
    assert live_paths(tree, 0) == [*drawn, (7, 3, 6, 8), (7, 3, 6, 8, 3)]
    np.testing.assert_allclose(tree.log_probs, [[0, -1, -2, -1.5, -1.8, -2.3, -3.3]])
    assert tree.origin.tolist() == [[-1, 0, 0, 0, 0, 1, 1]]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 12]))
def test_trees_are_merged_node_by_node(seed: int, count: int) -> None:
    root, beams = random_beams(seed)
    _, other_beams = random_beams(seed + 1)
    draft = TreeConfig(W, R)
    tree, other = numpy_tree(root, beams, draft), numpy_tree(root, other_beams, draft)
    whole = jax.tree.map(np.asarray, merged(tree, other, count))
    for row in range(B):
        before, offered = live_paths(tree, row), live_paths(other, row)
        new = [path for path in offered if path not in before][:count]
        assert live_paths(whole, row) == before + new
        live = whole.tokens[row] >= 0
        assert whole.origin[row][live].tolist() == [-1] + [0] * (len(before) - 1) + [1] * len(new)
