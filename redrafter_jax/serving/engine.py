"""Continuous batching: requests come and go while others are decoded, and none changes another.

What is decided for a request depends on nothing but the request, as in `generate`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from redrafter_jax.config import TreeConfig
from redrafter_jax.decoding.prefill import chunk_length
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_same_mesh, data_shards, place, to_host
from redrafter_jax.requests import check_size, slots_for
from redrafter_jax.serving.admission import (
    Row,
    Slot,
    admit,
    idle_row,
    make_row,
    next_batch,
    next_chunk,
)
from redrafter_jax.serving.budgets import Budgets
from redrafter_jax.serving.messages import Counters, Event, QueueFull, Request, new_tokens
from redrafter_jax.serving.slots import Gains, decode_rows, empty_rows, read_chunk
from redrafter_jax.types import NO_CHOICE

# The first one compiles.
_WARM_UP_TURNS = 4
# How many requests that ended last tell the pace.
_RECENT = 64


class _Run(NamedTuple):
    """A program that runs on the device.

    Attributes:
      slots: by place in its batch, the slots whose requests gain something.
      gains: what they gain.
      program: rows and drafter of a decode call; None for a prefill pass.
    """

    slots: dict[int, int]
    gains: Gains
    program: tuple[int, int] | None


class Engine:
    """A fixed number of slots that requests share, and the queue before them.

    It belongs to one thread. On a mesh of several processes each runs one, with the same requests
    in the same order, without deadlines and with one `TreeConfig`.

    Attributes:
      target: the target model.
      counters: sums over all requests.
      on_admission: called with a request's number when it gets its slot, before its prompt is read.

    Args:
      target: the target model.
      drafter: as in `generate`.
      tree: how a loaded drafter drafts: one `TreeConfig`, or the tuner's table, of which the tree
        is taken for the number of rows that decode and their temperature; None is
        `TreeConfig()` for a loaded one.
      slots: B, rows that decode together; a multiple of the mesh's `data`.
      context_length: tokens that a request may come to, its prompt included.
      queue_limit: requests that may wait beyond those that free slots can take; None for no limit.
      stop_tokens: that end a row; None takes the target's.
      steps_per_call: decode steps between two looks at what has ended.
      prefill_chunk: tokens of a prompt that are read in one pass; None takes what suits the
        platform.
      prefill_rows: prompts that are read together, on each part of `data`. Where it is more than 1,
        prompts wait for each other while rows decode.
      row_counts: numbers of rows, beside all, for which decoding is compiled, so that a few active
        ones cost less. None takes the table's batch sizes; without a table, the mesh's `data`.
      top_log_probs: how many of the most likely tokens are reported beside each token.
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
        slots: int,
        context_length: int,
        queue_limit: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        steps_per_call: int = 4,
        prefill_chunk: int | None = None,
        prefill_rows: int = 1,
        row_counts: Sequence[int] | None = None,
        top_log_probs: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, shards = target.config, data_shards(target.mesh)
        check_size(slots, "slots")
        check_size(context_length, "context_length", 2, config.position_limit)
        check_size(queue_limit or 0, "queue_limit", 0)
        check_size(steps_per_call, "steps_per_call")
        check_size(1 if prefill_chunk is None else prefill_chunk, "prefill_chunk")
        check_size(prefill_rows, "prefill_rows")
        check_size(top_log_probs, "top_log_probs", 0, config.vocab_size)
        self._budgets = Budgets(drafter, tree, slots, row_counts, shards)
        one_of = self._budgets.one_of(0)
        one_of.check(config)
        check_same_mesh(target, *one_of.models)
        self._budgets.drafters = one_of.prepare(Lender(target)).drafters

        self.counters = Counters()
        self.on_admission: Callable[[int], object] = lambda number: None
        self.target = target
        self._context_length = context_length
        self._queue_limit = queue_limit
        self._stop_tokens = tuple(config.eos_token_ids if stop_tokens is None else stop_tokens)
        self._steps = steps_per_call
        self._prefill_rows = prefill_rows
        self._top = top_log_probs
        self._clock = clock
        cache_slots = slots_for(context_length, one_of.longest_path)
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
        self._stop_width = self._idle.arrays.stop_tokens.shape[1]
        self._state = empty_rows(target, one_of, slots, cache_slots, self._stop_width)

    @property
    def slots(self) -> int:
        """B, rows that decode together."""
        return len(self._slots)

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
        count = len(self._budgets.programs) + 1  # prefill, too
        # From the second turn on the state is what these programs leave behind.
        for turn in range(_WARM_UP_TURNS):
            jax.block_until_ready(self._read({}).gains)
            for compiled, (rows, chosen) in enumerate(self._budgets.programs, start=1):
                if not proceed(count if turn else compiled, count):
                    return
                started = time.perf_counter()
                jax.block_until_ready(self._decode([], rows, chosen).gains)
                seconds = (time.perf_counter() - started) / self._steps
                if turn:
                    self._budgets.add_time(rows, chosen, seconds)
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
        row = make_row(self.target, self._submitted, request, self._stop_tokens, self._stop_width)
        length, limit = len(request.prompt), request.max_new_tokens
        if length + limit > self._context_length:
            raise InputError(
                f"The request is for {length} prompt and {limit} new tokens, but slots have room "
                f"for {self._context_length}; ask for fewer, or give the engine a longer "
                "context_length."
            )
        free = self.slots - self.active
        if self._queue_limit is not None and self.waiting - free >= self._queue_limit:
            seconds = (self._clock() - self._ends[0]) / max(1, len(self._ends) - 1)
            raise QueueFull(f"{self.waiting} requests wait, as many as may; ask later.", seconds)
        if not self.busy:
            self._ends.clear()
            self._ends.append(self._clock())
        self._submitted += 1
        self._queue.append(row)
        return row.number

    def cancel(self, number: int) -> None:
        """End a request, whose slot is free at once; nothing happens to one that has ended."""
        self._end("cancelled", lambda row: row.number == number)

    def advance(self, passes: int | None = 1) -> list[Event]:
        """Admit requests, read prompts, and decode a few steps of the rows whose prompts are read.

        Args:
          passes: prefill passes at most before rows decode; None for all that there are.

        Returns:
          What is new, one event for each request with something new.
        """
        now = self._clock()
        self._end("deadline", lambda row: now > row.request.deadline)
        runs: list[_Run] = []
        while passes is None or len(runs) < passes:
            places, admitted = admit(self._slots, self._queue, self._parts, self._prefill_rows)
            if not places:
                break
            for slot in admitted:
                self.counters.prompt_tokens += slot.prompt_length
                self.counters.reused_tokens += slot.cached
                self.on_admission(slot.number)
            runs.append(self._read(places))
        active = [index for index, slot in enumerate(self._slots) if slot.decoding]
        if active:
            runs.append(self._decode(active, *self._choose(active)))
        events = {event.number: event for event in self._ended}
        self._ended = []
        for run, gains in zip(runs, to_host([run.gains for run in runs]), strict=True):
            self._collect(run, gains, events)
        return list(events.values())

    def _read(self, places: dict[int, int]) -> _Run:
        """One prefill pass for these slots, by place."""
        shape = self._prefill_rows * len(self._parts), self._chunk
        chunk = next_chunk(self._slots, places, len(self._parts[0]), shape, self._idle)
        drafter, placed = self._budgets.one_of(0), place(chunk, self.target.mesh)
        self._state, gains = read_chunk(self.target, drafter, self._state, placed, top=self._top)
        self.counters.prefill_passes += 1
        return _Run(places, gains, None)

    def _choose(self, active: list[int]) -> tuple[int, int]:
        """Rows and drafter of the program that decodes these slots next."""
        fullest = max(sum(index in part for index in active) for part in self._parts)
        rows = self._budgets.rows_for(fullest * len(self._parts))
        requests = [slot.row.request for slot in self._slots if slot.row and slot.decoding]
        temperatures = [one.sampling.temperature for one in requests if one.speculate]
        return rows, self._budgets.choose(rows, temperatures)

    def _decode(self, active: list[int], rows: int, chosen: int) -> _Run:
        """Decode these slots for a few steps by the program of so many rows and this drafter."""
        batch, places = next_batch(active, rows, self._parts)
        placed: Any = place(batch, self.target.mesh)
        drafter = self._budgets.one_of(chosen)
        self._state, gains = decode_rows(
            self.target, drafter, self._state, placed, steps=self._steps, top=self._top
        )
        return _Run(places, gains, (rows, chosen))

    def _collect(self, run: _Run, gains: Gains, events: dict[int, Event]) -> None:
        """Add what a program gained to the events."""
        names = self._budgets.one_of(run.program[1] if run.program else 0).names
        calls = gained = 0
        for at, index in run.slots.items():
            slot = self._slots[index]
            own_calls = int(np.count_nonzero(gains.counts[at]))
            if slot.row is None or not own_calls:
                continue
            number, request, arrays = slot.row
            new = new_tokens(gains, at, names, slot.calls)
            slot.add(new)
            before, ended = events[number].decided if number in events else [], None
            if gains.done[at]:
                ended = "stop" if slot.text[-1] in arrays.stop_tokens else "length"
                if slot.text[-1] == NO_CHOICE:
                    ended = "not numbers"
                    new.pop()
                self._free(slot)
            events[number] = Event(number, before + new, ended)
            if run.program:
                drafted = zip(names, gains.drafted[at].sum(axis=0).tolist(), strict=True)
                self.counters.add(new, own_calls, dict(drafted))
                calls += request.speculate * own_calls
                gained += request.speculate * len(new)
        if run.program:
            self._budgets.add_gain(*run.program, calls, gained)

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
