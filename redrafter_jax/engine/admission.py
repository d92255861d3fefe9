"""What the slots hold, which one a new request takes, and what the next pass of prefill reads."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from redrafter_jax.engine.device import Chunk
from redrafter_jax.engine.messages import OWN_STOPS, Request, Token
from redrafter_jax.engine.requests import Batch, check_batch, row_arrays
from redrafter_jax.models.target import Target
from redrafter_jax.text.text_stream import shared_length
from redrafter_jax.types import Requests


class Row(NamedTuple):
    """A request that has or waits for a slot.

    Attributes:
      number: from `Engine.submit`.
      request: as it came.
      arrays: of NumPy, for one row; tokens are left out.
    """

    number: int
    request: Request
    arrays: Requests


def make_row(
    target: Target,
    number: int,
    request: Request,
    stop_tokens: tuple[int, ...],
    stop_width: int | None = None,
) -> Row:
    """A request, checked as `generate` checks its own; `stop_tokens` are for one that gives none.

    A request may have `stop_width`, E, of them; None stands for as many as these need.

    Raises:
      InputError: something in it does not fit the target, or it has too many stop tokens.
    """
    stops = stop_tokens if request.stop_tokens is None else request.stop_tokens
    prompt, limit, seed, sampling, *_ = request
    (checked,) = check_batch(target.config, Batch([list(prompt)], limit, sampling, [seed], [stops]))
    return Row(number, request, row_arrays(target.config, checked, stop_width))


def idle_row(target: Target, stop_tokens: Sequence[int]) -> Row:
    """What idle places of a prefill pass read, with as many stop tokens as a request may have."""
    return make_row(target, -1, Request([0], 1, 0), (*stop_tokens, *[0] * OWN_STOPS))


@dataclass
class Slot:
    """A row of the decode state, as the host knows it.

    A free slot keeps the text of its last request, whose beginning the next one may need.

    Attributes:
      row: who runs in it; None where it is free.
      prompt_length: tokens of the prompt.
      text: prompt and decided tokens.
      cached: how many of them are in the cache.
      source: the slot in whose cache they are; None where it is its own.
      is_new: whether nothing of this request has been read yet.
      calls: target calls that decided tokens, the one that read the prompt included.
      freed: the larger, the later it became free.
    """

    row: Row | None = None
    prompt_length: int = 0
    text: list[int] = field(default_factory=list)
    cached: int = 0
    source: int | None = None
    is_new: bool = True
    calls: int = 0
    freed: int = 0

    @property
    def reading(self) -> bool:
        """Whether its prompt is not in the cache yet."""
        return self.row is not None and self.cached < self.prompt_length

    @property
    def decoding(self) -> bool:
        """Whether its prompt is in the cache, so that decode steps take it."""
        return self.row is not None and self.cached >= self.prompt_length

    @property
    def number(self) -> int:
        """Number of its request: the lower, the earlier it came; -1 where it is free."""
        return -1 if self.row is None else self.row.number

    def add(self, decided: Sequence[Token]) -> None:
        """Take in tokens, the last of which is not in the cache."""
        self.text += [token.id for token in decided]
        self.cached = len(self.text) - 1
        self.calls = decided[-1].call + 1

    def shared_with(self, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt's beginning are in its own cache."""
        return 0 if self.source is not None else shared_length(self.text[: self.cached], prompt)


def take_slot(slots: Sequence[Slot], parts: Sequence[range], row: Row, lost: int = 0) -> int | None:
    """Give a row the slot that it runs in, with the longest beginning of its prompt that is cached.

    Caches are copied within a part of the mesh; `parts` are the slots of those that have room. A
    slot that holds the beginning is taken over if it is free and at least half of what it keeps is
    of use; otherwise the one that has been free for longest is taken, so that the other text is
    kept as well. The last `lost` tokens of a shared beginning are read anew.

    Returns:
      The slot, None where none is free.
    """
    free = [free_slots(slots, part) for part in parts]
    return _take(slots, parts, free, range(len(slots)), row, lost)


def free_slots(slots: Sequence[Slot], part: range) -> deque[int]:
    """The free slots of a part of the mesh, those that have been free for longest first."""
    free = (index for index in part if slots[index].row is None)
    return deque(sorted(free, key=lambda index: slots[index].freed))


def _take(
    slots: Sequence[Slot],
    parts: Sequence[range],
    free: Sequence[deque[int]],
    holding: Iterable[int],
    row: Row,
    lost: int,
) -> int | None:
    """`take_slot` from the free slots of each part; `holding` are those that may hold a beginning.

    In a large batch of new texts a row looks at none of the other slots.
    """
    prompt = row.request.prompt
    room = [number for number, own in enumerate(free) if own]
    if not room:
        return None
    # The last token is read anew: its hidden state chooses the first token.
    shared = {
        index: (slots[index].shared_with(prompt[:-1]) - lost, slots[index].row is None, number)
        for index in holding
        for number in room
        if index in parts[number]
    }
    source = max(shared, key=lambda index: shared[index][:2], default=None)
    known = 0 if source is None else max(shared[source][0], 0)
    if source is not None and known:
        room = [shared[source][2]]
    if source is not None and slots[source].row is None and 0 < slots[source].cached <= 2 * known:
        taken = source
    else:
        number = min(room, key=lambda n: (len(parts[n]) - len(free[n]), slots[free[n][0]].freed))
        taken, room = free[number][0], [number]
    free[room[0]].remove(taken)
    slot = slots[taken]
    slot.row, slot.prompt_length, slot.text = row, len(prompt), list(prompt)
    slot.source = source if known and taken != source else None
    slot.cached, slot.is_new, slot.calls = known, True, 0
    return taken


def admit(
    slots: Sequence[Slot], queue: deque[Row], parts: Sequence[range], most: int, lost: int = 0
) -> tuple[dict[int, int], list[Slot]]:
    """Take in from the queue what has room in the next prefill pass, first come, first served.

    A pass takes as long for one prompt as for all that it has room for: while rows decode, none is
    taken in before there are free slots for as many. On each part of the mesh it reads `most`.

    Returns:
      By place in the pass the slots that it reads for, and those among them that were free.
    """
    running = [index for index, slot in enumerate(slots) if slot.reading]
    order = sorted(running, key=lambda index: slots[index].number)
    reading = [[index for index in order if index in part] for part in parts]
    free = [free_slots(slots, part) for part in parts]
    holding = [index for index, slot in enumerate(slots) if slot.cached]
    full: deque[int] = deque()
    admitted = []
    if sum(map(len, free)) >= min(most, len(queue)) or not any(slot.decoding for slot in slots):
        while queue:
            room = [
                ours if len(own) < most else full for ours, own in zip(free, reading, strict=True)
            ]
            index = _take(slots, parts, room, holding, queue[0], lost)
            if index is None:
                break
            queue.popleft()
            admitted.append(slots[index])
            own = next(own for part, own in zip(parts, reading, strict=True) if index in part)
            own.append(index)
    # Where a pass has room for all slots, each has its own place.
    own_places = most * len(parts) == len(slots)
    places = {
        index if own_places else part * most + at: index
        for part, own in enumerate(reading)
        for at, index in enumerate(own)
    }
    return places, admitted


def beginnings(
    slots: Sequence[Slot], places: Mapping[int, int], part: int, count: int
) -> tuple[Int[np.ndarray, " G"], Int[np.ndarray, " G"]]:
    """The rows whose beginning is copied before the next pass, and from which rows.

    Args:
      slots: all of them.
      places: by place in the pass, the slot that is read for.
      part: number of slots on each part of the mesh.
      count: G, places of the pass.
    """
    rows, sources = np.full(count, part, np.int32), np.zeros(count, np.int32)
    for at, index in places.items():
        slot = slots[index]
        if slot.source is not None:
            rows[at], sources[at], slot.source = index % part, slot.source % part, None
    return rows, sources


def next_chunk(
    slots: Sequence[Slot], places: Mapping[int, int], part: int, shape: tuple[int, int], idle: Row
) -> Chunk:
    """The next chunk of some prompts, which the slots count as cached from now on.

    Args:
      slots: all of them.
      places: by place in the pass, the slot that is read for.
      part: number of slots on each part of the mesh.
      shape: G, places of the pass, and C, tokens of a chunk.
      idle: what the other places read.
    """
    G, C = shape
    # A row past the last one is none.
    rows, begins = np.full(G, part, np.int32), np.zeros(G, np.int32)
    is_new = np.zeros(G, bool)
    tokens = np.zeros((G, C + 1), np.int32)
    speculates, arrays = np.ones(G, bool), [idle.arrays] * G
    for at, index in places.items():
        slot = slots[index]
        assert slot.row is not None
        # The last chunk ends with the prompt, and may begin with tokens that are known.
        begin = min(slot.cached, max(slot.prompt_length - C, 0))
        fresh = slot.text[begin : begin + C + 1]
        rows[at], begins[at], is_new[at] = index % part, begin, slot.is_new
        slot.is_new = False
        tokens[at, : len(fresh)] = fresh
        speculates[at], arrays[at] = slot.row.request.speculate, slot.row.arrays
        slot.cached = min(begin + C, slot.prompt_length)
    requests: Any = jax.tree.map(lambda *one: np.concatenate(one), *arrays)
    requests = requests._replace(tokens=tokens[:, :C])
    return Chunk._make([rows, begins, is_new, tokens[:, C], speculates, requests])


def next_batch(
    active: Sequence[int], rows: int, parts: Sequence[range]
) -> tuple[Int[np.ndarray, " G"], dict[int, int]]:
    """The rows that decode as a batch, and by place in it the slots.

    Args:
      active: slots that decode.
      rows: G, places of the batch, enough for them; as many as slots, or fewer.
      parts: the slots of each part of the mesh.
    """
    size = len(parts[0])
    batch = np.full(rows, size, np.int32)
    places: dict[int, int] = {}
    for number, part in enumerate(parts):
        own = [index for index in active if index in part]
        for at, index in enumerate(own, start=number * rows // len(parts)):
            # Where all rows decode, each has its own place.
            place = index if rows == size * len(parts) else at
            batch[place], places[place] = index - part.start, index
    return batch, places
