"""The scheduler: it gives slots and cache pages to requests, and takes them back.

A slot is one row of the decode state. A request that loses its slot before it has ended is
preempted: it returns to the queue and resumes later.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int

from redrafter_jax.engine.gains import Scores
from redrafter_jax.engine.messages import PromptToken, Request, Token, prompt_tokens
from redrafter_jax.engine.pages import Holding, PagePool
from redrafter_jax.types import Requests

if TYPE_CHECKING:
    from redrafter_jax.text.grammars import Matcher


@dataclass(eq=False)
class Row:
    """A request that waits for a slot or runs in one.

    Attributes:
      number: the request's number from `Engine.submit`, in order of submission.
      request: the request as submitted.
      arrays: the request as NumPy arrays of one row; the tokens are left out.
      text: token ids: the prompt, then the new tokens.
      read_until: length of the text when the request got its slot. Prefill passes read this many
        tokens; then the row decodes.
      cached: number of tokens of the text in the cache.
      is_new: whether no prefill pass has read a part of the text since the request got its slot.
      calls: number of target calls that chose tokens of the text, including the call that read the
        end of the prompt.
      holding: cache pages of the text.
      preempted: number of times that the request has lost its slot.
      prompt: prompt tokens with log-probabilities so far; empty if these were not requested.
      matcher: state of the request's grammar after its new tokens; None without a grammar.
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
    matcher: "Matcher | None" = None

    @property
    def scores(self) -> bool:
        """Whether prompt tokens must still be read for their log-probabilities."""
        return self.request.scores_prompt and len(self.prompt) + 1 < len(self.request.prompt)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of requests: priority, then order of submission; the lowest comes first."""
        return self.request.priority, self.number

    @property
    def reading(self) -> bool:
        """Whether prefill passes must still read a part of the text."""
        return self.cached < self.read_until

    def add(self, decided: Sequence[Token]) -> None:
        """Append new tokens; the last of them is not in the cache yet."""
        fresh = [token.id for token in decided]
        self.text += fresh
        if self.matcher is not None:
            self.matcher.advance(fresh)
        self.cached = len(self.text) - 1
        self.calls = decided[-1].call + 1

    def add_scores(self, scores: Scores, at: int, begin: int) -> None:
        """Append the log-probabilities of a chunk of the prompt.

        Args:
          scores: the log-probabilities of all chunks of a prefill pass.
          at: index of this row's chunk in the pass.
          begin: position of the chunk's first token.
        """
        count, whole = scores.chosen.shape[1], self.request.prompt
        if self.scores and begin == len(self.prompt):
            self.prompt += prompt_tokens(scores, at, whole[begin + 1 : begin + 1 + count])

    def cached_after(self, tokens: int) -> int:
        """Return the maximum number of cached tokens after the row has gained `tokens` tokens.

        A row ends at its limit, and its last token is never cached.
        """
        knows_root = not self.reading and self.cached < len(self.text)
        length = len(self.text) + tokens + (not knows_root)
        return min(length, int(self.arrays.limits[0])) - 1


class Pass(NamedTuple):
    """The rows of the next prefill pass.

    A place is an index into the batch of the pass.

    Attributes:
      places: for each place in use, the slot whose prompt is read.
      admitted: those entries of `places` whose requests have just got their slots.
    """

    places: dict[int, int]
    admitted: dict[int, int]


class Scheduler:
    """Assigns slots and cache pages to requests, and keeps the queue of waiting requests.

    On a mesh, each device along `data` has its own shard of the slots and its own pool of pages.
    Shards share no pages.

    Args:
      slots: B, number of slots over all shards.
      parts: number of shards.
      pages: number of pages per shard, enough for at least one text of M pages.
      width: M, maximum number of pages of a text.
      prompts: maximum number of prompts that one prefill pass reads on each shard.
      lookahead: number of tokens after a page on which the contents of the page depend.

    Attributes:
      slots: row in each slot; None if the slot is free.
      parts: range of slots of each shard.
      queue: waiting requests, sorted by `Row.rank`.
      pools: pool of pages of each shard.
      tables: page numbers of every slot, [B, M]; arbitrary past the pages of the text.
      changed: whether `tables` has changed since it was last copied to the device.
      preemptions: number of times that a request has lost its slot.
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
        self._lacks_pages = False
        self.preemptions = 0
        self._prompts = prompts

    @property
    def active(self) -> int:
        """Number of occupied slots."""
        return len(self.slots) - self.slots.count(None)

    @property
    def lacks_pages(self) -> bool:
        """Whether the first waiting request waits for pages, rather than for a slot."""
        return self._lacks_pages and bool(self.queue)

    @property
    def running(self) -> list[int]:
        """The occupied slots, sorted by `Row.rank`."""
        rows = [(row.rank, index) for index, row in enumerate(self.slots) if row is not None]
        return [index for _, index in sorted(rows)]

    @property
    def decoding(self) -> list[int]:
        """The occupied slots whose prompts have been read, sorted by `Row.rank`."""
        return [index for index in self.running if not self.row(index).reading]

    def row(self, index: int) -> Row:
        """The row in an occupied slot."""
        row = self.slots[index]
        assert row is not None
        return row

    def admit(self, tokens: int) -> Pass:
        """Give free slots to waiting requests, by rank, and return the next prefill pass.

        A pass costs the same for any number of prompts. So while rows decode, requests wait until
        the free slots fill a pass, or until there is a slot for every waiting request. A request
        that gets a slot also gets pages for its text and for `tokens` further tokens. Enough pages
        must stay free for `tokens` further tokens of every running request.
        """
        most, running = self._prompts, self.running
        reading = [
            [index for index in running if index in part and self.row(index).reading]
            for part in self.parts
        ]
        free = [[index for index in part if self.slots[index] is None] for part in self.parts]
        spare = [self._missing(number, tokens) for number in range(len(self.parts))]
        admitted: set[int] = set()
        self._lacks_pages = False
        if sum(map(len, free)) >= min(most, len(self.queue)) or not self.decoding:
            while self.queue:
                room = {
                    number: len(idle)
                    for number, (idle, own) in enumerate(zip(free, reading, strict=True))
                    if idle and len(own) < most
                }
                number = self._place(self.queue[0], room, spare, tokens)
                if number is None:
                    self._lacks_pages = bool(room)
                    break
                index = free[number].pop(0)
                self.slots[index] = self.queue.pop(0)
                self._write_table(index)
                reading[number].append(index)
                admitted.add(index)
        # If a pass has room for all slots, the place is the slot.
        own_places = most * len(self.parts) == len(self.slots)
        places = {
            index if own_places else number * most + at: index
            for number, own in enumerate(reading)
            for at, index in enumerate(own)
        }
        return Pass(places, {at: index for at, index in places.items() if index in admitted})

    def wait(self, row: Row) -> None:
        """Insert a request into the queue, which is sorted by rank."""
        insort(self.queue, row, key=lambda one: one.rank)

    def grow(self, tokens: int) -> None:
        """Give decoding rows the pages for `tokens` further tokens, in the order of rank.

        While a shard has too few free pages, its running request with the last rank is preempted:
        the request returns to the queue and resumes later.
        """
        for index in self.decoding:
            pool, part = self._part_of(index)
            while (row := self.slots[index]) is not None:
                if pool.grow(row.holding, row.cached_after(tokens)):
                    self._write_table(index)
                    break
                self._preempt(next(one for one in reversed(self.running) if one in part))

    def publish(self) -> None:
        """Let later requests share the full pages of running requests."""
        for index in self.running:
            self._publish(index)

    def free(self, index: int) -> None:
        """Free a slot; its pages keep their contents until other texts need them."""
        self._publish(index)
        self._part_of(index)[0].release(self.row(index).holding)
        self.slots[index] = None

    def end(self, ends: Callable[[Row], bool]) -> Iterator[Row]:
        """Remove and yield all waiting and running requests for which `ends` is true."""
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
        """Give a row its pages on one shard, and return the shard; None if no shard has enough.

        Shards are filled evenly, but a shard that holds a prefix of the text may have one row more.
        Among equally filled shards, the shard with the longest prefix comes first, then the shard
        with the most free pages.

        Args:
          row: a waiting row.
          room: number of free slots, by eligible shard.
          spare: number of pages that running rows still need, by shard.
          tokens: number of tokens that the row gains next.
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
        """Number of further pages that the rows of a shard need to gain `tokens` tokens each."""
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
