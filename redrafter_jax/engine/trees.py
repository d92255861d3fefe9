"""Trees that fit, and which the next steps draft: never one that costs more than it gains.

What a step costs grows with the rows that it decodes and with the nodes of their trees, what it
gains depends on the text. So both are watched: a step's seconds of each compiled program, and the
tokens that a target call has gained lately. Any rule is allowed, for no rule changes a text.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.base import (
    Drafter,
    LoadedHead,
    RootOnly,
    as_drafter,
    bind_drafter,
    check_drafting,
)
from redrafter_jax.engine.requests import check_size
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable, TunedTree
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_same_mesh
from redrafter_jax.parallel.model import Model

# Calls of a row that weigh as much as what was expected of the tree before.
_PRIOR_CALLS = 4
# Half-life of what was gained, in calls of a row.
_HALF_LIFE = 32
# Baseline steps until a tree that did not pay is tried again: at first, and after many failures.
_PATIENCE, _LONGEST_PATIENCE = 16, 512
# Of which a new text is given so many at most, whatever the texts before it were like.
_NEW_TEXT_PATIENCE = 64
# A tree must lose by so much before it is left: what is measured is noisy.
_MARGIN = 0.02
# Steps by which a program is timed that no warm-up has timed.
_TIMED_STEPS = 4
# Steps of a tree that has just been taken up; twice as many each time that it is kept.
_FIRST_BURST = 2

# What is known of a text before counts for so much of what its own calls tell.
_CARRIED = 0.25


@dataclass
class _Learned:
    """What the last texts taught of a tree.

    Attributes:
      gain: tokens that a target call gains; None before it is known.
      calls: target calls that it is known from, the older the less they count.
      patience: baseline steps until a tree that does not pay is tried again.
      waiting: how many of them are left.
      burst: steps of the tree until the next choice.
    """

    gain: float | None = None
    calls: float = 0.0
    patience: int = _PATIENCE
    waiting: int = 0
    burst: int = _FIRST_BURST

    def begin_text(self) -> None:
        """Let what other texts taught count for little: the rows that decode now are new."""
        self.calls *= _CARRIED
        self.patience = min(self.patience, _NEW_TEXT_PATIENCE)
        self.burst = _FIRST_BURST
        self.waiting = min(self.waiting, _PATIENCE)


# Engines of one process share them: seconds of a step, the last few of every compiled program, and
# what was learned of every tree of a pair of models.
_seconds: dict[Hashable, deque[float]] = {}
_learned: dict[Hashable, _Learned] = {}


def bind_models(
    target: Target, drafter: LoadedHead | Drafter | None, tree: TreeConfig | TreeTable | None
) -> tuple[Drafter, tuple[TreeConfig | None, ...]]:
    """The drafter that decoding takes, and the trees that it may draft.

    Raises:
      InputError: a model is something else, or they do not fit each other.
    """
    if isinstance(tree, TreeTable):
        bound = as_drafter(drafter)
        if isinstance(bound, RootOnly):
            raise InputError("tree is a table of trees, but there is no drafter; leave tree out.")
        trees = tuple(dict.fromkeys(tuned.tree for tuned in tree.trees))
    else:
        bound, one = bind_drafter(drafter, tree)
        trees = (one,)
    if not (isinstance(target, Model) and isinstance(target.config, TargetConfig)):
        raise InputError(
            f"target is {target!r:.40}; give what load_target returns, then its drafter."
        )
    for one in trees:
        check_drafting(target.config, bound, one)
    check_same_mesh(target, *bound.models)
    return bound, trees


class TreeChooser:
    """The trees that there are, and which of them is the fastest.

    Attributes:
      trees: all that may be drafted; None, the root alone, comes first.
      row_counts: numbers of rows that are decoded together, in rising order.
      programs: what may be compiled, pairs of a number of rows and a tree.

    Args:
      tree: one tree for all texts, or the tuner's table; None is the root alone.
      adaptive: whether the root alone is drafted where a tree does not pay.
      slots: B, rows of the state.
      row_counts: numbers of rows, beside all, that are decoded together; None takes the table's
        batch sizes, and without a table the smallest one possible.
      shards: parts of the rows on a mesh, all of one size.
      models: what tells target and drafter apart from others.
      shape: what the seconds of a step depend on besides models, rows and tree.

    Raises:
      InputError: the parts would not be of one size.
    """

    def __init__(
        self,
        tree: TreeConfig | TreeTable | None,
        *,
        adaptive: bool,
        slots: int,
        row_counts: Sequence[int] | None,
        shards: int,
        models: Hashable = None,
        shape: Hashable = None,
    ) -> None:
        self._table = tree if isinstance(tree, TreeTable) else None
        self._only = tree if isinstance(tree, TreeConfig) else None
        found = [tuned.tree for tuned in self._table.trees] if self._table else [self._only]
        self.trees: tuple[TreeConfig | None, ...] = tuple(dict.fromkeys([None, *found]))
        self._adaptive = adaptive
        self._models, self._shape = models, (models, shape)
        if row_counts is None:
            sizes = [tuned.batch_size for tuned in self._table.trees] if self._table else []
            row_counts = [size for size in sizes if size % shards == 0] or [shards]
        self.row_counts = sorted({count for count in row_counts if count < slots} | {slots})
        for count in self.row_counts:
            check_size(count, "A number of rows")
            if count % shards:
                raise InputError(
                    f"{count} rows cannot be split evenly over the {shards} devices along data; "
                    f"give slots and row_counts in multiples of {shards}."
                )
        self.programs = [
            (rows, tree) for rows in self.row_counts for tree in self.trees if self._may(rows, tree)
        ]
        self._own = _Learned()
        self._tree: TreeConfig | None = None
        self._text_is_new = False

    def rows_for(self, active: int) -> int:
        """The smallest of `row_counts` that holds so many rows."""
        return next(rows for rows in self.row_counts if rows >= active)

    def begin_text(self) -> None:
        """Note that the rows that decode next are new, all of them."""
        self._text_is_new = True

    def choose(
        self, rows: int, temperatures: Sequence[float], most: int
    ) -> tuple[TreeConfig | None, int]:
        """The tree of the next steps, and how many steps to take before the next choice.

        Args:
          rows: one of `row_counts`.
          temperatures: of the rows that speculate; where none does, it is the root alone.
          most: steps that the caller has room for.
        """
        tuned = self._tuned(rows, temperatures)
        tree = self._only if tuned is None else tuned.tree
        if not temperatures or tree is None:
            return None, most
        if not self._adaptive:
            return tree, most
        if tree != self._tree:
            self._tree = tree
            self._own = _learned.setdefault((self._models, tree), _Learned())
        own, cost = self._own, self.cost(rows, tree, tuned)
        if self._text_is_new:
            own.begin_text()
            self._text_is_new = False
        if own.waiting:
            return None, min(own.waiting, most)
        if cost is None:
            # The tree first; then the baseline once, to know what a step of the tree costs.
            measured = self.seconds(rows, tree) is not None
            return (None if measured and own.calls else tree), min(_TIMED_STEPS, most)
        if own.gain is None:
            own.gain = max(cost, self._expected(tuned))
        if own.gain >= cost * (1 - _MARGIN):
            return tree, min(own.burst, most)
        own.waiting = own.patience
        own.patience = min(2 * own.patience, _LONGEST_PATIENCE)
        # Tried again, it is expected to pay just so.
        own.gain, own.calls, own.burst = cost, 0.0, _FIRST_BURST
        return None, min(own.waiting, most)

    def add(
        self,
        rows: int,
        tree: TreeConfig | None,
        steps: int,
        calls: int,
        gained: int,
        seconds: float | None,
    ) -> None:
        """Record what some steps cost and gained.

        Args:
          rows: rows that were decoded together.
          tree: what was drafted.
          steps: steps that were taken.
          calls: target calls of rows that speculate, in these steps.
          gained: tokens that these calls gained.
          seconds: that a step took; None where that was not measured.
        """
        if seconds is not None:
            self.add_time(rows, tree, seconds)
        own = self._own
        if tree is None:
            own.waiting = max(own.waiting - steps, 0)
            return
        if tree != self._tree or not calls:
            return
        kept = 0.5 ** (calls / _HALF_LIFE)
        before = own.gain if own.gain is not None else gained / calls
        weight = (own.calls + _PRIOR_CALLS) * kept
        own.gain = (before * weight + gained) / (weight + calls)
        own.calls = own.calls * kept + calls
        own.burst *= 2
        if own.calls > 2 * _PATIENCE:
            own.patience = _PATIENCE

    def add_time(self, rows: int, tree: TreeConfig | None, seconds: float) -> None:
        """Record how long a step took."""
        _seconds.setdefault((self._shape, rows, tree), deque(maxlen=9)).append(seconds)

    def seconds(self, rows: int, tree: TreeConfig | None) -> float | None:
        """Median seconds of a step of late; None before one is measured."""
        known = _seconds.get((self._shape, rows, tree))
        return median(known) if known else None

    def cost(self, rows: int, tree: TreeConfig, tuned: TunedTree | None = None) -> float | None:
        """What a step costs in steps of the baseline, which it must gain in tokens; None: unknown.

        Until the baseline is measured it is what the table says, for a tree that pays there.
        """
        own, baseline = self.seconds(rows, tree), self.seconds(rows, None)
        if own is not None and baseline is not None:
            return own / baseline
        if tuned is not None and tuned.acceptance_length is not None:
            return tuned.acceptance_length / tuned.measured_speedup
        return None

    def _expected(self, tuned: TunedTree | None) -> float:
        return 1.0 if tuned is None or not tuned.acceptance_length else tuned.acceptance_length

    def _tuned(self, rows: int, temperatures: Sequence[float]) -> TunedTree | None:
        if self._table is None or not temperatures:
            return None
        return self._table.nearest(rows, sum(temperatures) / len(temperatures))

    def _may(self, rows: int, tree: TreeConfig | None) -> bool:
        if tree is None or self._table is None:
            return True
        nearest = [self._table.nearest(rows, tuned.temperature) for tuned in self._table.trees]
        return any(tuned.tree == tree for tuned in nearest)
