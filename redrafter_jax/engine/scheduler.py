"""Who has which slot and which pages: requests wait, are admitted, grow, give way, and end."""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from redrafter_jax.engine.gains import Scores
from redrafter_jax.engine.messages import PromptToken, Request, Token, prompt_tokens
from redrafter_jax.engine.pages import Holding, PagePool
from redrafter_jax.text.grammars import Matcher
from redrafter_jax.types import Requests


@dataclass(eq=False)
class Row:
    """A request that waits for a slot or runs in one.

    Attributes:
      number: from `Engine.submit`: the lower, the earlier it came.
      request: as it came.
      arrays: of NumPy, for one row; tokens are left out.
      text: prompt and decided tokens.
      read_until: length of its text when it got its slot; it decodes once so many are cached.
      cached: tokens of the text in the cache.
      is_new: whether nothing has been read since it got its slot.
      calls: target calls that decided tokens, the one that read the prompt included.
      holding: its pages.
      preempted: how often it has lost its slot.
      prompt: what is known of the prompt's tokens, where that is asked for.
      matcher: the state of the request's grammar after its new tokens; None without one.
    """

    number: int
    request: Request
    arrays: Requests
    text: list[int]
    read_until: int = 0
    cached: int = 0
    is_new: bool = True
    calls: int = 0
    holding: Holding = field(default_factory=Holding)
    preempted: int = 0
    prompt: list[PromptToken] = field(default_factory=list)
    matcher: Matcher | None = None

    @property
    def scores(self) -> bool:
        """Whether tokens of the prompt have to be read to know their log-probabilities."""
        return self.request.scores_prompt and len(self.prompt) + 1 < len(self.request.prompt)

    @property
    def rank(self) -> tuple[int, int]:
        """Requests of a lower rank come first: those of a lower priority, then the earlier ones."""
        return self.request.priority, self.number

    @property
    def reading(self) -> bool:
        """Whether its text, as it was when it got its slot, is not whole in the cache yet."""
        return self.cached < self.read_until

    def add(self, decided: Sequence[Token]) -> None:
        """Take in tokens, the last of which is not in the cache."""
        fresh = [token.id for token in decided]
        self.text += fresh
        if self.matcher is not None:
            self.matcher.advance(fresh)
        self.cached = len(self.text) - 1
        self.calls = decided[-1].call + 1

    def add_scores(self, scores: Scores, at: int, begin: int) -> None:
        """Take in those of a chunk from position `begin` on, at one place of a pass."""
        count, whole = scores.chosen.shape[1], self.request.prompt
        if self.scores and begin == len(self.prompt):
            self.prompt += prompt_tokens(scores, at, whole[begin + 1 : begin + 1 + count])

    def cached_after(self, tokens: int) -> int:
        """The most tokens that its cache can hold after so many more are decided.

        A row ends at its limit, and its last token is not cached.
        """
        knows_root = not self.reading and self.cached < len(self.text)
        length = len(self.text) + tokens + (not knows_root)
        return min(length, int(self.arrays.limits[0])) - 1


class Pass(NamedTuple):
    """What the next prefill pass reads.

    Attributes:
      places: by place in the pass, the slots that it reads for.
      admitted: those of them that were free before.
    """

    places: dict[int, int]
    admitted: dict[int, int]


class Scheduler:
    """Slots, the pages of their texts, and the queue before them.

    On a mesh a part of the slots and a pool of pages belong to each device along `data`; nothing
    crosses between them.

    Args:
      slots: B, over all parts.
      parts: number of parts.
      pages: pages of each part, enough for one text of M at least.
      width: M, pages that one text may have.
      prompts: prompts that one pass reads on each part.
      lookahead: tokens after a page on which what it holds depends too.

    Attributes:
      slots: who runs in each; None where it is free.
      parts: the slots of each part.
      queue: requests that wait, in the order of `Row.rank`.
      pools: the pages of each part.
      tables: page numbers of every slot; past a text's last page anything.
      changed: whether the device has older tables.
      lacks_pages: whether the first of the queue waits for pages, not for a slot.
      preemptions: how often a request has lost its slot.
    """

    def __init__(
        self, slots: int, parts: int, pages: int, width: int, prompts: int, lookahead: int
    ) -> None:
        size = slots // parts
        self.slots: list[Row | None] = [None] * slots
        self.parts = [range(start, start + size) for start in range(0, slots, size)]
        self.queue: list[Row] = []
        self.pools = [PagePool(pages, lookahead) for _ in range(parts)]
        self.tables: Int[np.ndarray, "B M"] = np.zeros((slots, width), np.int32)
        self.changed = True
        self.lacks_pages = False
        self.preemptions = 0
        self._prompts = prompts

    @property
    def active(self) -> int:
        """Number of slots that are not free."""
        return len(self.slots) - self.slots.count(None)

    @property
    def running(self) -> list[int]:
        """The slots that are not free, in the order of their requests' rank."""
        rows = [(row.rank, index) for index, row in enumerate(self.slots) if row is not None]
        return [index for _, index in sorted(rows)]

    @property
    def decoding(self) -> list[int]:
        """Those of them whose prompts are read, so that decode steps take them."""
        return [index for index in self.running if not self.row(index).reading]

    def row(self, index: int) -> Row:
        """Who runs in a slot that is not free."""
        row = self.slots[index]
        assert row is not None
        return row

    def admit(self, tokens: int) -> Pass:
        """Take in from the queue what has room in the next prefill pass, by rank.

        A pass costs the same however many prompts it reads. So while rows decode, requests wait
        until free slots can fill a pass, or take all who wait. A request gets pages for its text
        and so many `tokens` more, where there are enough for those who run to gain as many.
        """
        most, running = self._prompts, self.running
        reading = [
            [index for index in running if index in part and self.row(index).reading]
            for part in self.parts
        ]
        free = [[index for index in part if self.slots[index] is None] for part in self.parts]
        spare = [self._missing(number, tokens) for number in range(len(self.parts))]
        admitted: set[int] = set()
        self.lacks_pages = False
        if sum(map(len, free)) >= min(most, len(self.queue)) or not self.decoding:
            while self.queue:
                room = {
                    number: len(idle)
                    for number, (idle, own) in enumerate(zip(free, reading, strict=True))
                    if idle and len(own) < most
                }
                number = self._place(self.queue[0], room, spare, tokens)
                if number is None:
                    self.lacks_pages = bool(room)
                    break
                index = free[number].pop(0)
                self.slots[index] = self.queue.pop(0)
                self._write_table(index)
                reading[number].append(index)
                admitted.add(index)
        # Where a pass has room for all slots, each has its own place.
        own_places = most * len(self.parts) == len(self.slots)
        places = {
            index if own_places else number * most + at: index
            for number, own in enumerate(reading)
            for at, index in enumerate(own)
        }
        return Pass(places, {at: index for at, index in places.items() if index in admitted})

    def wait(self, row: Row) -> None:
        """Let a request wait, behind those that come before it."""
        insort(self.queue, row, key=lambda one: one.rank)

    def grow(self, tokens: int) -> None:
        """Give the rows that decode pages for so many tokens more, in the order of their rank.

        Where there are not enough, the last request of the part loses its slot, until there are:
        it waits again, and its text goes on later.
        """
        for index in self.decoding:
            pool, part = self._part_of(index)
            while (row := self.slots[index]) is not None:
                if pool.grow(row.holding, row.cached_after(tokens)):
                    self._write_table(index)
                    break
                self._preempt(next(one for one in reversed(self.running) if one in part))

    def publish(self) -> None:
        """Let later requests find what the pages of those who run hold by now."""
        for index in self.running:
            self._publish(index)

    def free(self, index: int) -> None:
        """Free a slot; its pages keep what they hold until others need them."""
        self._publish(index)
        self._part_of(index)[0].release(self.row(index).holding)
        self.slots[index] = None

    def end(self, ends: Callable[[Row], bool]) -> Iterator[Row]:
        """Take out the requests for which this holds, those that wait and those that run."""
        for row in [row for row in self.queue if ends(row)]:
            self.queue.remove(row)
            yield row
        for index in self.running:
            row = self.row(index)
            if ends(row):
                self.free(index)
                yield row

    def _place(
        self, row: Row, room: Mapping[int, int], spare: Sequence[int], tokens: int
    ) -> int | None:
        """Give a row its pages; the part that they are of, None where no part has enough.

        Parts are filled evenly: one that holds a beginning of the text may have a row more. Of
        those the one with the longest beginning comes first, then the one with most free pages.

        Args:
          row: that waits.
          room: free slots of the parts that it may go to.
          spare: by part, the pages that those who run will need beside their own.
          tokens: that it gains next.
        """
        row.read_until, row.cached, row.is_new = len(row.text), 0, True
        shares = not row.scores
        shared = {
            number: self.pools[number].shared_with(row.text) if shares else 0 for number in room
        }
        for number in sorted(
            room,
            key=lambda one: (
                -room[one] - (shared[one] > 0),
                -shared[one],
                -self.pools[one].available,
            ),
        ):
            pool = self.pools[number]
            most = row.cached_after(tokens)
            holding = pool.begin(row.text, most, spare[number], shares=shares)
            if holding is not None:
                row.holding, row.cached = holding, shared[number]
                return number
        return None

    def _missing(self, number: int, tokens: int) -> int:
        """Pages that the rows of a part need beside their own to gain so many tokens."""
        rows = [row for row in map(self.slots.__getitem__, self.parts[number]) if row]
        pool = self.pools[number]
        return sum(pool.missing(row.holding, row.cached_after(tokens)) for row in rows)

    def _preempt(self, index: int) -> None:
        row = self.row(index)
        self.free(index)
        lengths = np.full_like(row.arrays.lengths, len(row.text))
        row.arrays = row.arrays._replace(lengths=lengths)
        row.preempted += 1
        self.preemptions += 1
        self.wait(row)

    def _part_of(self, index: int) -> tuple[PagePool, range]:
        number = index // len(self.parts[0])
        return self.pools[number], self.parts[number]

    def _publish(self, index: int) -> None:
        row = self.row(index)
        self._part_of(index)[0].index(row.holding, row.text, row.cached)

    def _write_table(self, index: int) -> None:
        pages = self.row(index).holding.pages
        self.changed |= self.tables[index, : len(pages)].tolist() != pages
        self.tables[index, : len(pages)] = pages
