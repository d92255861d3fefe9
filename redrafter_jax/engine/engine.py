"""Continuous batching: requests join and leave the batch while other requests are decoded.

The text of a request depends on the request alone, not on the other requests in the batch.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from redrafter_jax.config import MirrorConfig, TreeConfig
from redrafter_jax.config.drafting import longest_path
from redrafter_jax.decoding.read import chunk_length, joins_steps, lookahead
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.engine.chunks import idle_row, make_row
from redrafter_jax.engine.gains import Gains
from redrafter_jax.engine.messages import (
    Counters,
    Event,
    MirrorCounts,
    QueueFull,
    Request,
)
from redrafter_jax.engine.pages import pages_for
from redrafter_jax.engine.requests import check_mirrored, check_size, slots_for
from redrafter_jax.engine.runner import Run, Runner, take_results
from redrafter_jax.engine.scheduler import Pass, Row, Scheduler
from redrafter_jax.engine.trees import TreeChooser, bind_models
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards, to_host
from redrafter_jax.types import SOURCES, DecodeState

if TYPE_CHECKING:
    from redrafter_jax.engine.mirror import Mirror

# Turns over all programs; the first turn compiles.
_WARM_UP_TURNS = 4
# Number of recently ended requests from which the pace is estimated.
_RECENT = 64


class Engine:
    """The decoding engine: it runs requests that join and leave a batch at any time.

    Requests wait in a queue, and share a fixed number of slots and cache pages. A slot is one row
    of the decode state. All decoding goes through an engine: `generate`, `stream`, the commands,
    the server, evaluation, and the regeneration of training data. All methods but
    `announce_grammar` must be called from one thread.

    On a mesh of several processes, each process must run an engine, and must submit the same
    requests in the same order. The requests must have no deadlines, and `tree` must be one
    `TreeConfig`. The engines of `engine.led` have no such restrictions.

    Attributes:
      adaptive: whether the engine may decode without drafting while drafting is slower.
      longest_path: P, the maximum number of tokens that a row can gain in one decode step.
      steps_per_call: maximum number of decode steps per `advance`; each new value causes a
        compilation.
      counters: totals over all requests since the engine was made.
      on_admission: function that the engine calls when a request gets its first slot, before the
        prompt is read. The arguments are the request's number, and the number of its prompt tokens
        that are already cached.

    Args:
      target: the target model.
      drafter: drafter, in any form that `generate` takes; None for autoregressive decoding.
      tree: the shape of the trees, or a table of trees from `python -m eval tune`. From a table,
        the engine chooses a tree by the number of decoding rows and their mean temperature. None
        uses the drafter's default.
      adaptive: whether to decode without drafting while drafting makes decoding slower; None means
        True unless `tree` is a `TreeConfig`.
      slots: B, number of rows that decode together; a multiple of the mesh's `data`.
      context_length: maximum number of tokens of a request, prompt included.
      cache_memory: bytes of cache per device, in pages of 64 tokens that all requests share. None
        allocates the pages that all slots need at `context_length`. Requests wait while too few
        pages are free. If a running request finds no free page, the running request that ranks last
        (by priority, then by time of submission) gives up its slot and resumes later.
      queue_limit: maximum number of waiting requests; None for no limit. Requests that can take a
        free slot next do not count, unless pages are lacking.
      stop_tokens: default stop tokens; None uses the target's stop tokens.
      steps_per_call: maximum number of decode steps per `advance`, between two checks for finished
        rows; None for the number of steps that a text of `context_length` tokens can need.
      prefill_chunk: number of tokens that a prefill pass reads of each prompt; None uses the
        platform's default.
      prefill_rows: number of prompts that a prefill pass reads together, on each shard along
        `data`. With more than 1, new requests may wait for each other while other rows decode.
      prefill_joins: whether one target pass reads a chunk of a prompt and decodes one step of the
        decoding rows, so that each weight is read only once. Such a step drafts nothing. The passes
        stay separate while a row has a grammar, penalties or scored prompt tokens. None joins the
        passes if the platform is not a CPU and at least P - 1 steps are made per call. On CPUs
        joining gains nothing; with fewer steps, the lost draft may cost more than joining gains.
      row_counts: batch sizes besides B for which decoding is compiled, so that a few active rows
        cost less than B rows. None uses the batch sizes of the table of trees; without a table, the
        mesh's `data`.
      top_log_probs: number of most likely tokens to report with each token and its log-probability;
        None reports no log-probabilities.
      clock: function that returns the time in seconds, for deadlines.
      mirror: settings for drafting the next trees while the target verifies, in every step and for
        all rows together; None drafts them after verification.

    Raises:
      InputError: a size is out of range, or the models do not fit each other.
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
        cache_memory: int | None = None,
        queue_limit: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        steps_per_call: int | None = 4,
        prefill_chunk: int | None = None,
        prefill_rows: int = 1,
        prefill_joins: bool | None = None,
        row_counts: Sequence[int] | None = None,
        top_log_probs: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        mirror: MirrorConfig | None = None,
    ) -> None:
        bound, trees = bind_models(target, drafter, tree)
        mirrored = None
        if mirror is not None:
            from redrafter_jax.engine.mirror import check_mirror

            mirrored = mirror, check_mirror(target, bound, trees, mirror, adaptive)
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
        self._context_length = context_length
        self._queue_limit = queue_limit
        self._stop_tokens = tuple(config.eos_token_ids if stop_tokens is None else stop_tokens)
        self._top = top_log_probs
        self._clock = clock
        cache_slots = slots_for(context_length, self.longest_path)
        self.steps_per_call = steps_per_call or cache_slots
        if prefill_joins is None:
            # Over s steps, joining saves one pass and gives up one draft. This is faster while the
            # acceptance length, which is at most P, is below s + 1.
            prefill_joins = joins_steps() and self.steps_per_call + 1 >= self.longest_path
        self._prefill_joins = prefill_joins and mirror is None
        width = pages_for(cache_slots)
        pages = slots // shards * width
        if cache_memory is not None:
            from redrafter_jax.engine.memory import cache_costs, pages_in

            check_size(cache_memory, "cache_memory")
            pages = pages_in(cache_memory, cache_costs(target, bound, trees, mirror, slots))
            longest = pages * PAGE + 1  # the last token is not cached
            if longest < context_length:
                raise InputError(
                    f"cache_memory is {cache_memory} bytes, which hold a text of {longest} tokens, "
                    f"but context_length is {context_length}; give a larger cache_memory or a "
                    "smaller context_length."
                )
        self._scheduler = Scheduler(slots, shards, pages, width, prefill_rows, lookahead(bound))
        self._ended: list[Event] = []
        self._submitted = 0
        # Whether the last `advance` ran to its end.
        self._whole = True
        # Times at which slots became free; estimates the wait for `QueueFull`. The first entry is
        # the time at which the engine last became busy, while it is within the deque.
        self._ends: deque[float] = deque(maxlen=_RECENT + 1)
        self._runner = Runner(
            target,
            bound,
            self._scheduler,
            slots=cache_slots,
            idle=idle_row(target, self._stop_tokens),
            chunk=min(prefill_chunk or chunk_length(), cache_slots),
            prefill_rows=prefill_rows,
            top=top_log_probs,
            mirror=mirrored,
        )

    @property
    def target(self) -> Target:
        """The target model."""
        return self._runner.target

    @property
    def drafter(self) -> Drafter:
        """The drafter, as returned by `Drafter.prepare`."""
        return self._runner.drafter

    @property
    def mirror(self) -> "Mirror | None":
        """The mirror decoder, which drafts while the target verifies; None without `mirror`."""
        return self._runner.mirror

    @property
    def slots(self) -> int:
        """B, the number of rows that decode together."""
        return len(self._scheduler.slots)

    @property
    def vocab_size(self) -> int:
        """V, the target's vocabulary size."""
        return self.target.config.vocab_size

    @property
    def stop_width(self) -> int:
        """E, the maximum number of stop tokens of a request."""
        return self._runner.stop_width

    @property
    def intact(self) -> bool:
        """Whether the last `advance` ran to its end; otherwise host and device may disagree."""
        return self._whole and not self.state.root.is_deleted()

    @property
    def state(self) -> DecodeState:
        """The decode state on the device; the next `advance` donates its arrays."""
        return self._runner.state

    @property
    def active(self) -> int:
        """Number of requests that have a slot."""
        return self._scheduler.active

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._scheduler.queue)

    @property
    def pages(self) -> int:
        """Number of cache pages, summed over all devices along `data`."""
        return sum(pool.size for pool in self._scheduler.pools)

    @property
    def pages_used(self) -> int:
        """Number of pages that running requests use."""
        return sum(pool.used for pool in self._scheduler.pools)

    @property
    def preemptions(self) -> int:
        """Number of times that a request lost its slot, to resume later, because pages ran out."""
        return self._scheduler.preemptions

    @property
    def busy(self) -> bool:
        """Whether the next `advance` has work to do or events to report."""
        return bool(self.waiting or self._ended or self.active)

    def warm_up(self, proceed: Callable[[int, int], bool] = lambda ready, programs: True) -> None:
        """Compile all programs, and time the decode steps of each decode program.

        Args:
          proceed: function that is called before each program with two arguments: the number of
            programs compiled so far, and the number of all programs. If it returns False, the
            warm-up stops.

        Raises:
          InputError: a request has already been submitted.
        """
        if self._submitted:
            raise InputError(
                "warm_up was called after a request was submitted; call it before submit, or make "
                "another engine."
            )
        nothing, steps = Pass({}, {}), self.steps_per_call
        joint = self._trees.row_counts if self._prefill_joins else []
        count = 1 + len(joint) + len(self._trees.programs)
        # From the second turn on, the programs run on the state that they themselves return.
        for turn in range(_WARM_UP_TURNS):
            self._runner.write({})
            jax.block_until_ready(self._runner.read(nothing).result)
            for compiled, rows in enumerate(joint, start=1):
                if not proceed(count if turn else compiled, count):
                    return
                jax.block_until_ready(self._runner.read_and_decode(nothing, [], rows)[1].result)
            for compiled, program in enumerate(self._trees.programs, start=1 + len(joint)):
                if not proceed(count if turn else compiled, count):
                    return
                started = time.perf_counter()
                jax.block_until_ready(self._runner.decode([], *program, steps, most=steps).result)
                if turn:
                    self._trees.add_time(*program, (time.perf_counter() - started) / steps)
        self.counters.count_compilations(self)
        if self.mirror is not None:
            self.mirror.counts = MirrorCounts()

    def announce_grammar(self, name: str, stated: str) -> None:
        """Announce that a request with this grammar may come, so other processes can compile it.

        This engine has no other processes and does nothing; see `led.LeadingEngine`. Unlike the
        other methods, this method may be called from any thread.

        Args:
          name: kind of the grammar, the first string of `CompiledGrammar.stated`.
          stated: text of the grammar, the second string.
        """

    def submit(self, request: Request) -> int:
        """Add a request to the queue, behind earlier requests of the same priority.

        Returns:
          The request's number.

        Raises:
          InputError: the request can never run, because a value does not fit the target or the
            engine.
          QueueFull: `queue_limit` requests wait already.
        """
        row = make_row(self.target, self._submitted, request, self._stop_tokens, self.stop_width)
        if request.scores_prompt and self._top is None:
            raise InputError(
                "The request asks for log-probabilities of its prompt, but top_log_probs is None; "
                "set the engine's top_log_probs to 0 or more."
            )
        if self.mirror is not None:
            check_mirrored([request])
        length, limit = len(request.prompt), request.max_new_tokens
        if length + limit > self._context_length:
            raise InputError(
                f"The request is for {limit} new tokens after a prompt of {length}, but "
                f"context_length is {self._context_length}; ask for fewer new tokens, or give the "
                "engine a larger context_length."
            )
        if self._queue_limit is not None:
            admitted_next = 0 if self._scheduler.lacks_pages else self.slots - self.active
            if self.waiting - admitted_next >= self._queue_limit:
                seconds = (self._clock() - self._ends[0]) / max(1, len(self._ends) - 1)
                raise QueueFull(
                    f"{self.waiting} requests wait, which is the limit; ask later.", seconds
                )
        if not self.busy:
            self._ends.clear()
            self._ends.append(self._clock())
        self._submitted += 1
        self._scheduler.wait(row)
        return row.number

    def cancel_all(self) -> None:
        """End all requests; no events are reported for them."""
        self._end("cancelled", lambda row: True)
        self._ended = []

    def cancel(self, number: int) -> None:
        """End a request and free its slot at once; do nothing if the request has already ended."""
        self._end("cancelled", lambda row: row.number == number)

    def advance(self, passes: int | None = 1, steps: int | None = None) -> list[Event]:
        """Give requests slots, read prompts, and decode a few steps of rows that have been read.

        Args:
          passes: maximum number of prefill passes before rows decode; None for no maximum.
          steps: maximum number of decode steps; None for `steps_per_call`.

        Returns:
          One event for each request that has new tokens or has ended.

        Raises:
          InputError: the previous call was interrupted, so that its results are unknown.
        """
        if not self.intact:
            raise InputError("The engine was interrupted within a step; make another engine.")
        now = self._clock()
        self._whole = False
        self._end("deadline", lambda row: now > row.request.deadline)
        runs: list[Run] = []
        most = self.steps_per_call if steps is None else min(steps, self.steps_per_call)
        gained = self.longest_path * most
        left = most - self._read(passes, most, gained, runs)
        events = {event.number: event for event in self._ended}
        self._ended = []
        if any(self._scheduler.row(index).matcher for index in self._scheduler.decoding):
            # The first masks of a grammar depend on the row's first token, so wait for prefill.
            self._gather(runs, events)
            runs = []
        self._scheduler.grow(gained)
        active = self._scheduler.decoding
        if active and left:
            count, tree, many = self._choose(active, left)
            alone, most = not runs, self.steps_per_call
            runs.append(self._runner.decode(active, count, tree, many, most=most, timed=alone))
        self._gather(runs, events)
        self._whole = True
        return list(events.values())

    def _read(self, passes: int | None, most: int, gained: int, runs: list[Run]) -> int:
        """Give requests slots and start prefill passes; the first pass may join a decode step.

        Args:
          passes: maximum number of passes; None for no maximum.
          most: maximum number of decode steps of this call of `advance`.
          gained: maximum number of tokens that a row gains in these steps.
          runs: list to which the programs are added.

        Returns:
          The number of decode steps that the programs contain, 0 or 1.
        """
        joining = self._scheduler.decoding if self._prefill_joins and most else []
        if joining and self.waiting + self.active > len(joining):
            # Rows that decode in the first pass get their pages before requests are admitted.
            self._scheduler.grow(gained)
            joining = self._scheduler.decoding
        done = steps = 0
        while passes is None or done < passes:
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
            if joining and self._runner.joins([*joining, *read.places.values()]):
                count = self._batch_size(joining)
                runs += self._runner.read_and_decode(read, joining, count)
                joining, steps = [], 1
            else:
                runs.append(self._runner.read(read))
            self.counters.prefill_passes += 1
            done += 1
        return steps

    def _gather(self, runs: Sequence[Run], events: dict[int, Event]) -> None:
        """Wait for the programs to end, and add their results to the events."""
        results = to_host([run.result for run in runs])
        finished = time.perf_counter()
        for run, (gains, done) in zip(runs, results, strict=True):
            self._collect(run, gains, done, finished, events)

    def _choose(self, active: list[int], most: int) -> tuple[int, TreeConfig | None, int]:
        """Choose the batch size, tree and number of steps of the next decode program."""
        rows = self._batch_size(active)
        requests = [self._scheduler.row(index).request for index in active]
        temperatures = [one.sampling.temperature for one in requests if one.speculate]
        return rows, *self._trees.choose(rows, temperatures, most)

    def _batch_size(self, active: list[int]) -> int:
        """The smallest compiled batch size for the slots to decode."""
        parts = self._scheduler.parts
        fullest = max(sum(index in part for index in active) for part in parts)
        return self._trees.rows_for(fullest * len(parts))

    def _collect(
        self, run: Run, gains: Gains, done: Any, finished: float, events: dict[int, Event]
    ) -> None:
        """Add the results of one program to the events, and free the slots of ended requests."""
        slots, counters = self._scheduler.slots, self.counters
        taken = take_results(run, gains, done, slots, self.sources, events, counters)
        for index in taken.ended:
            self._free(index)
        if run.program:
            steps = int(np.count_nonzero(np.asarray(gains.counts).any(axis=0)))
            counters.steps += steps
            seconds = None if run.began is None or not steps else (finished - run.began) / steps
            self._trees.add(*run.program, steps, taken.calls, taken.gained, seconds)

    @property
    def sources(self) -> tuple[str, str]:
        """Names of the sources that propose tokens, in the order of `SOURCES`."""
        return self.drafter.name, SOURCES[1]

    @property
    def drafted_by(self) -> tuple[str, ...]:
        """Names of the sources that the trees of this engine use."""
        trees = [tree for tree in self._trees.trees if tree is not None]
        return self.sources[: bool(trees) + any(tree.lookup_tokens > 0 for tree in trees)]

    def _end(self, why: str, ends: Callable[[Row], bool]) -> None:
        """End the requests for which `ends` is true, with the reason `why`."""
        for row in self._scheduler.end(ends):
            self._ended.append(Event(row.number, [], why))
            self._ends.append(self._clock())

    def _free(self, index: int) -> None:
        self._scheduler.free(index)
        self._ends.append(self._clock())
