import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import ALL, DRAWN, ROOT, B, NumpyBeams, R, W, numpy_tree, random_beams

from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.tree import ancestor_mask

pytestmark = pytest.mark.usefixtures("quick_compilation")

INFINITY = float("inf")


def test_the_beam_trace_is_the_tree() -> None:
    tree = numpy_tree(ROOT, DRAWN, DraftConfig(2, 2))
    assert tree.tokens.tolist() == [[7, 3, 5, 4, 6]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1]]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2]]
    np.testing.assert_allclose(tree.log_probs, [[0, -1, -2, -1.5, -1.8]])
    assert tree.mask.astype(int).tolist() == [
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 0, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 1, 0, 0, 1],
        ]
    ]


def test_final_beams_only_drops_the_dead_end() -> None:
    tree = numpy_tree(ROOT, DRAWN, DraftConfig(2, 2, final_beams_only=True))
    # Token 5 leads to no final beam: its slot is dead, and comes last.
    assert tree.tokens.tolist() == [[7, 3, 4, 6, -1]]
    assert tree.parents.tolist() == [[0, 0, 1, 1, 0]]
    assert tree.depth.tolist() == [[0, 1, 2, 2, 0]]
    assert tree.log_probs[0, 4] == -INFINITY
    assert tree.mask[0, 4].tolist() == [False, False, False, False, True]
    assert tree.mask[0, :, 4].tolist() == [False, False, False, False, True]


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


def nodes_that_stay(beams: NumpyBeams, row: int, draft: DraftConfig) -> list[int]:
    """The oracle of budget and final beams: trace numbers of the live nodes, ascending."""
    parents, log_probs = trace_of_row(beams, row)
    candidates = [node for node in range(ALL) if log_probs[node] > -INFINITY]
    if draft.final_beams_only:
        final = {up for leaf in range(ALL - W, ALL) for up in oracles.ancestors(parents, leaf)}
        candidates = [node for node in candidates if node in final]
    best = sorted(candidates, key=lambda node: (-log_probs[node], node))
    return sorted(best[: draft.budget])


DRAFTS = [
    DraftConfig(W, R, num_nodes=num_nodes, final_beams_only=final)
    for num_nodes, final in ((None, False), (None, True), (1, False), (5, True), (9, False))
]


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@given(seed=st.integers(0, 2**32 - 1))
def test_live_nodes_are_the_best_of_the_trace(draft: DraftConfig, seed: int) -> None:
    root, beams = random_beams(seed)
    tree = numpy_tree(root, beams, draft)
    for row in range(B):
        parents, log_probs = trace_of_row(beams, row)
        tokens = [root[row], *beams.tokens[row].ravel()]
        stay = nodes_that_stay(beams, row, draft)
        slots = np.flatnonzero(tree.log_probs[row] > -INFINITY)
        assert tree.tokens[row, slots].tolist() == [tokens[node] for node in stay]
        assert tree.log_probs[row, slots].tolist() == [log_probs[node] for node in stay]
        # The live parent of each live node is its parent in the trace.
        of_slot = dict(zip(slots.tolist(), stay, strict=True))
        for slot, node in of_slot.items():
            assert of_slot[int(tree.parents[row, slot])] == parents[node]


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@given(seed=st.integers(0, 2**32 - 1))
def test_trees_keep_the_rules_of_token_tree(draft: DraftConfig, seed: int) -> None:
    root, beams = random_beams(seed)
    tree = numpy_tree(root, beams, draft)
    N = draft.budget
    for tokens, parents, depth, mask, log_probs, origin in zip(*tree, strict=True):
        assert tokens.shape == parents.shape == depth.shape == log_probs.shape == (N,)
        live = log_probs > -INFINITY
        assert live[0]
        assert parents[0] == depth[0] == log_probs[0] == 0
        assert (parents[1:] < np.arange(1, N)).all(), "topological order"
        assert live[parents[live]].all()
        assert depth[live].tolist() == np.asarray(oracles.depth_of(parents))[live].tolist()
        np.testing.assert_array_equal(mask[live], oracles.ancestor_mask(parents)[live])
        assert (log_probs[live] <= log_probs[parents[live]]).all()
        if draft.final_beams_only:
            assert live[: live.sum()].all(), "a padding node before a live one"
        siblings = list(zip(parents[live][1:], tokens[live][1:], strict=True))
        assert len(set(siblings)) == len(siblings)

        assert origin[0] == -1
        assert (origin[1:] == np.where(live[1:], 0, -1)).all()
        padding = np.flatnonzero(~live)
        assert (tokens[padding] == -1).all()
        assert (parents[padding] == 0).all()
        assert (depth[padding] == 0).all()
        np.testing.assert_array_equal(mask[padding], np.eye(N, dtype=bool)[padding])
        assert not mask[np.ix_(live, ~live)].any(), "a live node sees a padding node"
