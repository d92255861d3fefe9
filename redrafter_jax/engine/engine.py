"""Continuous batching: requests come and go while others are decoded, and none changes another.

What is decided for a request depends on nothing but the request, as in `generate`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from redrafter_jax.config import MirrorConfig, TreeConfig
from redrafter_jax.config.drafting import longest_path
from redrafter_jax.decoding.read import chunk_length, lookahead
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.engine.chunks import (
    beginnings,
    controls_of,
    first_masks,
    idle_row,
    make_row,
    next_batch,
    next_chunk,
)
from redrafter_jax.engine.device import (
    decode_rows,
    empty_rows,
    page_bytes,
    read_rows,
    write_texts,
)
from redrafter_jax.engine.gains import Gains
from redrafter_jax.engine.messages import (
    Counters,
    Event,
    MirrorCounts,
    QueueFull,
    Request,
    new_drafts,
    new_tokens,
)
from redrafter_jax.engine.pages import pages_for
from redrafter_jax.engine.requests import check_mirrored, check_size, slots_for
from redrafter_jax.engine.scheduler import Pass, Row, Scheduler
from redrafter_jax.engine.trees import TreeChooser, bind_models
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.projection import lender_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards, place, to_host
from redrafter_jax.types import NO_CHOICE, SOURCES, Controls, DecodeState

if TYPE_CHECKING:
    from redrafter_jax.engine.mirror import Mirror

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
      begins: by place, the position of the first token that a prefill pass reads.
    """

    slots: dict[int, int]
    result: tuple[Gains, Any]
    program: tuple[int, TreeConfig | None] | None
    began: float | None = None
    begins: Mapping[int, int] = {}


class Engine:
    """A fixed number of slots and of pages that requests share, and the queue before them.

    Everything that decodes asks one: `generate`, `stream`, the commands, the server, regeneration
    and evaluation. It belongs to one thread. On a mesh of several processes each runs one, with the
    same requests in the same order, without deadlines and with one `TreeConfig`; or with those of
    `engine.led`, which need neither.

    Attributes:
      target: the target model.
      drafter: the drafter, prepared for the target.
      adaptive: whether a tree gives way to plain decoding.
      longest_path: P of the largest tree.
      steps_per_call: decode steps that one `advance` takes at most; each value compiles.
      counters: sums over all requests.
      mirror: what drafts while the target verifies; None where nothing does.
      on_admission: called with a request's number when it gets its first slot, before its prompt is
        read, and with how many of the prompt's tokens the cache holds already.

    Args:
      target: the target model.
      drafter: as in `generate`.
      tree: the shape of the trees, or the tuner's table, of which the tree is taken for the number
        of rows that decode and their temperature; None is the drafter's default.
      adaptive: whether a tree gives way to plain decoding while it gains less than it costs; None
        is True unless `tree` is one `TreeConfig`.
      slots: B, rows that decode together; a multiple of the mesh's `data`.
      context_length: tokens that a request may come to, its prompt included.
      cache_memory: bytes of the cache on each device, in pages of 64 tokens that all texts share;
        None for as many as all slots may need. Requests wait while there are too few; where a text
        that goes on finds none, the request that came last gives up its slot and goes on later.
      queue_limit: requests that may wait beyond those that free slots can take, of which there are
        none while pages are lacking; None for no limit.
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
      mirror: the next trees are drafted while the target verifies, in every step and for all rows
        together; None drafts them after it.

    Raises:
      InputError: a size is not possible, or the models do not fit each other.
    """

    mirror: "Mirror | None"

    def __init__(
        self,
        target: Target,
        drafter: LoadedHead | Drafter | None,
        *,
        tree: TreeConfig | TreeTable | None = None,
        adaptive: bool | None = None,
        slots: int,
        context_length: int,
        cache_memory: int | None = None,
        queue_limit: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        steps_per_call: int | None = 4,
        prefill_chunk: int | None = None,
        prefill_rows: int = 1,
        row_counts: Sequence[int] | None = None,
        top_log_probs: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        mirror: MirrorConfig | None = None,
    ) -> None:
        bound, trees = bind_models(target, drafter, tree)
        mirrored_tree = None
        if mirror is not None:
            from redrafter_jax.engine.mirror import check_mirror

            mirrored_tree = check_mirror(target, bound, trees, mirror, adaptive)
            adaptive, row_counts = False, ()
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
        self.on_admission: Callable[[int, int], object] = lambda number, cached: None
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
        width = pages_for(cache_slots)
        pages = slots // shards * width
        if cache_memory is not None:
            check_size(cache_memory, "cache_memory")
            pages = cache_memory // page_bytes(target, bound)
            longest = pages * PAGE + 1  # the last token is not cached
            if longest < context_length:
                raise InputError(
                    f"cache_memory is {cache_memory} bytes, which hold a text of {longest} tokens, "
                    f"but context_length is {context_length}; give more memory, or a shorter "
                    "context."
                )
        self._scheduler = Scheduler(
            slots, shards, pages, width, prefill_rows, lookahead(self.drafter)
        )
        self._ended: list[Event] = []
        self._submitted = 0
        # Whether the last `advance` came to its end.
        self._whole = True
        # When there was nothing to do, and since then when slots became free.
        self._ends: deque[float] = deque(maxlen=_RECENT + 1)
        self._idle = idle_row(target, self._stop_tokens)
        # What reads and proposes on the target's devices.
        self._reader = self.drafter
        self.mirror = None
        if mirror is not None and mirrored_tree is not None:
            from redrafter_jax.engine.mirror import Mirror

            self.mirror = Mirror(
                target,
                self.drafter,
                mirrored_tree,
                mirror,
                rows=slots,
                slots=cache_slots,
                pages=pages,
                chunk=self._chunk,
                top=top_log_probs,
            )
            self._reader = bound = self.mirror.relay
        state = empty_rows(target, bound, slots, cache_slots, self.stop_width, pages * shards)
        self._state = state if self.mirror is None else self.mirror.commit(state)
        # Programs that have run: the first run compiles.
        self._timed: set[tuple[int, TreeConfig | None, bool, bool]] = set()

    @property
    def slots(self) -> int:
        """B, rows that decode together."""
        return len(self._scheduler.slots)

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.target.config.vocab_size

    @property
    def stop_width(self) -> int:
        """E, stop tokens that a request may have."""
        return self._idle.arrays.stop_tokens.shape[1]

    @property
    def intact(self) -> bool:
        """Whether the last `advance` came to its end, so that host and device agree."""
        return self._whole and not self._state.root.is_deleted()

    @property
    def state(self) -> DecodeState:
        """The state between two calls; the next one donates its arrays."""
        return self._state

    @property
    def active(self) -> int:
        """Requests that have a slot."""
        return self._scheduler.active

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._scheduler.queue)

    @property
    def pages(self) -> int:
        """Pages of the cache, over all devices along `data`."""
        return sum(pool.size for pool in self._scheduler.pools)

    @property
    def pages_used(self) -> int:
        """How many of them the texts of requests that run have."""
        return sum(pool.used for pool in self._scheduler.pools)

    @property
    def preemptions(self) -> int:
        """How often a request has given up its slot, to go on later, because pages ran out."""
        return self._scheduler.preemptions

    @property
    def busy(self) -> bool:
        """Whether the next `advance` has something to do or to tell."""
        return bool(self.waiting or self._ended or self.active)

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
            self._write_texts({})
            jax.block_until_ready(self._read(Pass({}, {})).result)
            for compiled, program in enumerate(self._trees.programs, start=1):
                if not proceed(count if turn else compiled, count):
                    return
                started = time.perf_counter()
                jax.block_until_ready(self._decode([], *program, self.steps_per_call).result)
                if turn:
                    seconds = (time.perf_counter() - started) / self.steps_per_call
                    self._trees.add_time(*program, seconds)
                self._timed.add((*program, False, False))
        self.counters.prefill_passes = 0
        self.counters.count_compilations(self)
        if self.mirror is not None:
            self.mirror.counts = MirrorCounts()

    def submit(self, request: Request) -> int:
        """Let a request wait for a slot, behind those that came before.

        Returns:
          Its number.

        Raises:
          InputError: it can never run: something in it does not fit the target or a slot.
          QueueFull: too many wait.
        """
        row = make_row(self.target, self._submitted, request, self._stop_tokens, self.stop_width)
        if request.scores_prompt and self._top is None:
            raise InputError(
                "The request asks for log-probabilities of its prompt, but top_log_probs is None; "
                "give the engine a number of them, 0 or more."
            )
        if self.mirror is not None:
            check_mirrored([request])
        length, limit = len(request.prompt), request.max_new_tokens
        if length + limit > self._context_length:
            raise InputError(
                f"The request is for {length} prompt and {limit} new tokens, but slots have room "
                f"for {self._context_length}; ask for fewer, or give the engine a longer "
                "context_length."
            )
        if self._queue_limit is not None:
            admitted_next = 0 if self._scheduler.lacks_pages else self.slots - self.active
            if self.waiting - admitted_next >= self._queue_limit:
                seconds = (self._clock() - self._ends[0]) / max(1, len(self._ends) - 1)
                raise QueueFull(
                    f"{self.waiting} requests wait, as many as may; ask later.", seconds
                )
        if not self.busy:
            self._ends.clear()
            self._ends.append(self._clock())
        self._submitted += 1
        self._scheduler.wait(row)
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

        Raises:
          InputError: the call before was interrupted, so that nobody knows what it decided.
        """
        if not self.intact:
            raise InputError("The engine was interrupted within a step; make another one.")
        now = self._clock()
        self._whole = False
        self._end("deadline", lambda row: now > row.request.deadline)
        runs: list[_Run] = []
        most = self.steps_per_call if steps is None else min(steps, self.steps_per_call)
        gained = self.longest_path * most
        while passes is None or len(runs) < passes:
            read = self._scheduler.admit(gained)
            if not read.places:
                break
            rows = [self._scheduler.row(index) for index in read.admitted.values()]
            for row in rows:
                if not row.preempted:
                    self.counters.prompt_tokens += row.read_until
                    self.counters.reused_tokens += row.cached
                    self.on_admission(row.number, row.cached)
            if rows and len(rows) == self.active:
                self._trees.begin_text()
            runs.append(self._read(read))
        events = {event.number: event for event in self._ended}
        self._ended = []
        if any(self._scheduler.row(index).matcher for index in self._scheduler.decoding):
            # What a grammar allows next depends on the first token, which prompts may end with now.
            self._gather(runs, events)
            runs = []
        self._scheduler.grow(gained)
        active = self._scheduler.decoding
        if active and most:
            count, tree, many = self._choose(active, most)
            runs.append(self._decode(active, count, tree, many, timed=not runs))
        self._gather(runs, events)
        self._whole = True
        return list(events.values())

    def _gather(self, runs: Sequence[_Run], events: dict[int, Event]) -> None:
        """Wait for programs, and add what they decided to the events."""
        results = to_host([run.result for run in runs])
        finished = time.perf_counter()
        for run, (gains, done) in zip(runs, results, strict=True):
            self._collect(run, gains, done, finished, events)

    def _read(self, read: Pass) -> _Run:
        """One prefill pass."""
        slots, size = self._scheduler.slots, len(self._scheduler.parts[0])
        count = self._prefill_rows * len(self._scheduler.parts)
        if any(self._scheduler.row(index).cached for index in read.admitted.values()):
            self._write_texts(read.admitted)
        rows = {at: self._scheduler.row(index) for at, index in read.places.items()}
        begins = {at: row.cached for at, row in rows.items()}
        scores = any(row.scores for row in rows.values())
        chunk = next_chunk(slots, read.places, size, (count, self._chunk), self._idle)
        self._tell_pages()
        self._state, result = read_rows(
            self.target,
            self._reader,
            self._state,
            place(chunk, self.target.mesh),
            self._controls(read.places, count),
            place(first_masks(rows, count, self.vocab_size), self.target.mesh),
            top=self._top,
            prompt_top=self._top if scores else None,
        )
        if self.mirror is not None:
            self.mirror.read(self._state, chunk, list(read.places.values()))
        # Whoever is read from now on comes after it.
        self._scheduler.publish()
        self.counters.prefill_passes += 1
        return _Run(read.places, result, None, begins=begins)

    def _controls(self, places: dict[int, int], rows: int) -> Controls | None:
        """What the requests at these places of a batch ask for; None if nothing."""
        requests = {at: self._scheduler.row(index).request for at, index in places.items()}
        return place(controls_of(self.target.config, requests, rows), self.target.mesh)

    def _write_texts(self, admitted: dict[int, int]) -> None:
        """Give slots the tokens whose cache they share, which they will not read."""
        size = len(self._scheduler.parts[0])
        shape = self._prefill_rows * len(self._scheduler.parts), self._state.tokens.shape[1]
        texts: Any = beginnings(self._scheduler.slots, admitted, size, shape)
        self._state = write_texts(self.target, self._state, *place(texts, self.target.mesh))

    def _tell_pages(self) -> None:
        """Tell the device whose pages are whose, where that has changed."""
        if self._scheduler.changed:
            self._scheduler.changed = False
            table: Any = place(self._scheduler.tables.copy(), self.target.mesh)
            self._state = self._state._replace(cache=self._state.cache._replace(table=table))
            if self.mirror is not None:
                self._state = self.mirror.commit(self._state)

    def _choose(self, active: list[int], most: int) -> tuple[int, TreeConfig | None, int]:
        """Rows and tree of the program that decodes these slots next, and for how many steps."""
        parts = self._scheduler.parts
        fullest = max(sum(index in part for index in active) for part in parts)
        rows = self._trees.rows_for(fullest * len(parts))
        requests = [self._scheduler.row(index).request for index in active]
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
        batch, places = next_batch(active, rows, self._scheduler.parts)
        self._tell_pages()
        placed: Any = place(batch, self.target.mesh)
        controls = self._controls(places, rows)
        own = {at: self._scheduler.row(index) for at, index in places.items()}
        masks = first_masks(own, rows, self.vocab_size)
        program = rows, tree, controls is not None, masks is not None
        # What a tree costs is asked for rows that nothing holds.
        timed = timed and controls is None and masks is None and program in self._timed
        began = time.perf_counter() if timed else None
        self._timed.add(program)
        if masks is not None:
            from redrafter_jax.engine.constrained import step_in_two

            models = self.target, self.drafter, self._state
            self._state, result = step_in_two(
                *models, own, placed, controls, masks, tree=tree, top=self._top
            )
            return _Run(places, result, (rows, tree), began)
        if self.mirror is not None:
            self._state, result = self.mirror.decode(self._state, batch, steps)
            return _Run(places, result, (rows, tree))
        self._state, result = decode_rows(
            self.target,
            self.drafter,
            self._state,
            placed,
            steps,
            controls,
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
            row = self._scheduler.slots[index]
            if gains.prompt is not None and row is not None:
                row.add_scores(gains.prompt, at, run.begins[at])
            own_calls = int(np.count_nonzero(gains.counts[at]))
            # One that lost its slot since then reads its last token once more.
            if row is None or not own_calls:
                continue
            number, request, prompt = row.number, row.request, () if row.calls else row.prompt
            new = new_tokens(gains, at, self.sources, row.calls)
            drafts = new_drafts(gains, at, self.sources, row.calls)
            row.add(new)
            before, ended = events.get(number, Event(number, [])), None
            if done[at]:
                ended = "stop" if row.text[-1] in row.arrays.stop_tokens else "length"
                if row.text[-1] == NO_CHOICE:
                    ended = "not numbers"
                    new.pop()
                self._free(index)
            elif row.matcher is not None and row.matcher.failed:
                ended = "grammar"
                self._free(index)
            drafts = [*before.drafted, *drafts]
            prompt = before.prompt or prompt
            events[number] = Event(number, before.decided + new, ended, drafts, prompt)
            if run.program:
                self.counters.add(new, own_calls, drafts)
                calls += request.speculate * own_calls
                gained += request.speculate * len(new)
        if run.program:
            steps = int(np.count_nonzero(np.asarray(gains.counts).any(axis=0)))
            self.counters.steps += steps
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
        for row in self._scheduler.end(ends):
            self._ended.append(Event(row.number, [], why))
            self._ends.append(self._clock())

    def _free(self, index: int) -> None:
        self._scheduler.free(index)
        self._ends.append(self._clock())
