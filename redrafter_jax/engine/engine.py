"""Continuous batching: requests come and go while others are decoded, and none changes another.

What is decided for a request depends on nothing but the request, as in `generate`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.config.drafting import longest_path
from redrafter_jax.decoding.read import chunk_length, lost_entries
from redrafter_jax.drafters.base import Drafter, LoadedHead, RootOnly, check_drafting
from redrafter_jax.drafters.bind import as_drafter, bind_drafter
from redrafter_jax.engine.admission import (
    Row,
    Slot,
    admit,
    beginnings,
    idle_row,
    make_row,
    next_batch,
    next_chunk,
)
from redrafter_jax.engine.device import (
    Gains,
    copy_beginnings,
    decode_rows,
    empty_rows,
    read_rows,
)
from redrafter_jax.engine.messages import Counters, Event, QueueFull, Request, new_tokens
from redrafter_jax.engine.requests import check_size, slots_for
from redrafter_jax.engine.trees import TreeChooser
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.models.projection import lender_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_same_mesh, data_shards, place, to_host
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import NO_CHOICE, SOURCES

# The first one compiles.
_WARM_UP_TURNS = 4
# How many requests that ended last tell the pace.
_RECENT = 64


class _Run(NamedTuple):
    """A program that runs on the device.

    Attributes:
      slots: by place in its batch, the slots whose requests gain something.
      result: the gains, and which rows have ended.
      program: rows and tree of a decode call; None for a prefill pass.
      began: seconds at its dispatch; None where it is not timed.
    """

    slots: dict[int, int]
    result: tuple[Gains, Any]
    program: tuple[int, TreeConfig | None] | None
    began: float | None = None


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


class Engine:
    """A fixed number of slots that requests share, and the queue before them.

    Everything that decodes asks one: `generate`, `stream`, the commands, the server, regeneration
    and evaluation. It belongs to one thread. On a mesh of several processes each runs one, with the
    same requests in the same order, without deadlines and with one `TreeConfig`.

    Attributes:
      target: the target model.
      drafter: the drafter, prepared for the target.
      adaptive: whether a tree gives way to plain decoding.
      longest_path: P of the largest tree.
      steps_per_call: decode steps that one `advance` takes at most; each value compiles.
      counters: sums over all requests.
      on_admission: called with a request's number when it gets its slot, before its prompt is read.

    Args:
      target: the target model.
      drafter: as in `generate`.
      tree: the shape of the trees, or the tuner's table, of which the tree is taken for the number
        of rows that decode and their temperature; None is the drafter's default.
      adaptive: whether a tree gives way to plain decoding while it gains less than it costs; None
        is True unless `tree` is one `TreeConfig`.
      slots: B, rows that decode together; a multiple of the mesh's `data`.
      context_length: tokens that a request may come to, its prompt included.
      queue_limit: requests that may wait beyond those that free slots can take; None for no limit.
      stop_tokens: tokens that end a row; None takes the target's.
      steps_per_call: decode steps between two looks at what has ended; None for as many as a text
        may need.
      prefill_chunk: tokens of a prompt that are read in one pass; None takes what suits the
        platform.
      prefill_rows: prompts that are read together, on each part of `data`. Where it is more than 1,
        prompts wait for each other while rows decode.
      row_counts: numbers of rows, beside all, for which decoding is compiled, so that a few active
        ones cost less. None takes the table's batch sizes; without a table, the mesh's `data`.
      top_log_probs: how many of the most likely tokens are reported beside each token and its
        log-probability; None reports neither.
      clock: gives seconds, for deadlines.

    Raises:
      InputError: a size is not possible, or the models do not fit each other.
    """

    def __init__(
        self,
        target: Target,
        drafter: LoadedHead | Drafter | None,
        *,
        tree: TreeConfig | TreeTable | None = None,
        adaptive: bool | None = None,
        slots: int,
        context_length: int,
        queue_limit: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        steps_per_call: int | None = 4,
        prefill_chunk: int | None = None,
        prefill_rows: int = 1,
        row_counts: Sequence[int] | None = None,
        top_log_probs: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bound, trees = bind_models(target, drafter, tree)
        config, shards = target.config, data_shards(target.mesh)
        check_size(slots, "slots")
        check_size(context_length, "context_length", 2, config.position_limit)
        check_size(queue_limit or 0, "queue_limit", 0)
        check_size(1 if steps_per_call is None else steps_per_call, "steps_per_call")
        check_size(1 if prefill_chunk is None else prefill_chunk, "prefill_chunk")
        check_size(prefill_rows, "prefill_rows")
        check_size(top_log_probs or 0, "top_log_probs", 0, config.vocab_size)
        leaves, structure = jax.tree.flatten((target, bound))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        self.adaptive = not isinstance(tree, TreeConfig) if adaptive is None else adaptive
        self.adaptive &= trees != (None,)
        self._trees = TreeChooser(
            tree if isinstance(tree, TreeTable) else trees[0],
            adaptive=self.adaptive,
            slots=slots,
            row_counts=row_counts,
            shards=shards,
            models=(structure, shapes),
            shape=(slots, context_length, top_log_probs),
        )
        self.longest_path = max(map(longest_path, trees))
        self.counters = Counters()
        self.on_admission: Callable[[int], object] = lambda number: None
        self.target = target
        self.drafter = bound.prepare(lender_of(target))
        self._context_length = context_length
        self._queue_limit = queue_limit
        self._stop_tokens = tuple(config.eos_token_ids if stop_tokens is None else stop_tokens)
        self._prefill_rows = prefill_rows
        self._top = top_log_probs
        self._clock = clock
        cache_slots = slots_for(context_length, self.longest_path)
        self.steps_per_call = steps_per_call or cache_slots
        self._chunk = min(prefill_chunk or chunk_length(), cache_slots)
        self._slots: list[Slot] = [Slot() for _ in range(slots)]
        # Of each device along `data`.
        size = slots // shards
        self._parts = [range(start, start + size) for start in range(0, slots, size)]
        self._queue: deque[Row] = deque()
        self._ended: list[Event] = []
        self._submitted = self._freed = 0
        # When there was nothing to do, and since then when slots became free.
        self._ends: deque[float] = deque(maxlen=_RECENT + 1)
        self._idle = idle_row(target, self._stop_tokens)
        self._state = empty_rows(target, bound, slots, cache_slots, self.stop_width)
        # Programs that have run: the first run compiles.
        self._timed: set[tuple[int, TreeConfig | None]] = set()

    @property
    def slots(self) -> int:
        """B, rows that decode together."""
        return len(self._slots)

    @property
    def stop_width(self) -> int:
        """E, stop tokens that a request may have."""
        return self._idle.arrays.stop_tokens.shape[1]

    @property
    def intact(self) -> bool:
        """Whether it can go on: a step that was interrupted took the state along."""
        return not self._state.root.is_deleted()

    @property
    def active(self) -> int:
        """Requests that have a slot."""
        return sum(slot.row is not None for slot in self._slots)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether the next `advance` has something to do or to tell."""
        return bool(self._queue or self._ended or self.active)

    def warm_up(self, proceed: Callable[[int, int], bool] = lambda ready, programs: True) -> None:
        """Compile everything, and time a step of each program.

        Args:
          proceed: called before each program with how many are ready, and of how many; False ends
            it.

        Raises:
          InputError: a request has been submitted.
        """
        if self._submitted:
            raise InputError("warm_up comes before the first request; make another engine.")
        count = len(self._trees.programs) + 1  # prefill, too
        # From the second turn on the state is what these programs leave behind.
        for turn in range(_WARM_UP_TURNS):
            self._copy_beginnings({})
            jax.block_until_ready(self._read({}).result)
            for compiled, program in enumerate(self._trees.programs, start=1):
                if not proceed(count if turn else compiled, count):
                    return
                started = time.perf_counter()
                jax.block_until_ready(self._decode([], *program, self.steps_per_call).result)
                if turn:
                    seconds = (time.perf_counter() - started) / self.steps_per_call
                    self._trees.add_time(*program, seconds)
                self._timed.add(program)
        self.counters.prefill_passes = 0
        self.counters.count_compilations(self)

    def submit(self, request: Request) -> int:
        """Let a request wait for a slot, behind those that came before.

        Returns:
          Its number.

        Raises:
          InputError: it can never run: something in it does not fit the target or a slot.
          QueueFull: too many wait.
        """
        row = make_row(self.target, self._submitted, request, self._stop_tokens, self.stop_width)
        length, limit = len(request.prompt), request.max_new_tokens
        if length + limit > self._context_length:
            raise InputError(
                f"The request is for {length} prompt and {limit} new tokens, but slots have room "
                f"for {self._context_length}; ask for fewer, or give the engine a longer "
                "context_length."
            )
        limit = self._queue_limit
        if limit is not None and self.waiting - (self.slots - self.active) >= limit:
            seconds = (self._clock() - self._ends[0]) / max(1, len(self._ends) - 1)
            raise QueueFull(f"{self.waiting} requests wait, as many as may; ask later.", seconds)
        if not self.busy:
            self._ends.clear()
            self._ends.append(self._clock())
        self._submitted += 1
        self._queue.append(row)
        return row.number

    def cancel_all(self) -> None:
        """End all requests; nobody hears of them again."""
        self._end("cancelled", lambda row: True)
        self._ended = []

    def cancel(self, number: int) -> None:
        """End a request, whose slot is free at once; nothing happens to one that has ended."""
        self._end("cancelled", lambda row: row.number == number)

    def advance(self, passes: int | None = 1, steps: int | None = None) -> list[Event]:
        """Admit requests, read prompts, and decode a few steps of the rows whose prompts are read.

        Args:
          passes: prefill passes at most before rows decode; None for all that there are.
          steps: decode steps at most; None for `steps_per_call`.

        Returns:
          What is new, one event for each request with something new.
        """
        now = self._clock()
        self._end("deadline", lambda row: now > row.request.deadline)
        runs: list[_Run] = []
        while passes is None or len(runs) < passes:
            places, admitted = admit(
                self._slots,
                self._queue,
                self._parts,
                self._prefill_rows,
                lost_entries(self.drafter),
            )
            if not places:
                break
            for slot in admitted:
                self.counters.prompt_tokens += slot.prompt_length
                self.counters.reused_tokens += slot.cached
                self.on_admission(slot.number)
            if admitted and len(admitted) == self.active:
                self._trees.begin_text()
            runs.append(self._read(places))
        active = [index for index, slot in enumerate(self._slots) if slot.decoding]
        if active and steps != 0:
            most = self.steps_per_call if steps is None else min(steps, self.steps_per_call)
            rows, tree, count = self._choose(active, most)
            runs.append(self._decode(active, rows, tree, count, timed=not runs))
        events = {event.number: event for event in self._ended}
        self._ended = []
        results = to_host([run.result for run in runs])
        finished = time.perf_counter()
        for run, (gains, done) in zip(runs, results, strict=True):
            self._collect(run, gains, done, finished, events)
        return list(events.values())

    def _read(self, places: dict[int, int]) -> _Run:
        """One prefill pass for these slots, by place."""
        size, mesh = len(self._parts[0]), self.target.mesh
        shape = self._prefill_rows * len(self._parts), self._chunk
        if any(self._slots[index].source is not None for index in places.values()):
            self._copy_beginnings(places)
        chunk = place(next_chunk(self._slots, places, size, shape, self._idle), mesh)
        self._state, result = read_rows(
            self.target, self.drafter, self._state, chunk, top=self._top
        )
        self.counters.prefill_passes += 1
        return _Run(places, result, None)

    def _copy_beginnings(self, places: dict[int, int]) -> None:
        """Give slots the beginnings of their prompts that other slots hold."""
        size, count = len(self._parts[0]), self._prefill_rows * len(self._parts)
        placed: Any = place(beginnings(self._slots, places, size, count), self.target.mesh)
        self._state = copy_beginnings(self.target, self._state, *placed)

    def _choose(self, active: list[int], most: int) -> tuple[int, TreeConfig | None, int]:
        """Rows and tree of the program that decodes these slots next, and for how many steps."""
        fullest = max(sum(index in part for index in active) for part in self._parts)
        rows = self._trees.rows_for(fullest * len(self._parts))
        requests = [slot.row.request for slot in self._slots if slot.row and slot.decoding]
        temperatures = [one.sampling.temperature for one in requests if one.speculate]
        return rows, *self._trees.choose(rows, temperatures, most)

    def _decode(
        self,
        active: list[int],
        rows: int,
        tree: TreeConfig | None,
        steps: int,
        *,
        timed: bool = False,
    ) -> _Run:
        """Decode these slots for a few steps by the program of so many rows and this tree."""
        batch, places = next_batch(active, rows, self._parts)
        placed: Any = place(batch, self.target.mesh)
        began = time.perf_counter() if timed and (rows, tree) in self._timed else None
        self._timed.add((rows, tree))
        self._state, result = decode_rows(
            self.target,
            self.drafter,
            self._state,
            placed,
            steps,
            tree=tree,
            steps=self.steps_per_call,
            top=self._top,
        )
        return _Run(places, result, (rows, tree), began)

    def _collect(
        self, run: _Run, gains: Gains, done: Any, finished: float, events: dict[int, Event]
    ) -> None:
        """Add what a program gained to the events."""
        calls = gained = 0
        for at, index in run.slots.items():
            slot = self._slots[index]
            own_calls = int(np.count_nonzero(gains.counts[at]))
            if slot.row is None or not own_calls:
                continue
            number, request, arrays = slot.row
            new = new_tokens(gains, at, self.sources, slot.calls)
            slot.add(new)
            before, ended = events[number].decided if number in events else [], None
            if done[at]:
                ended = "stop" if slot.text[-1] in arrays.stop_tokens else "length"
                if slot.text[-1] == NO_CHOICE:
                    ended = "not numbers"
                    new.pop()
                self._free(slot)
            events[number] = Event(number, before + new, ended)
            if run.program:
                drafted = zip(self.sources, gains.drafted[at].sum(axis=0).tolist(), strict=True)
                self.counters.add(new, own_calls, dict(drafted))
                calls += request.speculate * own_calls
                gained += request.speculate * len(new)
        if run.program:
            steps = int(np.count_nonzero(np.asarray(gains.counts).any(axis=0)))
            seconds = None if run.began is None or not steps else (finished - run.began) / steps
            self._trees.add(*run.program, steps, calls, gained, seconds)

    @property
    def sources(self) -> tuple[str, str]:
        """What proposes tokens, by name, in the order of `SOURCES`."""
        return self.drafter.name, SOURCES[1]

    @property
    def drafted_by(self) -> tuple[str, ...]:
        """Those of the sources that some tree has nodes of."""
        trees = [tree for tree in self._trees.trees if tree is not None]
        return self.sources[: bool(trees) + any(tree.lookup_tokens > 0 for tree in trees)]

    def _end(self, why: str, ends: Callable[[Row], bool]) -> None:
        """End the requests for which this holds."""
        for row in [row for row in self._queue if ends(row)]:
            self._queue.remove(row)
            self._ended.append(Event(row.number, [], why))
        for slot in self._slots:
            if slot.row is not None and ends(slot.row):
                self._ended.append(Event(slot.number, [], why))
                self._free(slot)

    def _free(self, slot: Slot) -> None:
        self._freed += 1
        slot.row, slot.freed = None, self._freed
        self._ends.append(self._clock())
