"""The pool of pages against a model of what the device writes into them."""

import random
from collections.abc import Iterator

import pytest

from redrafter_jax.engine.pages import Holding, PagePool, pages_for
from redrafter_jax.models.attention import PAGE

BLOCKS = 3


class Written:
    """What is in every slot of every page: of a token all that its keys depend on."""

    def __init__(self, pages: int, lookahead: int) -> None:
        self._slots: list[list[object]] = [[None] * PAGE for _ in range(pages)]
        self._lookahead = lookahead

    def of(self, text: list[int], at: int) -> object:
        return tuple(text[: at + 1 + self._lookahead])

    def write(self, holding: Holding, text: list[int], start: int, end: int) -> None:
        for at in range(start, end):
            self._slots[holding.pages[at // PAGE]][at % PAGE] = self.of(text, at)

    def holds(self, holding: Holding, text: list[int], cached: int) -> bool:
        """Whether a text finds its own tokens in its pages."""
        return all(
            self._slots[holding.pages[at // PAGE]][at % PAGE] == self.of(text, at)
            for at in range(cached)
        )


def texts(chance: random.Random) -> Iterator[list[int]]:
    """Of few different pages, so that many begin alike."""
    while True:
        blocks = [chance.randrange(2) for _ in range(chance.randint(0, BLOCKS))]
        rest = [chance.randrange(3) for _ in range(chance.randint(1, PAGE))]
        yield [block for block in blocks for _ in range(PAGE)] + rest


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_every_text_finds_its_own_tokens_whoever_comes_and_goes(seed: int, lookahead: int) -> None:
    chance = random.Random(seed)
    pool, written = PagePool(12, lookahead), Written(12, lookahead)
    running: list[tuple[Holding, list[int], int]] = []
    shared = refused = 0
    new = texts(chance)
    for _ in range(600):
        if chance.random() < 0.5 and (text := next(new)):
            holding = pool.begin(text, len(text) + 1)
            if holding is None:
                refused += 1
                continue
            known = PAGE * holding.indexed
            assert known < len(text), "the last token is read anew"
            assert written.holds(holding, text, known)
            shared += known
            # What depends on the token after the last is not written yet.
            end = len(text) - lookahead
            written.write(holding, text, known, end)
            pool.index(holding, text, end)
            running.append((holding, text, end))
        elif running:
            at = chance.randrange(len(running))
            holding, text, cached = running.pop(at)
            if chance.random() < 0.5 and pool.grow(holding, len(text) + 40):
                longer = text + [chance.randrange(3) for _ in range(40)]
                end = len(longer) - lookahead
                written.write(holding, longer, cached, end)
                pool.index(holding, longer, end)
                running.append((holding, longer, end))
            else:
                pool.release(holding)
        assert all(written.holds(*one) for one in running)
        in_use = {page for holding, *_ in running for page in holding.pages}
        assert pool.used == len(in_use)
        assert pool.used + pool.available == pool.size
    assert shared, "some began alike"
    assert refused, "some found no room"
    for holding, *_ in running:
        pool.release(holding)
    assert pool.used == 0


def filled(pool: PagePool, text: list[int]) -> Holding:
    holding = pool.begin(text, len(text))
    assert holding is not None
    pool.index(holding, text, len(text))
    return holding


def test_pages_that_were_left_longest_ago_go_first_and_of_a_text_the_last() -> None:
    pool = PagePool(4)
    old, new = [1] * (2 * PAGE + 1), [2] * (PAGE + 1)
    for text in (old, new):
        pool.release(filled(pool, text[:-1]))
    assert (pool.shared_with(old), pool.shared_with(new)) == (2 * PAGE, PAGE)
    other = pool.begin([3], 2 * PAGE)
    assert other is not None
    assert (pool.shared_with(old), pool.shared_with(new)) == (PAGE, PAGE)
    # Of use again, the other page of the old text outlives the new one.
    pool.release(filled(pool, old[:PAGE]))
    assert pool.grow(other, 3 * PAGE)
    assert (pool.shared_with(old), pool.shared_with(new)) == (PAGE, 0)


def test_a_page_that_is_shared_is_counted_once_and_not_given_away() -> None:
    pool = PagePool(3)
    text = [1] * (PAGE + 1)
    first = filled(pool, text)
    second = pool.begin(text, len(text))
    assert second is not None
    assert second.pages[0] == first.pages[0]
    assert (second.pages[1] != first.pages[1], pool.used) == (True, 3)
    pool.release(first)
    assert pool.used == 2
    assert pool.begin([5], 2 * PAGE) is None, "one page is free"
    assert pool.begin([5], PAGE, spare=1) is None
    assert pool.begin([5], PAGE) is not None


def test_two_that_read_the_same_at_once_leave_one_to_be_found() -> None:
    pool = PagePool(4)
    text = [1] * (2 * PAGE)
    holdings = [pool.begin(text, len(text)) for _ in range(2)]
    for holding in holdings:
        assert holding is not None
        pool.index(holding, text, PAGE)
    # What follows is found after either's first page.
    for holding, end in zip(holdings, (PAGE, 2 * PAGE), strict=True):
        assert holding is not None
        pool.index(holding, text, end)
        pool.release(holding)
    assert pool.shared_with([*text, 0]) == 2 * PAGE


def test_what_depends_on_the_next_token_is_not_shared_with_another() -> None:
    pool = PagePool(4, lookahead=1)
    text = [1] * PAGE
    holding = pool.begin(text, len(text))
    assert holding is not None
    pool.index(holding, text, PAGE)
    assert pool.shared_with([*text, 1, 1]) == 0, "the next token is not known"
    pool.index(holding, [*text, 1], PAGE)
    assert pool.shared_with([*text, 1, 1]) == PAGE
    assert pool.shared_with([*text, 2, 1]) == 0
    assert pool.shared_with([*text, 1]) == PAGE


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_pages_are_counted_whole(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages
