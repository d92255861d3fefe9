"""The host code that starts programs on the decode state, and that takes their results."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from redrafter_jax.config import MirrorConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.chunks import (
    beginnings,
    controls_of,
    first_masks,
    next_batch,
    next_chunk,
)
from redrafter_jax.engine.device import (
    Chunk,
    decode_rows,
    read_and_decode_rows,
    read_rows,
    write_texts,
)
from redrafter_jax.engine.gains import Gains
from redrafter_jax.engine.messages import Counters, Event, new_drafts, new_tokens
from redrafter_jax.engine.scheduler import Pass, Row, Scheduler
from redrafter_jax.engine.state import empty_rows
from redrafter_jax.models.projection import lender_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.types import NO_CHOICE, Controls

if TYPE_CHECKING:
    from redrafter_jax.engine.mirror import Mirror


class Run(NamedTuple):
    """A program that has been started on the device.

    Attributes:
      slots: slots of the rows in the program, by place in the batch.
      result: the gains, and which rows have ended; the arrays are still on the device.
      program: batch size and tree of a decode program (tree None drafts nothing); None for a
        prefill pass.
      began: time of dispatch in seconds; None if the program is not timed.
      begins: position of the first token that a prefill pass reads, by place.
    """

    slots: dict[int, int]
    result: tuple[Gains, Any]
    program: tuple[int, TreeConfig | None] | None
    began: float | None = None
    begins: Mapping[int, int] = {}


class Runner:
    """Runs prefill and decode programs for the rows of a scheduler.

    Attributes:
      target: the target model.
      drafter: the drafter, as returned by `Drafter.prepare`.
      state: decode state of B rows; the next program donates its arrays.
      ran: decode programs that have run, as (batch size, tree, whether a row had controls, whether
        a row had a grammar). The first run of a program includes its compilation.
      mirror: the mirror decoder, which drafts while the target verifies; None without `mirror`.

    Args:
      target: the target model.
      drafter: a drafter for the target.
      scheduler: the scheduler, which says which request has which slot and pages.
      slots: S, number of cache slots of a row, which is its maximum number of tokens.
      idle: the row that unused places of a prefill pass read.
      chunk: C, number of tokens that a prefill pass reads of each prompt.
      prefill_rows: number of prompts that a pass reads together, on each shard of the mesh.
      top: number of most likely tokens to report with each token; None reports no
        log-probabilities.
      mirror: settings of mirror decoding, with the shape of the trees; None for no mirror decoding.
    """

    mirror: "Mirror | None" = None

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        scheduler: Scheduler,
        *,
        slots: int,
        idle: Row,
        chunk: int,
        prefill_rows: int,
        top: int | None,
        mirror: tuple[MirrorConfig, TreeConfig] | None,
    ) -> None:
        self.target = target
        self.drafter = drafter.prepare(lender_of(target))
        self._scheduler = scheduler
        self._idle = idle
        self._shape = prefill_rows * len(scheduler.parts), chunk
        self._top = top
        self.ran: set[tuple[int, TreeConfig | None, bool, bool]] = set()
        rows, pages = len(scheduler.slots), sum(pool.size for pool in scheduler.pools)
        # The drafter that reads and proposes on the target's devices.
        self._reader = self.drafter
        if mirror is not None:
            from redrafter_jax.engine.mirror import Mirror

            config, tree = mirror
            self.mirror = Mirror(
                target,
                self.drafter,
                tree,
                config,
                rows=rows,
                slots=slots,
                pages=pages,
                chunk=chunk,
                top=top,
            )
            self._reader = drafter = self.mirror.relay
        state = empty_rows(target, drafter, rows, slots, self.stop_width, pages)
        self.state = self.mirror.commit(state) if self.mirror else state

    @property
    def stop_width(self) -> int:
        """E, the maximum number of stop tokens of a request."""
        return self._idle.arrays.stop_tokens.shape[1]

    def write(self, admitted: Mapping[int, int]) -> None:
        """Write the cached prefixes of new requests to the token buffers of their rows.

        The keys and values of these tokens are already in shared pages, so no prefill pass reads
        the tokens. `admitted` holds the requests' slots by place in the pass.
        """
        slots, size = self._scheduler.slots, len(self._scheduler.parts[0])
        shape = self._shape[0], self.state.tokens.shape[1]
        texts: Any = beginnings(slots, admitted, size, shape)
        self.state = write_texts(self.target, self.state, *place(texts, self.target.mesh))

    def read(self, read: Pass) -> Run:
        """Start one prefill pass, without waiting for its result."""
        rows, V = self._rows(read.places), self.target.config.vocab_size
        begins = {at: row.cached for at, row in rows.items()}
        scores = any(row.scores for row in rows.values())
        chunk = self._next_chunk(read)
        self.state, result = read_rows(
            self.target,
            self._reader,
            self.state,
            place(chunk, self.target.mesh),
            self._controls(rows, self._shape[0]),
            place(first_masks(rows, self._shape[0], V), self.target.mesh),
            top=self._top,
            prompt_top=self._top if scores else None,
        )
        if self.mirror is not None:
            self.mirror.read(self.state, chunk, list(read.places.values()))
        # Other requests may share the pages only now that the pass is queued: the device runs
        # their passes after it.
        self._scheduler.publish()
        return Run(read.places, result, None, begins=begins)

    def joins(self, indices: Iterable[int]) -> bool:
        """Whether `read_and_decode` supports these slots.

        No row may have controls or a grammar, or need log-probabilities of its prompt.
        """
        rows = map(self._scheduler.row, indices)
        return not any(row.scores or row.matcher or row.request.sampling.adjusts for row in rows)

    def read_and_decode(self, read: Pass, active: list[int], rows: int) -> tuple[Run, Run]:
        """Start a prefill pass and a decode step without a draft, as one program.

        Args:
          read: the rows of the prefill pass.
          active: the slots to decode; they must not be among the rows of the prefill pass.
          rows: batch size of the decode step, at least the number of slots to decode.

        Returns:
          The prefill pass and the decode step. Neither is timed.
        """
        begins = {at: row.cached for at, row in self._rows(read.places).items()}
        chunk = self._next_chunk(read)
        batch, places = next_batch(active, rows, self._scheduler.parts)
        placed: Any = place((chunk, batch), self.target.mesh)
        self.state, reading, step = read_and_decode_rows(
            self.target, self.drafter, self.state, *placed, top=self._top
        )
        self._scheduler.publish()
        return Run(read.places, reading, None, begins=begins), Run(places, step, (rows, None))

    def decode(
        self,
        active: list[int],
        rows: int,
        tree: TreeConfig | None,
        steps: int,
        *,
        most: int,
        timed: bool = False,
    ) -> Run:
        """Start a program that decodes some slots for up to `steps` steps.

        Args:
          active: the slots to decode.
          rows: batch size of the program, at least the number of slots to decode.
          tree: the shape of the trees; with None, a tree is only the root.
          steps: maximum number of steps of this call.
          most: maximum number of steps of the compiled program; each value is compiled separately.
          timed: whether to time the steps; requires that no other program is running.
        """
        batch, places = next_batch(active, rows, self._scheduler.parts)
        self._tell_pages()
        placed: Any = place(batch, self.target.mesh)
        own = self._rows(places)
        controls = self._controls(own, rows)
        masks = first_masks(own, rows, self.target.config.vocab_size)
        program = rows, tree, controls is not None, masks is not None
        # Do not time steps with controls or grammars.
        timed = timed and controls is None and masks is None and program in self.ran
        began = time.perf_counter() if timed else None
        self.ran.add(program)
        models = self.target, self.drafter, self.state
        if masks is not None:
            from redrafter_jax.engine.constrained import step_in_two

            asked = own, placed, controls, masks
            self.state, result = step_in_two(*models, *asked, tree=tree, top=self._top)
        elif self.mirror is not None:
            self.state, result = self.mirror.decode(self.state, batch, steps)
            began = None
        else:
            asked = placed, steps, controls
            self.state, result = decode_rows(*models, *asked, tree=tree, steps=most, top=self._top)
        return Run(places, result, (rows, tree), began)

    def _next_chunk(self, read: Pass) -> Chunk:
        """Return the input of a prefill pass, after writing cached prefixes and page tables."""
        if any(row.cached for row in self._rows(read.admitted).values()):
            self.write(read.admitted)
        slots, size = self._scheduler.slots, len(self._scheduler.parts[0])
        chunk = next_chunk(slots, read.places, size, self._shape, self._idle)
        self._tell_pages()
        return chunk

    def _rows(self, places: Mapping[int, int]) -> dict[int, Row]:
        return {at: self._scheduler.row(index) for at, index in places.items()}

    def _controls(self, rows: Mapping[int, Row], count: int) -> Controls | None:
        """Controls of the requests at these places of a batch; None if there are none."""
        requests = {at: row.request for at, row in rows.items()}
        return place(controls_of(self.target.config, requests, count), self.target.mesh)

    def _tell_pages(self) -> None:
        """Copy the page tables to the device if they have changed."""
        if self._scheduler.changed:
            self._scheduler.changed = False
            table: Any = place(self._scheduler.tables.copy(), self.target.mesh)
            self.state = self.state._replace(cache=self.state.cache._replace(table=table))
            if self.mirror is not None:
                self.state = self.mirror.commit(self.state)


class Taken(NamedTuple):
    """Summary of the results of a program.

    Attributes:
      ended: slots of the requests that have ended.
      calls: number of target calls in decode steps, over the rows that speculate.
      gained: number of tokens that these calls gained.
    """

    ended: list[int]
    calls: int
    gained: int


def take_results(
    run: Run,
    gains: Gains,
    done: Any,
    slots: Sequence[Row | None],
    sources: tuple[str, str],
    events: dict[int, Event],
    counters: Counters,
) -> Taken:
    """Add the results of one program to its rows, to the events and to the counters.

    Args:
      run: the program.
      gains: the tokens that the program gained, as NumPy arrays.
      done: whether the row at each place has ended.
      slots: the rows in all slots; this call updates them.
      sources: names of the sources of drafted tokens.
      events: events of the present call of `Engine.advance`, by request number; this call updates
        them.
      counters: totals over all requests; this call updates them.
    """
    ended: list[int] = []
    calls = gained = 0
    for at, index in run.slots.items():
        row = slots[index]
        if gains.prompt is not None and row is not None:
            row.add_scores(gains.prompt, at, run.begins[at])
        own_calls = int(np.count_nonzero(gains.counts[at]))
        # A row that was preempted after dispatch reads its last token again; ignore its result.
        if row is None or not own_calls:
            continue
        number, request, prompt = row.number, row.request, () if row.calls else row.prompt
        new = new_tokens(gains, at, sources, row.calls)
        drafts = new_drafts(gains, at, sources, row.calls)
        row.add(new)
        before, why = events.get(number, Event(number, [])), None
        if done[at]:
            why = "stop" if row.text[-1] in row.arrays.stop_tokens else "length"
            if row.text[-1] == NO_CHOICE:
                why = "not numbers"
                new.pop()
        elif row.matcher is not None and row.matcher.failed:
            why = "grammar"
        if why is not None:
            ended.append(index)
        drafts = [*before.drafted, *drafts]
        prompt = before.prompt or prompt
        events[number] = Event(number, before.decided + new, why, drafts, prompt)
        if run.program:
            counters.add(new, own_calls, drafts)
            calls += request.speculate * own_calls
            gained += request.speculate * len(new)
    return Taken(ended, calls, gained)
