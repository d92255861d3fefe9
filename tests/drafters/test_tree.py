from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.tree import ancestor_mask, build_tree, graft, root_tree
from redrafter_jax.types import Beams, TokenTree

pytestmark = pytest.mark.usefixtures("quick_compilation")

build = partial(jax.jit, static_argnames="draft")(build_tree)

B, R, W = 3, 3, 4
ALL = 1 + R * W


def numpy_tree(root: Any, beams: Any, draft: DraftConfig) -> TokenTree:
    tree = build(jnp.asarray(root), Beams(*map(jnp.asarray, beams)), draft)
    return jax.tree.map(np.asarray, tree)


# The beams of both drawings: two rounds of two.
#
#   root 7 --+-- 3, at -1.0 --+-- 4, at -1.5
#            |                +-- 6, at -1.8
#            +-- 5, at -2.0
DRAWN = Beams(
    tokens=jnp.asarray([[[3, 5], [4, 6]]], jnp.int32),
    parents=jnp.asarray([[[0, 0], [0, 0]]], jnp.int32),
    log_probs=jnp.asarray([[[-1.0, -2.0], [-1.5, -1.8]]], jnp.float32),
)
ROOT = np.asarray([7], np.int32)
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


def test_a_budget_drops_the_least_likely_and_renumbers() -> None:
    tree = numpy_tree(ROOT, DRAWN, DraftConfig(2, 2, num_nodes=4))
    assert tree.tokens.tolist() == [[7, 3, 4, 6]]
    assert tree.parents.tolist() == [[0, 0, 1, 1]]
    assert tree.depth.tolist() == [[0, 1, 2, 2]]
    assert tree.mask.astype(int).tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    ]


def test_a_budget_of_one_is_the_root() -> None:
    tree = numpy_tree(ROOT, DRAWN, DraftConfig(2, 2, num_nodes=1))
    assert tree.tokens.tolist() == [[7]]
    assert tree.parents.tolist() == [[0]]
    assert tree.mask.tolist() == [[[True]]]


def test_final_beams_only_drops_the_dead_end() -> None:
    tree = numpy_tree(ROOT, DRAWN, DraftConfig(2, 2, final_beams_only=True))
    # Token 5 leads to no final beam: its slot is dead, and comes last.
    assert tree.tokens.tolist() == [[7, 3, 4, 6, -1]]
    assert tree.parents.tolist() == [[0, 0, 1, 1, 0]]
    assert tree.depth.tolist() == [[0, 1, 2, 2, 0]]
    assert tree.log_probs[0, 4] == -INFINITY
    assert tree.mask[0, 4].tolist() == [False, False, False, False, True]
    assert tree.mask[0, :, 4].tolist() == [False, False, False, False, True]


def test_final_beams_under_a_budget_fill_the_slots_without_a_hole() -> None:
    tree = numpy_tree(ROOT, DRAWN, DraftConfig(2, 2, num_nodes=4, final_beams_only=True))
    assert tree.tokens.tolist() == [[7, 3, 4, 6]]
    assert tree.parents.tolist() == [[0, 0, 1, 1]]


def test_equal_scores_go_to_the_parent() -> None:
    # A sure drafter: every child scores as its parent does.
    sure = DRAWN._replace(log_probs=jnp.asarray([[[0.0, -2.0], [0.0, -1.0]]], jnp.float32))
    tree = numpy_tree(ROOT, sure, DraftConfig(2, 2, num_nodes=2))
    assert tree.tokens.tolist() == [[7, 3]]
    tree = numpy_tree(ROOT, sure, DraftConfig(2, 2, num_nodes=3))
    assert tree.tokens.tolist() == [[7, 3, 4]]
    assert tree.parents.tolist() == [[0, 0, 1]]


def test_root_tree_is_one_node() -> None:
    tree = root_tree(jnp.asarray([5, 9]))
    assert tree.tokens.tolist() == [[5], [9]]
    assert tree.parents.tolist() == [[0], [0]]
    assert tree.depth.tolist() == [[0], [0]]
    assert tree.mask.tolist() == [[[True]], [[True]]]
    assert tree.log_probs.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 8])
@given(seed=st.integers(0, 2**32 - 1))
def test_ancestor_mask_is_the_parent_walk(depth: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    parents = [oracles.random_parents(random, 13, max_depth=depth) for _ in range(2)]
    mask = ancestor_mask(jnp.asarray(parents), depth)
    np.testing.assert_array_equal(mask, [oracles.ancestor_mask(row) for row in parents])


@pytest.mark.parametrize("depth", range(10))
def test_ancestor_mask_looks_no_further_than_it_is_told(depth: int) -> None:
    chain = [max(node - 1, 0) for node in range(9)]
    expected = [[0 <= node - other <= depth for other in range(9)] for node in range(9)]
    np.testing.assert_array_equal(ancestor_mask(jnp.asarray([chain]), depth), [expected])


class NumpyBeams(NamedTuple):
    """`Beams` on the test's side."""

    tokens: np.ndarray
    parents: np.ndarray
    log_probs: np.ndarray


def random_beams(seed: int) -> tuple[np.ndarray, NumpyBeams]:
    """A trace as beam search may emit it: distinct pairs, children never above their parents.

    Scores are whole numbers, so ties are common; some beams are impossible (-inf), and so are
    all beams below them.
    """
    random = np.random.default_rng(seed)
    vocabulary = W
    tokens, parents = np.zeros((2, B, R, W), np.int32)
    log_probs = np.zeros((B, R, W), np.float32)
    for row in range(B):
        above = np.zeros(1)
        for step in range(R):
            pairs = random.choice(len(above) * vocabulary, size=W, replace=False)
            parents[row, step], tokens[row, step] = np.divmod(pairs, vocabulary)
            drop = random.choice([0, 1, 2, 3, np.inf], size=W, p=[0.3, 0.3, 0.2, 0.1, 0.1])
            log_probs[row, step] = above[parents[row, step]] - drop
            above = log_probs[row, step]
    root = random.integers(0, 100, B).astype(np.int32)
    return root, NumpyBeams(tokens, parents, log_probs)


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
    for num_nodes in (None, 1, 5, 9, 12)
    for final in (False, True)
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
    for tokens, parents, depth, mask, log_probs in zip(*tree, strict=True):
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
            assert live[: live.sum()].all(), "a dead slot before a live one"
        siblings = list(zip(parents[live][1:], tokens[live][1:], strict=True))
        assert len(set(siblings)) == len(siblings)

        dead = np.flatnonzero(~live)
        assert (tokens[dead] == -1).all()
        assert (parents[dead] == 0).all()
        assert (depth[dead] == 0).all()
        np.testing.assert_array_equal(mask[dead], np.eye(N, dtype=bool)[dead])
        assert not mask[np.ix_(live, ~live)].any(), "a live node sees a dead slot"


# Copied tokens.


def grafted(tree: TokenTree, copied: list[list[int]], found: list[bool], count: int) -> TokenTree:
    whole = jax.jit(graft, static_argnames="count")(
        jax.tree.map(jnp.asarray, tree),
        jnp.asarray(copied, jnp.int32),
        jnp.asarray(found),
        count=count,
    )
    return jax.tree.map(np.asarray, whole)


def test_a_copy_goes_on_from_the_nodes_that_the_tree_has_of_it() -> None:
    tree = grafted(numpy_tree(ROOT, DRAWN, DraftConfig(2, 2)), [[3, 6, 8, 3]], [True], 2)
    assert tree.tokens.tolist() == [[7, 3, 5, 4, 6, 8, 3]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1, 4, 5]]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2, 3, 4]]
    np.testing.assert_allclose(tree.log_probs, [[0, -1, -2, -1.5, -1.8, -1.8, -1.8]])
    assert tree.mask[0, 5:].astype(int).tolist() == [[1, 1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1]]
    assert not tree.mask[0, :5, 5:].any()


def test_a_copy_of_other_tokens_hangs_from_the_root() -> None:
    tree = grafted(numpy_tree(ROOT, DRAWN, DraftConfig(2, 2)), [[4, 3, 9, 9]], [True], 2)
    assert tree.tokens[0, 5:].tolist() == [4, 3]
    assert tree.parents[0, 5:].tolist() == [0, 5]
    assert tree.mask[0, 5:].astype(int).tolist() == [[1, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1, 1]]


def test_without_a_copy_the_slots_are_dead() -> None:
    tree = grafted(numpy_tree(ROOT, DRAWN, DraftConfig(2, 2)), [[3, 6, 8, 3]], [False], 2)
    assert tree.tokens[0, 5:].tolist() == [-1, -1]
    assert tree.log_probs[0, 5:].tolist() == [-INFINITY, -INFINITY]
    assert tree.mask[0, 5:, 5:].tolist() == np.eye(2, dtype=bool).tolist()
    assert not tree.mask[0, 5:, :5].any()


def paths_of(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The tokens that lead to every live node."""
    parents = tree.parents[row].tolist()
    live = np.flatnonzero(tree.tokens[row] >= 0)
    return [
        tuple(tree.tokens[row, oracles.ancestors(parents, int(node))[::-1]].tolist())
        for node in live
    ]


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 6]), st.sampled_from([1, 2, 5]))
def test_a_copy_adds_its_next_tokens_and_nothing_twice(
    seed: int, budget: int | None, count: int
) -> None:
    random = np.random.default_rng(seed + 1)
    root, beams = random_beams(seed)
    tree = numpy_tree(root, beams, DraftConfig(W, R, num_nodes=budget))
    found = random.random(B) < 0.8
    # Half of them begin as some path of the tree does.
    copied = random.integers(0, 6, (B, R + count))
    for row in range(B):
        paths = paths_of(tree, row)
        known = paths[random.integers(len(paths))][1:]
        if random.random() < 0.5:
            copied[row, : len(known)] = known
    whole = grafted(tree, copied.tolist(), found.tolist(), count)
    for row in range(B):
        before, after = set(paths_of(tree, row)), paths_of(whole, row)
        spelt = [(root[row], *copied[row, :end].tolist()) for end in range(R + count + 1)]
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
