"""Search for the fastest tree: successive halving that also adds trees similar to the best ones."""

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
    """A tree that is measured, with its speed-up over the baseline in each turn.

    In a turn, trees and the baseline decode the same batch, one directly after the other.

    Attributes:
      tree: the tree.
      speedups: speed-up by number of the turn; NaN if the turn has no token after prefill.
    """

    tree: TreeConfig
    speedups: dict[int, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Median speed-up over the turns whose speed-up is not NaN; 0 without such turns."""
        known = [one for one in self.speedups.values() if not math.isnan(one)]
        return median(known) if known else 0.0


class Race(NamedTuple):
    """How trees are measured, and for how long.

    Attributes:
      prepare: function that compiles a tree for a turn, unless it is already compiled.
      measure: function from trees and a turn to the trees' speed-ups over the baseline in this
        turn.
      turns: number of turns of a finalist.
      finalists: number of finalists, the trees that take all turns.
      used: function that returns the used fraction of the time limit; 0 without a limit.
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

    There are three rounds. In the first, the entrants take a quarter of `race.turns`. The faster
    half of the entrants stays, and as many new trees are added: those most similar to the trees
    that stay. In the second round, each of these trees takes half of the turns in total. For the
    third round, with three quarters of the turns, half as many trees stay and half as many are
    added. At least `race.finalists` trees stay each time, and at least as many are added. After the
    third round, the fastest trees take all turns; these are the finalists.

    Once 60% of the time is used, the search goes directly to the finalists. After the time limit,
    only the fastest tree takes further turns, up to four in total.

    Args:
      trees: all candidate trees.
      entrants: trees of the first round.
      race: functions and numbers that define how trees are measured, and for how long.

    Returns:
      The finalists, ordered by the number of turns and then by speed-up; then all other measured
      trees, ordered by speed-up.
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
    """Return the total number of turns of all trees in a search without a time limit."""
    count = 0

    def measure(trees: Sequence[TreeConfig], _: int) -> list[float]:
        nonlocal count
        count += len(trees)
        return [1.0] * len(trees)

    find_fastest(trees, entrants, Race(lambda *_: None, measure, race.turns, race.finalists))
    return count


def pick_diverse(trees: Sequence[TreeConfig], count: int) -> list[TreeConfig]:
    """Choose `count` trees of very different sizes.

    The first two are the smallest and the largest tree. Each further tree is the least similar to
    the trees chosen so far.
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
