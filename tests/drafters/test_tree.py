from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import (
    ALL,
    DRAWN,
    ROOT,
    B,
    NumpyBeams,
    R,
    W,
    live_paths,
    numpy_tree,
    random_beams,
    tree_of,
)

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.tree import ancestor_mask, share_nodes

pytestmark = pytest.mark.usefixtures("quick_compilation")

INFINITY = float("inf")

jitted_share = jax.jit(share_nodes, static_argnums=2)


def test_the_beams_are_the_tree_and_final_beams_only_drop_the_dead_end() -> None:
    tree = numpy_tree(ROOT, DRAWN, TreeConfig(2, 2))
    assert live_paths(tree, 0) == [(7,), (7, 3), (7, 5), (7, 3, 4), (7, 3, 6)]
    # Token 5 leads to no final beam: its slot is dead, and comes last.
    tree = numpy_tree(ROOT, DRAWN, TreeConfig(2, 2, final_beams_only=True))
    assert live_paths(tree, 0) == [(7,), (7, 3), (7, 3, 4), (7, 3, 6)]
    assert tree.tokens.tolist() == [[7, 3, 4, 6, -1]]


@pytest.mark.parametrize("depth", [1, 3, 4, 8])
@given(seed=st.integers(0, 2**32 - 1))
def test_ancestor_mask_is_the_parent_walk(depth: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    parents = [oracles.random_parents(random, 13, max_depth=depth) for _ in range(2)]
    mask = ancestor_mask(jnp.asarray(parents), depth)
    np.testing.assert_array_equal(mask, [oracles.ancestor_mask(row) for row in parents])


def trace_of_row(beams: NumpyBeams, row: int) -> tuple[list[int], list[float]]:
    """Parents and log-probabilities of all nodes, worked out node by node."""
    parents, log_probs = [0], [0.0]
    for step in range(R):
        for beam in range(W):
            above = int(beams.parents[row, step, beam])
            parents.append(0 if step == 0 else 1 + (step - 1) * W + above)
            log_probs.append(float(beams.log_probs[row, step, beam]))
    return parents, log_probs


def nodes_that_stay(beams: NumpyBeams, row: int, draft: TreeConfig) -> list[int]:
    """The oracle of budget and final beams: trace numbers of the live nodes, ascending."""
    parents, log_probs = trace_of_row(beams, row)
    candidates = [node for node in range(ALL) if log_probs[node] > -INFINITY]
    if draft.final_beams_only:
        final = {up for leaf in range(ALL - W, ALL) for up in oracles.ancestors(parents, leaf)}
        candidates = [node for node in candidates if node in final]
    best = sorted(candidates, key=lambda node: (-log_probs[node], node))
    return sorted(best[: draft.budget])


DRAFTS = [
    TreeConfig(W, R, num_nodes=num_nodes, final_beams_only=final)
    for num_nodes, final in ((None, False), (None, True), (1, False), (5, True), (9, False))
]


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@given(seed=st.integers(0, 2**32 - 1))
def test_live_nodes_are_the_best_of_the_trace(draft: TreeConfig, seed: int) -> None:
    root, beams = random_beams(seed)
    tree = numpy_tree(root, beams, draft)
    assert tree.tokens.shape == (B, draft.budget)
    assert tree.origin.max() <= 0, "there is one source"
    for row in range(B):
        parents, log_probs = trace_of_row(beams, row)
        tokens = np.asarray([root[row], *beams.tokens[row].ravel()])
        stay = nodes_that_stay(beams, row, draft)
        lead = [oracles.ancestors(parents, node)[::-1] for node in stay]
        assert live_paths(tree, row) == [tuple(tokens[path].tolist()) for path in lead]
        live = tree.tokens[row] >= 0
        assert tree.log_probs[row, live].tolist() == [log_probs[node] for node in stay]
        if draft.final_beams_only:
            assert live[: live.sum()].all(), "a padding node before a live one"


@given(seed=st.integers(0, 2**32 - 1))
def test_shared_nodes_are_the_likeliest_of_all_rows_that_are_active(seed: int) -> None:
    random, N = np.random.default_rng(seed), 7
    parents = [oracles.random_parents(random, N, max_depth=4) for _ in range(B)]
    scores = np.zeros((B, N), np.float32)
    for row, node in product(range(B), range(1, N)):  # often as likely as another
        scores[row, node] = scores[row, parents[row][node]] - random.integers(0, 3)
    tree = tree_of(random.integers(24, size=(B, N)), parents)._replace(log_probs=scores)
    active, total = random.random(B) < 0.7, int(random.integers(B, B * N + 1))
    shared, nodes = jitted_share(tree, active, total)
    roots = [(row, 0) for row in range(B) if active[row]]
    others = [(row, node) for row in range(B) for node in range(1, N) if active[row]]
    best = [*roots, *sorted(others, key=lambda at: (-scores[at], at))][:total]
    assert set(best) <= {divmod(int(node), N) for node in nodes}
    for row in range(B):
        live = np.flatnonzero(np.asarray(shared.tokens)[row] >= 0).tolist()
        assert live == [0, *sorted(node for at, node in best if at == row and node > 0)]
        np.testing.assert_array_equal(np.asarray(shared.mask)[row, live], tree.mask[row, live])
