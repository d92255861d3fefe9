"""The pages of a cache: which text has which, and which beginnings of texts they hold.

A page is shared by number: texts that begin alike have the same pages in their tables, as in
PagedAttention (arXiv 2309.06180, section 4.4). Nothing is copied.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from redrafter_jax.models.attention import PAGE


@dataclass
class Holding:
    """The pages of one text, in its order.

    Attributes:
      pages: numbers of its pages.
      indexed: how many of them, from the first on, are full and can be found by their tokens.
      beginning: number of the beginning that the indexed pages hold; 0 while there are none.
    """

    pages: list[int] = field(default_factory=list)
    indexed: int = 0
    beginning: int = 0


class PagePool:
    """The pages of one device, counted by the texts that have them.

    A full page is found by its tokens and all before them, as long as nobody needs its room: pages
    that no text has any more are given away only when none is free, those left longest ago first,
    and of one text the last first.

    Args:
      pages: number of pages.
      lookahead: tokens after a page on which what it holds depends too.
    """

    def __init__(self, pages: int, lookahead: int = 0) -> None:
        self._lookahead = lookahead
        self._users = [0] * pages
        # The last is given first.
        self._free = list(range(pages - 1, -1, -1))
        # Full pages that no text has, those left longest ago first.
        self._left: OrderedDict[int, None] = OrderedDict()
        # By the beginning before a page and the page's tokens: the page, and the beginning that
        # ends with it. Beginnings are numbered in the order in which they were found.
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._numbers = count(1)

    @property
    def size(self) -> int:
        """Number of pages."""
        return len(self._users)

    @property
    def available(self) -> int:
        """Pages that no text has."""
        return len(self._free) + len(self._left)

    @property
    def used(self) -> int:
        """Pages that a text has."""
        return self.size - self.available

    def shared_with(self, text: Sequence[int]) -> int:
        """Tokens of the text's beginning that full pages hold, its last token not among them."""
        return PAGE * len(self._find(text))

    def begin(
        self, text: Sequence[int], tokens: int, spare: int = 0, *, shares: bool = True
    ) -> Holding | None:
        """Pages for the first `tokens` tokens of a text; if it `shares`, those of its beginning.

        None where `spare` pages would not be left for others.
        """
        found = self._find(text) if shares else []
        shared = [page for page, _ in found]
        needed = pages_for(tokens) - len(shared)
        if needed + spare > self.available - sum(page in self._left for page in shared):
            return None
        for page in shared:
            self._users[page] += 1
            self._left.pop(page, None)
        holding = Holding(shared, len(shared), found[-1][1] if found else 0)
        self.grow(holding, tokens)
        return holding

    def missing(self, holding: Holding, tokens: int) -> int:
        """Pages that a text needs beside its own to hold so many tokens."""
        return max(pages_for(tokens) - len(holding.pages), 0)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Give a text pages for so many tokens, if there are enough; False gives none."""
        needed = self.missing(holding, tokens)
        if needed > self.available:
            return False
        holding.pages += [self._take() for _ in range(needed)]
        return True

    def index(self, holding: Holding, text: Sequence[int], cached: int) -> None:
        """Let others find the pages that the first `cached` tokens of a text have filled."""
        while True:
            end = (holding.indexed + 1) * PAGE
            if end > cached or end + self._lookahead > len(text):
                return
            key = self._key(holding.beginning, text, holding.indexed)
            if key not in self._found:
                page = holding.pages[holding.indexed]
                self._found[key], self._key_of[page] = (page, next(self._numbers)), key
            # Where another page holds the same, that one stays to be found, and what follows it.
            _, holding.beginning = self._found[key]
            holding.indexed += 1

    def release(self, holding: Holding) -> None:
        """Take the pages of a text from it, which has them no more."""
        for page in reversed(holding.pages):
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._key_of:
                    self._left[page] = None
                else:
                    self._free.append(page)

    def _find(self, text: Sequence[int]) -> list[tuple[int, int]]:
        found, before = [], 0
        for index in range((len(text) - max(self._lookahead, 1)) // PAGE):
            one = self._found.get(self._key(before, text, index))
            if one is None:
                break
            found.append(one)
            before = one[1]
        return found

    def _key(self, before: int, text: Sequence[int], index: int) -> tuple[int, tuple[int, ...]]:
        return before, tuple(text[index * PAGE : (index + 1) * PAGE + self._lookahead])

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._left.popitem(last=False)
            del self._found[self._key_of.pop(page)]
        self._users[page] = 1
        return page


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)
