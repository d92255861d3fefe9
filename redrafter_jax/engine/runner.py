"""The rows' state on the device, and the programs that run on it one after the other."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from redrafter_jax.config import MirrorConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.chunks import (
    beginnings,
    controls_of,
    first_masks,
    next_batch,
    next_chunk,
)
from redrafter_jax.engine.device import decode_rows, empty_rows, read_rows, write_texts
from redrafter_jax.engine.gains import Gains
from redrafter_jax.engine.scheduler import Pass, Row, Scheduler
from redrafter_jax.models.projection import lender_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.types import Controls

if TYPE_CHECKING:
    from redrafter_jax.engine.mirror import Mirror


class Run(NamedTuple):
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


class Runner:
    """What reads prompts and decodes for the rows of a scheduler.

    Attributes:
      target: the target model.
      drafter: the drafter, prepared for the target.
      state: of B rows, between two programs; the next one donates its arrays.
      ran: decode programs that have run, by rows, tree, and whether there were controls and
        grammars: the first run of each compiles.
      mirror: what drafts while the target verifies; None where nothing does.

    Args:
      target: the target model.
      drafter: a drafter of the target.
      scheduler: who has which slot and which pages.
      slots: S, tokens that a row may come to.
      idle: what idle places of a prefill pass read.
      chunk: C, tokens of a prompt that are read in one pass.
      prefill_rows: prompts that are read together, on each part of the mesh.
      top: how many of the likeliest tokens are told beside each token; None for neither.
      mirror: how the next trees are drafted ahead, and their shape; None drafts none.
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
        # What reads and proposes on the target's devices.
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
        """E, stop tokens that a request may have."""
        return self._idle.arrays.stop_tokens.shape[1]

    def write(self, admitted: Mapping[int, int]) -> None:
        """Give slots the tokens whose cache they share, which they will not read."""
        slots, size = self._scheduler.slots, len(self._scheduler.parts[0])
        shape = self._shape[0], self.state.tokens.shape[1]
        texts: Any = beginnings(slots, admitted, size, shape)
        self.state = write_texts(self.target, self.state, *place(texts, self.target.mesh))

    def read(self, read: Pass) -> Run:
        """One prefill pass."""
        slots, size = self._scheduler.slots, len(self._scheduler.parts[0])
        if any(self._scheduler.row(index).cached for index in read.admitted.values()):
            self.write(read.admitted)
        rows = {at: self._scheduler.row(index) for at, index in read.places.items()}
        begins, V = {at: row.cached for at, row in rows.items()}, self.target.config.vocab_size
        scores = any(row.scores for row in rows.values())
        chunk = next_chunk(slots, read.places, size, self._shape, self._idle)
        self._tell_pages()
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
        # Whoever is read from now on comes after it.
        self._scheduler.publish()
        return Run(read.places, result, None, begins=begins)

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
        """Decode these slots for a few steps by the program of so many rows and this tree.

        Args:
          active: the slots.
          rows: places of the batch, enough for them.
          tree: the shape of the trees; None is the root alone.
          steps: steps at most, of this call.
          most: steps that a call may take; each value compiles.
          timed: whether nothing else runs beside it, so that its time may be that of its steps.
        """
        batch, places = next_batch(active, rows, self._scheduler.parts)
        self._tell_pages()
        placed: Any = place(batch, self.target.mesh)
        own = {at: self._scheduler.row(index) for at, index in places.items()}
        controls = self._controls(own, rows)
        masks = first_masks(own, rows, self.target.config.vocab_size)
        program = rows, tree, controls is not None, masks is not None
        # What a tree costs is asked for rows that nothing holds.
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

    def _controls(self, rows: Mapping[int, Row], count: int) -> Controls | None:
        """What the requests at these places of a batch ask for; None if nothing."""
        requests = {at: row.request for at, row in rows.items()}
        return place(controls_of(self.target.config, requests, count), self.target.mesh)

    def _tell_pages(self) -> None:
        """Tell the device whose pages are whose, where that has changed."""
        if self._scheduler.changed:
            self._scheduler.changed = False
            table: Any = place(self._scheduler.tables.copy(), self.target.mesh)
            self.state = self.state._replace(cache=self.state.cache._replace(table=table))
            if self.mirror is not None:
                self.state = self.mirror.commit(self.state)
