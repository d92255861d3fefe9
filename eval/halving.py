"""Search for the fastest tree: successive halving that adds neighbours of the best trees."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from redrafter_jax.config import TreeConfig

# Shares of a finalist's turns after which the slower half is dropped.
_ROUNDS = (0.25, 0.5, 0.75)
# Share of the time limit after which no further tree is tried, and the minimum number of turns for
# choosing a tree, which one tree gets even after the limit.
_TRYING, _FEWEST_TURNS = 0.6, 4


@dataclass
class Tried:
    """A tree that has been measured, with its speed-up over the baseline in each turn."""

    tree: TreeConfig
    speedups: dict[int, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Median speed-up, ignoring turns without tokens after prefill, which are NaN."""
        known = [one for one in self.speedups.values() if not math.isnan(one)]
        return median(known) if known else 0.0


class Race(NamedTuple):
    """How trees are measured.

    Attributes:
      prepare: compiles a tree for a turn, if that was not done before.
      measure: returns the speed-ups of trees in a turn, in which the trees and the baseline decode
        the same batch one after the other.
      turns: number of turns of a finalist.
      finalists: number of trees that take all turns.
      used: returns the used share of the time limit; 0 without a limit.
    """

    prepare: Callable[[TreeConfig, int], None]
    measure: Callable[[Sequence[TreeConfig], int], Sequence[float]]
    turns: int
    finalists: int
    used: Callable[[], float] = lambda: 0.0


def find_fastest(
    trees: Sequence[TreeConfig], entrants: Sequence[TreeConfig], race: Race
) -> list[Tried]:
    """Search for the fastest tree; return all measured trees, finalists first.

    In the first of three rounds, the entrants take a quarter of the turns. Then the faster half of
    them stays. The same number of untried trees joins them, those that are most similar to the
    trees that stayed, and all take half of the turns. For the third round, with three quarters of
    the turns, half as many trees stay and join. In each round, at least `race.finalists` trees
    stay, and at least this number join. At the end, the fastest trees take all turns as the
    finalists.

    The search skips to the finalists once 60% of the time is used. After the time limit, only the
    best tree takes further turns, up to four in total. Finalists are ordered by the number of turns
    and then by speed-up, the others by speed-up.

    Args:
      trees: all candidate trees.
      entrants: trees of the first round.
      race: functions and numbers that define how trees are measured, and for how long.
    """
    tried = {tree: Tried(tree) for tree in entrants}
    alive = list(tried.values())
    keep = len(alive)
    for share in _ROUNDS:
        alive = _take_turns(alive, max(2, math.ceil(share * race.turns)), race, final=False)
        if share == _ROUNDS[-1] or race.used() >= _TRYING:
            break
        keep = max(race.finalists, math.ceil(keep / 2))
        alive = alive[:keep]
        joining = _neighbours([one.tree for one in alive], trees, tried, keep)
        tried |= {tree: Tried(tree) for tree in joining}
        alive += [tried[tree] for tree in joining]
    alive = _take_turns(_ranked(alive)[: race.finalists], race.turns, race, final=True)
    alive.sort(key=lambda one: len(one.speedups), reverse=True)
    others = [one for one in tried.values() if one not in alive and one.speedups]
    return [*alive, *_ranked(others)]


def tree_turns(trees: Sequence[TreeConfig], entrants: Sequence[TreeConfig], race: Race) -> int:
    """The number of turns of all trees together, if there is no time limit."""
    count = 0

    def measure(trees: Sequence[TreeConfig], _: int) -> list[float]:
        nonlocal count
        count += len(trees)
        return [1.0] * len(trees)

    find_fastest(trees, entrants, Race(lambda *_: None, measure, race.turns, race.finalists))
    return count


def pick_diverse(trees: Sequence[TreeConfig], count: int) -> list[TreeConfig]:
    """Choose trees of different kinds, starting with the smallest and the largest.

    Each further tree is the one that is least similar to the trees chosen so far.
    """
    sizes = np.stack([_sizes(tree) for tree in trees])
    chosen = list(dict.fromkeys([int(sizes[:, 0].argmin()), int(sizes[:, 0].argmax())]))[:count]
    while len(chosen) < count:
        distances = np.abs(sizes[:, None] - sizes[chosen]).sum(axis=2).min(axis=1)
        distances[chosen] = -1
        if distances.max() < 0:
            break
        chosen.append(int(distances.argmax()))
    return [trees[index] for index in chosen]


def _take_turns(alive: Sequence[Tried], turns: int, race: Race, final: bool) -> list[Tried]:
    """Measure trees until each has `turns` turns; return those that had a turn, fastest first.

    No turn begins after the time limit, except those that one tree needs: one turn in the first
    rounds, and `_FEWEST_TURNS` turns of the best finalist in the final round.
    """
    limit = 1.0 if final else _TRYING

    def is_due(one: Tried) -> bool:
        if final:
            return one is alive[0] and len(one.speedups) < _FEWEST_TURNS
        return not any(other.speedups for other in alive)

    for turn in range(turns):
        own: list[Tried] = []
        for one in alive:
            if turn in one.speedups:
                continue
            if race.used() >= limit and (own or not is_due(one)):
                break
            race.prepare(one.tree, turn)
            own.append(one)
        # If the time ran out while compiling, only first turns are still measured.
        if (used := race.used()) >= limit and (turn or used >= 1):
            own = [one for one in own[:1] if is_due(one)]
        if own:
            measured = race.measure([one.tree for one in own], turn)
            for one, speedup in zip(own, measured, strict=True):
                one.speedups[turn] = speedup
    return _ranked([one for one in alive if one.speedups])


def _ranked(trees: Sequence[Tried]) -> list[Tried]:
    return sorted(trees, key=lambda one: one.speedup, reverse=True)


def _neighbours(
    best: Sequence[TreeConfig],
    trees: Sequence[TreeConfig],
    tried: dict[TreeConfig, Tried],
    count: int,
) -> list[TreeConfig]:
    """Untried trees that are most similar to the best, the second best and so on, in turn."""
    left = [tree for tree in trees if tree not in tried]
    chosen: list[TreeConfig] = []
    while left and len(chosen) < count:
        sizes = _sizes(best[len(chosen) % len(best)])
        distances = [float(np.abs(_sizes(tree) - sizes).sum()) for tree in left]
        chosen.append(left.pop(int(np.argmin(distances))))
    return chosen


def _sizes(tree: TreeConfig) -> Float[np.ndarray, " sizes"]:
    """Logarithms of a tree's sizes, so that half a size and twice a size are equally distant.

    The entries after the first four distinguish trees of equal sizes.
    """
    return np.asarray(
        [
            *np.log2([tree.budget, tree.beam_width, tree.draft_rounds, 1.0 + tree.lookup_tokens]),
            0.5 * np.log2(tree.sharpness),
            0.5 * tree.rerank,
            0.5 * tree.final_beams_only,
            0.5 * bool(tree.static_tree),
            0.5 / (tree.candidates or math.inf),
            np.log2(tree.mean_nodes or tree.budget),
        ]
    )
