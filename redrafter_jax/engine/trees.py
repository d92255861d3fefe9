"""The choice of the tree to draft: a tree is used only while it makes decoding faster.

The cost of a step grows with the number of rows and of tree nodes. The gain of a step depends on
the text. So the engine measures both: the seconds per step of each compiled program, and the tokens
gained by recent target calls. The choice affects only the speed, never the text.
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

# Weight of the expected gain against measured gains, in target calls of one row.
_PRIOR_CALLS = 4
# Number of target calls of one row after which a measured gain has half its weight.
_HALF_LIFE = 32
# Steps without drafting before a tree that did not pay is tried again: the first time, and the
# maximum, because the number doubles with every failure.
_PATIENCE, _LONGEST_PATIENCE = 16, 512
# Upper bound on patience at the start of a new text.
_NEW_TEXT_PATIENCE = 64
# A tree is kept unless it loses by more than this fraction: measurements are noisy.
_MARGIN = 0.02
# Steps that time a program which no warm-up has timed.
_TIMED_STEPS = 4
# Steps of a newly chosen tree until the next choice; doubled each time the tree is kept.
_FIRST_BURST = 2

# Fraction of the weight of its measurements that a gain keeps when a new text begins.
_CARRIED = 0.25


@dataclass
class _Learned:
    """Measurements of a tree's gain on recent texts.

    Attributes:
      gain: tokens gained per target call; None until known.
      calls: number of target calls from which `gain` was measured; old calls count less.
      patience: number of steps without drafting before a tree that did not pay is tried again.
      waiting: number of steps without drafting that remain before the next try.
      burst: number of steps with this tree until the next choice.
    """

    gain: float | None = None
    calls: float = 0.0
    patience: int = _PATIENCE
    waiting: int = 0
    burst: int = _FIRST_BURST

    def begin_text(self) -> None:
        """Reduce the weight of earlier texts; call this when all rows have new texts."""
        self.calls *= _CARRIED
        self.patience = min(self.patience, _NEW_TEXT_PATIENCE)
        self.burst = _FIRST_BURST
        self.waiting = min(self.waiting, _PATIENCE)


# Shared by all engines of a process: recent seconds per step of every compiled program, and the
# measured gain of every tree for a pair of models.
_seconds: dict[Hashable, deque[float]] = {}
_learned: dict[Hashable, _Learned] = {}


def bind_models(
    target: Target, drafter: LoadedHead | Drafter | None, tree: TreeConfig | TreeTable | None
) -> tuple[Drafter, tuple[TreeConfig | None, ...]]:
    """Check that the models and the tree fit each other; return the drafter and its trees.

    Args:
      target: the target model.
      drafter: drafter, in any form that `generate` takes.
      tree: tree, in any form that `generate` takes.

    Returns:
      The drafter as a `Drafter`, and the distinct trees that may be drafted.

    Raises:
      InputError: an argument has the wrong type, or the models do not fit each other.
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
        raise InputError(f"target is {target!r:.40}; give the result of load_target.")
    for one in trees:
        check_drafting(target.config, bound, one)
    check_same_mesh(target, *bound.models)
    return bound, trees


class TreeChooser:
    """Chooses the fastest of several trees while decoding.

    Attributes:
      trees: all trees that may be drafted; the first is None, which stands for the root alone.
      row_counts: batch sizes for which decoding may be compiled, in ascending order.
      programs: (batch size, tree) pairs that may be compiled.

    Args:
      tree: one tree for all texts, or a table of trees from `python -m eval tune`; None drafts
        nothing.
      adaptive: whether to decode without drafting while drafting makes decoding slower.
      slots: B, number of rows of the decode state.
      row_counts: batch sizes besides B. None uses the batch sizes of the table; without a table,
        the number of shards.
      shards: number of equal shards into which a mesh splits the rows.
      models: key that identifies target and drafter; engines with equal keys share measured gains.
      shape: key of everything else, besides batch size and tree, that affects the seconds per step;
        engines with equal keys share measured times.

    Raises:
      InputError: a batch size cannot be split equally over the shards.
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
            check_size(count, "An entry of row_counts")
            if count % shards:
                raise InputError(
                    f"{count} rows cannot be split evenly over the mesh's data={shards}; give "
                    f"slots and row_counts in multiples of {shards}."
                )
        self.programs = [
            (rows, tree) for rows in self.row_counts for tree in self.trees if self._may(rows, tree)
        ]
        self._own = _Learned()
        self._tree: TreeConfig | None = None
        self._text_is_new = False

    def rows_for(self, active: int) -> int:
        """Return the smallest of `row_counts` that is at least `active`."""
        return next(rows for rows in self.row_counts if rows >= active)

    def begin_text(self) -> None:
        """Record that all rows have new texts from the next decode step on."""
        self._text_is_new = True

    def choose(
        self, rows: int, temperatures: Sequence[float], most: int
    ) -> tuple[TreeConfig | None, int]:
        """Choose the tree of the next steps, and the number of steps until the next choice.

        Args:
          rows: batch size, one of `row_counts`.
          temperatures: temperatures of the rows for which trees may be drafted; if it is empty,
            nothing is drafted.
          most: maximum number of steps.

        Returns:
          The tree, or None to draft nothing; and the number of steps, at most `most`.
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
            # Time the tree first, then the baseline once, for the ratio of their costs.
            measured = self.seconds(rows, tree) is not None
            return (None if measured and own.calls else tree), min(_TIMED_STEPS, most)
        if own.gain is None:
            own.gain = max(cost, self._expected(tuned))
        if own.gain >= cost * (1 - _MARGIN):
            return tree, min(own.burst, most)
        own.waiting = own.patience
        own.patience = min(2 * own.patience, _LONGEST_PATIENCE)
        # At the next try, assume that the tree just pays.
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
        """Record the time and the gain of some steps.

        Args:
          rows: batch size.
          tree: tree that was drafted; None if nothing was drafted.
          steps: number of steps.
          calls: number of target calls in these steps, over the rows that speculate.
          gained: number of tokens gained by these calls.
          seconds: seconds per step; None if not measured.
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
        """Record the seconds that one step took."""
        _seconds.setdefault((self._shape, rows, tree), deque(maxlen=9)).append(seconds)

    def seconds(self, rows: int, tree: TreeConfig | None) -> float | None:
        """Return the median of the recent seconds per step; None if there are no measurements."""
        known = _seconds.get((self._shape, rows, tree))
        return median(known) if known else None

    def cost(self, rows: int, tree: TreeConfig, tuned: TunedTree | None = None) -> float | None:
        """Return the time of a step with a tree, divided by the time of a step without drafting.

        This is also the number of tokens that a step with the tree must gain to be worth its time.
        If such steps have not been timed, the cost is the acceptance length divided by the speed-up
        in `tuned`. None means that the cost is unknown.
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
