"""The fastest of many trees by measuring few: successive halving, with neighbours of the best."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from redrafter_jax.config import TreeConfig

# Shares of a finalist's turns after which the slower half gives way.
_ROUNDS = (0.25, 0.5, 0.75)
# Share of a limited time after which no further tree is tried, and turns without which no tree is
# judged: one has them even where the time is over.
_TRYING, _FEWEST_TURNS = 0.6, 4


@dataclass
class Tried:
    """A tree, and its speed-ups over the baseline by the number of the turn."""

    tree: TreeConfig
    speedups: dict[int, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """The median of the turns; NaN is a turn without tokens after prefill."""
        known = [one for one in self.speedups.values() if not math.isnan(one)]
        return median(known) if known else 0.0


class Race(NamedTuple):
    """How trees are timed.

    Attributes:
      prepare: compiles a tree for a turn, where that was not done before.
      measure: the speed-ups of these trees in a turn, in which they and the baseline decode the
        same batch one after the other.
      turns: of every finalist.
      finalists: trees that take all turns.
      used: share of the time that is used; 0 where time is not limited.
    """

    prepare: Callable[[TreeConfig, int], None]
    measure: Callable[[Sequence[TreeConfig], int], Sequence[float]]
    turns: int
    finalists: int
    used: Callable[[], float] = lambda: 0.0


def find_fastest(
    trees: Sequence[TreeConfig], entrants: Sequence[TreeConfig], race: Race
) -> list[Tried]:
    """All trees that were measured: first the finalists, those of most turns and the fastest first.

    In the first of three rounds the entrants take a quarter of the turns. Then the faster half of
    them stays, as many untried trees join, those most like the ones that stayed, and all of these
    take half of the turns. For the third round, of three quarters of the turns, half as many stay
    and join. No fewer stay, or join, than there are finalists. At the end the fastest trees take
    all turns, as the finalists. Once 60% of the time is used, that follows at once. When all of it
    is, nothing is begun but what the best tree lacks of four turns.

    Args:
      trees: all trees that may be tried.
      entrants: those of the first round.
      race: how trees are measured, and for how long.
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
    """How many turns all trees take together, where time is not limited."""
    count = 0

    def measure(trees: Sequence[TreeConfig], _: int) -> list[float]:
        nonlocal count
        count += len(trees)
        return [1.0] * len(trees)

    find_fastest(trees, entrants, Race(lambda *_: None, measure, race.turns, race.finalists))
    return count


def pick_diverse(trees: Sequence[TreeConfig], count: int) -> list[TreeConfig]:
    """The trees of fewest and of most nodes, then one by one the tree most unlike those chosen."""
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
    """The trees with so many turns each, the fastest first; trees without a turn are left out.

    Where time is limited no turn is begun too late, but for what one tree needs: the first tree one
    turn, and the best of the finalists as many as it takes to be judged.
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
        # Late since the last of them was compiled: trees are measured in their first turn alone.
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
    """Trees that were not tried, most like the best, the second best and so on, in turns."""
    left = [tree for tree in trees if tree not in tried]
    chosen: list[TreeConfig] = []
    while left and len(chosen) < count:
        sizes = _sizes(best[len(chosen) % len(best)])
        distances = [float(np.abs(_sizes(tree) - sizes).sum()) for tree in left]
        chosen.append(left.pop(int(np.argmin(distances))))
    return chosen


def _sizes(tree: TreeConfig) -> Float[np.ndarray, " sizes"]:
    """Logarithms of a tree's sizes, so that half and twice a size are equally far away.

    What comes after the first four only tells apart trees of the same sizes.
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
