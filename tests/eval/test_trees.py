"""Grids of trees, and the fields that tell trees apart."""

from dataclasses import asdict

from eval.trees import TreeGrid, tree_columns
from redrafter_jax import TreeConfig


def test_a_grid_has_every_tree_of_its_lists() -> None:
    grid = TreeGrid(
        beam_width=[2], draft_rounds=[3], num_nodes=[4, None], sharpness=[1.5], lookup_tokens=[0, 2]
    )
    assert grid.build() == [
        TreeConfig(2, 3, 4, sharpness=1.5),
        TreeConfig(2, 3, 7, sharpness=1.5),
        TreeConfig(2, 3, 4, sharpness=1.5, lookup_tokens=2),
        TreeConfig(2, 3, 9, sharpness=1.5, lookup_tokens=2),
    ]
    # None and 33 nodes are one tree.
    assert TreeGrid(num_nodes=[33, None]).build() == [TreeConfig(num_nodes=33)]


def test_columns_are_the_sizes_and_every_other_field_that_differs() -> None:
    trees = TreeConfig(4, 3), TreeConfig(4, 3, static_tree=True), TreeConfig(4, 3, candidates=50)
    shown = tree_columns([asdict(tree) for tree in trees])
    assert list(shown.values()) == ["W", "R", "N", "C", "cand", "static"]
    assert list(tree_columns([asdict(trees[0])]).values()) == ["W", "R", "N", "C"]
