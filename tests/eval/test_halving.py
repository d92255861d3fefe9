"""Successive halving: on trees whose speed is a law with noise, and on a clock that is given."""

from collections.abc import Sequence

import numpy as np
import pytest
from places import ROOT

from eval.config import TuneSettings
from eval.halving import Race, find_fastest, pick_diverse, tree_turns
from eval.trees import build_all
from redrafter_jax import TreeConfig
from redrafter_jax.settings.files import load_settings

TREES = build_all(load_settings(TuneSettings, ROOT / "configs/demo_sweep.yaml").trees)


def speed_of(tree: TreeConfig, best_nodes: float, best_beams: float) -> float:
    """A hill over nodes and beams, as measured speed-ups are; lookup pays for its tokens."""
    distance = abs(np.log2(tree.budget / best_nodes)) + abs(np.log2(tree.beam_width / best_beams))
    return 2.0 - 0.25 * distance + 0.02 * min(tree.lookup_tokens, 6)


class Bench:
    """Measures by the law, 5% of noise in each turn, and counts what it was asked for."""

    def __init__(self, best_nodes: float, best_beams: float, seed: int = 0) -> None:
        self.hill = best_nodes, best_beams
        self.random = np.random.default_rng(seed)
        self.prepared: dict[TreeConfig, set[int]] = {}
        self.turns: list[tuple[TreeConfig, int]] = []

    def prepare(self, tree: TreeConfig, turn: int) -> None:
        self.prepared.setdefault(tree, set()).add(turn)

    def measure(self, trees: Sequence[TreeConfig], turn: int) -> list[float]:
        assert all(turn in self.prepared[tree] for tree in trees)
        self.turns += [(tree, turn) for tree in trees]
        noise = self.random.normal(1, 0.05, len(trees))
        return [speed_of(one, *self.hill) * by for one, by in zip(trees, noise, strict=True)]

    def race(self, turns: int = 8, finalists: int = 3) -> Race:
        return Race(self.prepare, self.measure, turns, finalists)


@pytest.mark.parametrize("hill", [(2, 1), (4, 2), (6, 4), (10, 1), (16, 6), (30, 8)])
def test_the_best_of_197_trees_is_found_by_trying_a_tenth_of_them(hill: tuple[int, int]) -> None:
    best = max(speed_of(tree, *hill) for tree in TREES)
    bench = Bench(*hill)
    found = find_fastest(TREES, pick_diverse(TREES, 12), bench.race())
    assert speed_of(found[0].tree, *hill) >= 0.92 * best
    assert len(bench.prepared) == len(found) == 12 + 6 + 3
    assert all(sorted(one.speedups) == list(range(8)) for one in found[:3])
    # Every tree is measured on the same batches as the others, from the first on, once.
    assert (
        len({*bench.turns})
        == len(bench.turns)
        == tree_turns(TREES, pick_diverse(TREES, 12), bench.race())
    )


def test_a_sweep_measures_all() -> None:
    bench = Bench(4, 2)
    found = find_fastest(TREES, pick_diverse(TREES, 200), bench.race(turns=3, finalists=200))
    assert len(found) == len(TREES) == 197
    assert all(len(one.speedups) == 3 for one in found)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 20.0, 60.0, 240.0, 10_000.0])
@pytest.mark.parametrize("compiling", [5.0, 100.0])
def test_a_limited_time_is_kept_but_for_one_measurement(seconds: float, compiling: float) -> None:
    """Decoding takes a second; of every third turn each tree has a program of its own."""
    bench, clock = Bench(4, 2), [0.0]
    compiled: set[tuple[TreeConfig, int]] = set()
    ends: list[float] = []

    def prepare(tree: TreeConfig, turn: int) -> None:
        bench.prepare(tree, turn)
        if (tree, turn % 3) not in compiled:
            compiled.add((tree, turn % 3))
            clock[0] += compiling
            ends.append(clock[0])

    def measure(trees: Sequence[TreeConfig], turn: int) -> list[float]:
        clock[0] += 1 + len(trees)
        return bench.measure(trees, turn)

    def used() -> float:
        return clock[0] / seconds if seconds else 1.0

    found = find_fastest(TREES, pick_diverse(TREES, 12), Race(prepare, measure, 8, 3, used))
    # Beyond it, at most what is compiled just then, and one tree's four turns and their programs.
    assert clock[0] <= seconds + compiling + (3 * compiling + 4 * 2)
    late = [end for end in ends if end - compiling >= seconds]
    assert len(late) <= 3
    assert len(found[0].speedups) >= 4
    assert [len(one.speedups) for one in found[:3]] == sorted(
        (len(one.speedups) for one in found[:3]), reverse=True
    )
    if seconds == 10_000.0:
        assert all(len(one.speedups) == 8 for one in found[:3])


def test_the_first_trees_are_the_extremes_and_those_most_unlike_the_others() -> None:
    settings = TuneSettings.model_validate(
        {"target": "", "drafter": "", "prompts": "", "report_dir": "", "max_new_tokens": 1}
    )
    trees = build_all(settings.trees)
    few = pick_diverse(trees, settings.entrants)
    assert few[0] == TreeConfig(1, 1, 2)
    assert {8} <= {tree.beam_width for tree in few}
    assert {33} <= {tree.budget for tree in few}
    assert {0, 8} <= {tree.lookup_tokens for tree in few}
    assert len(few) == len(set(few)) == settings.entrants
    # No more than there are.
    same = [TreeConfig(2, 2), TreeConfig(2, 2, sharpness=2.0)]
    assert pick_diverse(same, 5) == same


@pytest.mark.parametrize(
    "other", [TreeConfig(2, 2, candidates=2), TreeConfig(2, 2, static_tree=True)]
)
def test_a_tree_of_the_same_sizes_is_unlike_one_of_other_candidates_or_ranks(
    other: TreeConfig,
) -> None:
    trees = [TreeConfig(2, 2), TreeConfig(2, 2, sharpness=1.01), other]
    assert pick_diverse(trees, 2) == [trees[0], other]
