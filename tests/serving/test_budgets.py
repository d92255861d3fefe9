"""Which tree is drafted: the tuner's for the rows and temperature, unless it gains too little."""

import pytest

from redrafter_jax import InputError, PromptLookup, TreeConfig
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.files.tree_table import TreeTable, TunedTree
from redrafter_jax.serving.budgets import Budgets

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
BASELINE, LARGE_AT, SMALL_AT = 0, 1, 2


def test_the_table_names_what_is_compiled(drafter: LoadedHead) -> None:
    budgets = Budgets(drafter, TABLE, slots=4)
    assert budgets.row_counts == [1, 4]
    assert set(budgets.programs) == {
        (1, BASELINE),
        (1, LARGE_AT),
        (1, SMALL_AT),
        (4, BASELINE),
        (4, SMALL_AT),
    }
    assert [budgets.rows_for(active) for active in (1, 2, 4)] == [1, 4, 4]


@pytest.mark.parametrize(
    ("rows", "temperatures", "chosen"),
    [
        (1, [0.0], LARGE_AT),
        (1, [0.9], SMALL_AT),
        (4, [0.0, 0.0, 0.3], SMALL_AT),
        (4, [1.0, 0.7, 0.8], BASELINE),
        (4, [], BASELINE),  # no row speculates
    ],
)
def test_rows_and_temperature_choose_the_tree(
    drafter: LoadedHead, rows: int, temperatures: list[float], chosen: int
) -> None:
    assert Budgets(drafter, TABLE, slots=4).choose(rows, temperatures) == chosen


def test_a_tree_that_gains_too_little_gives_way_and_is_tried_again(drafter: LoadedHead) -> None:
    budgets = Budgets(drafter, TABLE, slots=4)
    budgets.add_time(1, BASELINE, 1.0)
    budgets.add_time(1, LARGE_AT, 2.0)  # needs two tokens per call to pay; the table expects four
    for _ in range(100):
        assert budgets.choose(1, [0.0]) == LARGE_AT
        budgets.add_gain(1, LARGE_AT, calls=20, gained=50)
    for _ in range(30):
        budgets.choose(1, [0.0])
        budgets.add_gain(1, LARGE_AT, calls=20, gained=22)
    assert budgets.choose(1, [0.0]) == BASELINE
    waited = next(calls for calls in range(10_000) if budgets.choose(1, [0.0]) == LARGE_AT)
    assert waited > 100


def test_between_the_sizes_of_a_table_its_nearest_tree_is_drafted_where_the_costs_agree(
    drafter: LoadedHead,
) -> None:
    def slots_of_three(cost: float) -> Budgets:
        table = TreeTable("cpu", "float32", (TunedTree(2, 0.0, SMALL, 1.5, 1.5),))
        budgets = Budgets(drafter, table, slots=3)
        assert budgets.row_counts == [2, 3]
        for rows, seconds in ((2, 1.2), (3, cost)):
            budgets.add_time(rows, BASELINE, 1.0)
            budgets.add_time(rows, 1, seconds)
        return budgets

    # What it gains at two rows, 1.5 * 1.2 tokens a call, it gains at three.
    assert slots_of_three(cost=1.7).choose(3, [0.0]) == 1
    too_dear = slots_of_three(cost=1.9)
    assert too_dear.choose(2, [0.0]) == 1
    assert {too_dear.choose(3, [0.0]) for _ in range(10_000)} == {BASELINE}


def test_without_a_table_the_tree_is_always_the_same(drafter: LoadedHead) -> None:
    budgets = Budgets(drafter, SMALL, slots=8)
    assert budgets.row_counts == [1, 8]
    assert len(budgets.programs) == 4
    budgets.add_time(8, 0, 1.0)
    budgets.add_time(8, 1, 9.0)
    assert budgets.choose(8, [1.0]) == 1
    assert budgets.choose(8, []) == 0
    assert Budgets(None, None, slots=8).choose(8, [1.0]) == 0
    assert Budgets(PromptLookup(2), None, slots=8).choose(1, [1.0]) == 1


def test_a_mesh_takes_the_numbers_of_rows_that_it_divides(drafter: LoadedHead) -> None:
    assert Budgets(drafter, TABLE, slots=8, shards=2).row_counts == [4, 8]
    assert Budgets(None, None, slots=8, shards=2).row_counts == [2, 8]
    with pytest.raises(InputError, match="3 rows cannot be split evenly over the 2 devices"):
        Budgets(None, None, slots=8, row_counts=(3,), shards=2)
    with pytest.raises(InputError, match="there is no drafter"):
        Budgets(None, TABLE, slots=8)
