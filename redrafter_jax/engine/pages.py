"""Cache pages: which text uses which pages, and which prefix of a text a page holds.

Pages are shared by number: texts with a common prefix have the same page numbers in their tables,
as in PagedAttention (arXiv 2309.06180, section 4.4). No page is copied.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from redrafter_jax.models.attention import PAGE


@dataclass
class Holding:
    """The pages of one text, in order.

    Attributes:
      pages: page numbers.
      indexed: number of leading pages that are full and that other texts can find by their tokens.
      beginning: number by which `PagePool` identifies the prefix in the indexed pages; 0 if no page
        is indexed.
    """

    pages: list[int] = field(default_factory=list)
    indexed: int = 0
    beginning: int = 0


class PagePool:
    """The cache pages of one device, with reference counts.

    A new text finds and shares full pages whose tokens, and all tokens before them, equal its own.
    A page that no text uses keeps its contents until no other page is free. Then the pages that
    were released first are reused first. The pages of one text are reused from the last to the
    first.

    Args:
      pages: number of pages.
      lookahead: number of tokens after a page on which the contents of the page depend.
    """

    def __init__(self, pages: int, lookahead: int = 0) -> None:
        self._lookahead = lookahead
        self._users = [0] * pages
        # A stack: the last entry is taken first.
        self._free = list(range(pages - 1, -1, -1))
        # Full pages that no text uses, least recently released first.
        self._left: OrderedDict[int, None] = OrderedDict()
        # Maps (number of the prefix before a page, tokens of the page) to (page, number of the
        # prefix that ends with the page). Prefixes are numbered in the order of their discovery.
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._numbers = count(1)

    @property
    def size(self) -> int:
        """Number of pages."""
        return len(self._users)

    @property
    def available(self) -> int:
        """Number of pages that no text uses."""
        return len(self._free) + len(self._left)

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return self.size - self.available

    def shared_with(self, text: Sequence[int]) -> int:
        """Return the number of leading tokens of a text that are in full pages of earlier texts.

        The last token of the text is never counted, because the target must read at least one
        token.
        """
        return PAGE * len(self._find(text))

    def begin(
        self, text: Sequence[int], tokens: int, spare: int = 0, *, shares: bool = True
    ) -> Holding | None:
        """Allocate and return pages for the first `tokens` tokens of a text.

        Returns None if too few pages are free.

        Args:
          text: token ids.
          tokens: number of tokens that need pages.
          spare: number of pages that must stay free.
          shares: whether to share the pages of earlier texts with the same prefix.
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
        """Return the number of further pages that a text needs to hold `tokens` tokens."""
        return max(pages_for(tokens) - len(holding.pages), 0)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Allocate the further pages that a text needs to hold `tokens` tokens.

        Returns True, or False if too few pages are free; then no page is allocated.
        """
        needed = self.missing(holding, tokens)
        if needed > self.available:
            return False
        holding.pages += [self._take() for _ in range(needed)]
        return True

    def index(self, holding: Holding, text: Sequence[int], cached: int) -> None:
        """Let other texts share the full pages that hold the first `cached` tokens of a text."""
        while True:
            end = (holding.indexed + 1) * PAGE
            if end > cached or end + self._lookahead > len(text):
                return
            key = self._key(holding.beginning, text, holding.indexed)
            if key not in self._found:
                page = holding.pages[holding.indexed]
                self._found[key], self._key_of[page] = (page, next(self._numbers)), key
            # If another page has the same contents, keep that one indexed, and follow its prefix.
            _, holding.beginning = self._found[key]
            holding.indexed += 1

    def release(self, holding: Holding) -> None:
        """Release the pages of a text; the holding must not be used again."""
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
    """Return the number of pages that `tokens` tokens need."""
    return -(-tokens // PAGE)
