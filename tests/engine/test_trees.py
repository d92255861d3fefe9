"""Which tree is drafted: the tuner's for the rows and temperature, while it gains what it costs."""

from itertools import groupby
from typing import Any

import pytest

from redrafter_jax import InputError, TreeConfig
from redrafter_jax.engine import trees
from redrafter_jax.engine.trees import TreeChooser
from redrafter_jax.files.tree_table import TreeTable, TunedTree

LARGE, SMALL = TreeConfig(3, 4), TreeConfig(2, 2)
TABLE = TreeTable(
    "cpu",
    "float32",
    (
        TunedTree(1, 0.0, LARGE, 2.0, 2.0),
        TunedTree(1, 1.0, SMALL, 1.5, 1.5),
        TunedTree(4, 0.0, SMALL, 1.2, 1.2),
        TunedTree(4, 1.0, None, 1.0, 1.0),
    ),
)
# Steps that a caller has room for.
MOST = 32


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither measured nor learned by the engines of other tests."""
    monkeypatch.setattr(trees, "_seconds", {})
    monkeypatch.setattr(trees, "_learned", {})


def chooser(tree: TreeConfig | TreeTable | None = TABLE, **options: Any) -> TreeChooser:
    given: dict[str, Any] = {"adaptive": True, "slots": 4, "row_counts": None, "shards": 1}
    return TreeChooser(tree, **given | options)


def timed(tree: TreeConfig, cost: float, **options: Any) -> TreeChooser:
    """One tree, whose step was measured to take so many baseline steps."""
    made = chooser(tree, **options)
    made.add_time(1, None, 1.0)
    made.add_time(1, tree, cost)
    return made


def decode(
    trees: TreeChooser, steps: int, gain: float, seconds: float | None = None
) -> list[TreeConfig | None]:
    """What each step drafts for one row, where a tree gains so much; `seconds` are of its steps."""
    drafted: list[TreeConfig | None] = []
    gained = 0.0
    while len(drafted) < steps:
        tree, count = trees.choose(1, [0.0], MOST)
        assert 1 <= count <= MOST
        before, gained = gained, gained + (gain * count if tree else count)
        took = seconds if tree or seconds is None else 1.0
        trees.add(1, tree, count, count, round(gained) - round(before), took)
        drafted += [tree] * count
    return drafted


def waits(drafted: list[TreeConfig | None]) -> list[int]:
    """Numbers of baseline steps between two tries of the tree."""
    return [len(list(run)) for tree, run in groupby(drafted) if tree is None]


def test_the_table_names_what_is_compiled() -> None:
    made = chooser()
    assert made.row_counts == [1, 4]
    assert set(made.programs) == {(1, None), (1, LARGE), (1, SMALL), (4, None), (4, SMALL)}
    assert [made.rows_for(active) for active in (1, 2, 4)] == [1, 4, 4]


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(
    ("rows", "temperatures", "chosen"),
    [
        (1, [0.0], LARGE),
        (1, [0.9], SMALL),
        (4, [0.0, 0.0, 0.3], SMALL),
        (4, [1.0, 0.7, 0.8], None),
        (4, [], None),  # no row speculates
    ],
)
def test_rows_and_temperature_choose_the_tree(
    rows: int, temperatures: list[float], chosen: TreeConfig | None, adaptive: bool
) -> None:
    assert chooser(adaptive=adaptive).choose(rows, temperatures, MOST)[0] == chosen


def test_a_tree_that_gains_too_little_gives_way_and_is_tried_again_ever_later() -> None:
    drafted = decode(timed(LARGE, cost=2.0), 2000, gain=1.1)
    assert waits(drafted)[:7] == [16, 32, 64, 128, 256, 512, 512]
    assert drafted.count(LARGE) < 100


@pytest.mark.parametrize("gain", [2.0, 3.0, 5.0])
def test_a_tree_that_pays_is_never_left(gain: float) -> None:
    assert set(decode(timed(LARGE, cost=2.0), 3000, gain)) == {LARGE}


def test_a_tree_that_pays_again_stays_and_is_waited_for_as_little_as_at_first() -> None:
    made = timed(LARGE, cost=2.0)
    assert waits(decode(made, 200, gain=1.1))[:3] == [16, 32, 64]
    *_, last = (list(run) for _, run in groupby(decode(made, 1000, gain=3.0)))
    assert len(last) > 500
    assert set(last) == {LARGE}
    assert waits(decode(made, 200, gain=1.1))[:2] == [16, 32]


def test_what_a_tree_gains_late_makes_it_give_way_too() -> None:
    made = timed(LARGE, cost=2.0)
    assert set(decode(made, 100, gain=2.5)) == {LARGE}
    assert None in decode(made, 200, gain=1.1)


def test_what_no_warm_up_has_timed_is_the_tree_first_and_then_the_baseline_once() -> None:
    made = chooser(SMALL)
    drafted = decode(made, 100, gain=2.5, seconds=2.0)
    assert [(tree, len(list(run))) for tree, run in groupby(drafted)][:2] == [(SMALL, 4), (None, 4)]
    assert set(drafted[8:]) == {SMALL}
    assert made.cost(1, SMALL) == 2.0
    # On a mesh of several processes, or while prompts are read, nothing is timed.
    assert set(decode(chooser(SMALL, models="others"), 100, gain=1.0)) == {SMALL}


@pytest.mark.parametrize(("gain", "pays"), [(1.6, True), (1.3, False)])
def test_until_the_baseline_is_measured_the_table_says_what_a_step_costs(
    gain: float, pays: bool
) -> None:
    # 3 tokens a call were twice as fast as the baseline: a step costs 1.5 of its own.
    table = TreeTable("cpu", "float32", (TunedTree(1, 0.0, LARGE, 2.0, 2.0, 3.0),))
    made = chooser(table)
    assert made.cost(1, LARGE, table.trees[0]) == 1.5
    assert (None not in decode(made, 300, gain)) == pays
    made.add_time(1, LARGE, 1.1)
    made.add_time(1, None, 1.0)
    assert made.cost(1, LARGE, table.trees[0]) == 1.1


def test_a_step_costs_the_median_of_what_it_took_of_late() -> None:
    made = chooser(LARGE)
    for seconds in (2.0, 90.0, 2.0):
        made.add_time(1, LARGE, seconds)
        made.add_time(1, None, seconds / 2)
    assert made.cost(1, LARGE) == 2.0
    for _ in range(9):
        made.add_time(1, LARGE, 3.0)
    assert made.cost(1, LARGE) == 3.0


def test_between_the_sizes_of_a_table_its_nearest_tree_is_drafted_while_it_pays() -> None:
    table = TreeTable("cpu", "float32", (TunedTree(2, 0.0, SMALL, 1.5, 1.5, 1.8),))

    def slots_of_three(cost: float) -> TreeChooser:
        made = chooser(table, slots=3, models=cost)
        assert made.row_counts == [2, 3]
        for rows, seconds in ((2, 1.2), (3, cost)):
            made.add_time(rows, None, 1.0)
            made.add_time(rows, SMALL, seconds)
        return made

    def drafted(made: TreeChooser, rows: int) -> set[TreeConfig | None]:
        """What is drafted while calls gain what the table expects."""
        chosen = set()
        for _ in range(9):
            tree, count = made.choose(rows, [0.0], MOST)
            made.add(rows, tree, count, 100, 180, None)
            chosen.add(tree)
        return chosen

    assert drafted(slots_of_three(cost=1.7), 3) == {SMALL}
    too_dear = slots_of_three(cost=1.9)
    assert drafted(too_dear, 2) == {SMALL}
    assert drafted(too_dear, 3) == {SMALL, None}


def test_a_new_text_is_not_waited_for_as_long_as_the_last_one() -> None:
    made = timed(LARGE, cost=2.0)
    decode(made, 1000, gain=1.1)
    made.begin_text()
    drafted = decode(made, 200, gain=3.0)
    assert LARGE in drafted[:17]
    assert set(drafted[17:]) == {LARGE}


def test_engines_of_one_pair_and_shape_share_what_was_measured() -> None:
    first = timed(LARGE, cost=2.0, models="pair", shape=4)
    assert chooser(LARGE, models="pair", shape=4).cost(1, LARGE) == first.cost(1, LARGE) == 2.0
    assert chooser(LARGE, models="pair", shape=8).cost(1, LARGE) is None
    assert chooser(LARGE, models="other", shape=4).cost(1, LARGE) is None


def test_what_may_not_adapt_drafts_always_the_same() -> None:
    made = chooser(SMALL, slots=8, adaptive=False)
    assert made.row_counts == [1, 8]
    assert len(made.programs) == 4
    made.add_time(8, None, 1.0)
    made.add_time(8, SMALL, 9.0)
    for _ in range(100):
        assert made.choose(8, [1.0], MOST) == (SMALL, MOST)
        made.add(8, SMALL, MOST, MOST, MOST, None)
    assert made.choose(8, [], MOST) == (None, MOST)
    assert chooser(None).choose(4, [1.0], MOST) == (None, MOST)


def test_a_mesh_takes_the_numbers_of_rows_that_it_divides() -> None:
    assert chooser(slots=8, shards=2).row_counts == [4, 8]
    assert chooser(None, slots=8, shards=2).row_counts == [2, 8]
    with pytest.raises(InputError, match="3 rows cannot be split evenly over the mesh's data=2"):
        chooser(None, slots=8, row_counts=(3,), shards=2)
