"""Which tree the next call of `decode_rows` drafts, and for how many rows it is compiled.

What a step costs grows with the rows that it decodes and with the nodes of their trees, what it
gains depends on the text: a tree that pays for one row may cost more than it gains for many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.drafters.one_of import OneOf
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable, TunedTree
from redrafter_jax.requests import check_size

# Half-lives in target calls of a row: of the gains of a tree that is drafted, and of what is known
# of one that could have been drafted, but was too slow.
_HALF_LIFE = 200
_IDLE_HALF_LIFE = 2000


@dataclass
class Program:
    """A compiled number of rows and tree.

    Attributes:
      seconds: that a step takes; None until it is timed.
      gain: tokens that a target call gains a row, so far; None until it is known.
    """

    seconds: float | None = None
    gain: float | None = None


class Budgets:
    """The trees and numbers of rows that there are, and which of them is the fastest.

    Attributes:
      drafters: that may propose, the one-node tree first.
      row_counts: rows that are decoded together, in rising order.
      programs: all that may be chosen, by number of rows and index in `drafters`. A tree of a table
        gives way to the baseline while it gains too little.

    Args:
      drafter, tree, slots, row_counts: as in `Engine`.
      shards: parts of the rows on a mesh, all of one size.

    Raises:
      InputError: the parts would not be of one size, or the drafter does not go with `tree`.
    """

    def __init__(
        self,
        drafter: LoadedHead | Drafter | None,
        tree: TreeConfig | TreeTable | None,
        slots: int,
        row_counts: Sequence[int] | None = None,
        shards: int = 1,
    ) -> None:
        if row_counts is None:
            sizes = [t.batch_size for t in tree.trees] if isinstance(tree, TreeTable) else []
            row_counts = [size for size in sizes if size % shards == 0] or [shards]
        self.row_counts = sorted({count for count in row_counts if count < slots} | {slots})
        for count in self.row_counts:
            check_size(count, "A number of rows")
            if count % shards:
                raise InputError(
                    f"{count} rows cannot be split evenly over the {shards} devices along data; "
                    f"give slots and row_counts in multiples of {shards}."
                )
        self._table = tree if isinstance(tree, TreeTable) else None
        if isinstance(tree, TreeTable):
            tuned = dict.fromkeys(one.tree for one in tree.trees)
            found = [one for one in tuned if one is not None]
        else:
            found = [] if drafter is None else [tree]
        bound = (bind_drafter(drafter, one) for one in found)
        self.drafters: tuple[Drafter, ...] = (RootOnly(), *bound)
        self._index = {one: index for index, one in enumerate(found, start=1)}
        self.programs = {
            (rows, chosen): Program()
            for rows in self.row_counts
            for chosen in range(len(self.drafters))
            if chosen in self._chosen_for(rows)
        }

    def one_of(self, chosen: int) -> OneOf:
        """The drafters, of which this one proposes."""
        return OneOf(self.drafters, chosen)

    def rows_for(self, active: int) -> int:
        """The smallest of `row_counts` that holds so many rows."""
        return next(rows for rows in self.row_counts if rows >= active)

    def choose(self, rows: int, temperatures: Sequence[float]) -> int:
        """The index of the drafter for the next steps.

        Args:
          rows: of `row_counts`.
          temperatures: of the rows that speculate; where none does, it is the one-node tree.
        """
        if not temperatures:
            return 0
        if self._table is None:
            return len(self.drafters) - 1
        tuned = self._table.nearest(rows, sum(temperatures) / len(temperatures))
        chosen = self._index[tuned.tree] if tuned.tree else 0
        program, baseline = self.programs[rows, chosen], self.programs[rows, 0]
        if program.seconds is None or baseline.seconds is None:
            return chosen
        predicted = tuned.measured_speedup * self._cost_where_tuned(tuned, rows, chosen)
        if program.gain is None:
            program.gain = predicted
        if program.gain * baseline.seconds >= program.seconds:
            return chosen
        # It is tried again when little is left of what made it look slow.
        program.gain += (predicted - program.gain) * _weight(len(temperatures), _IDLE_HALF_LIFE)
        return 0

    def add_time(self, rows: int, chosen: int, seconds: float) -> None:
        """Record how long a step took; the shortest time counts."""
        program = self.programs[rows, chosen]
        program.seconds = min(seconds, program.seconds or seconds)

    def add_gain(self, rows: int, chosen: int, calls: int, gained: int) -> None:
        """Record what target calls of rows that speculate gained."""
        program = self.programs[rows, chosen]
        if program.gain is not None and calls:
            program.gain += (gained / calls - program.gain) * _weight(calls, _HALF_LIFE)

    def _cost_where_tuned(self, tuned: TunedTree, rows: int, chosen: int) -> float:
        """Of a step in baseline steps, at the table's own batch size if that is timed too.

        Its speed-up over that is what the tree gains, for any number of rows.
        """
        own = tuned.batch_size
        pairs = [
            (self.programs.get((size, chosen)), self.programs.get((size, 0)))
            for size in (own, rows)
        ]
        return next(
            program.seconds / baseline.seconds
            for program, baseline in pairs
            if program and baseline and program.seconds and baseline.seconds
        )

    def _chosen_for(self, rows: int) -> set[int]:
        if self._table is None:
            return {0, len(self.drafters) - 1}
        nearest: list[TunedTree] = [
            self._table.nearest(rows, tree.temperature) for tree in self._table.trees
        ]
        return {0, *(self._index[tree.tree] for tree in nearest if tree.tree is not None)}


def _weight(calls: int, half_life: int) -> float:
    return 1 - 0.5 ** (calls / half_life)
