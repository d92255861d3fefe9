"""Who gets a slot and pages, who waits for them, and who gives them up."""

from collections.abc import Sequence

import pytest

from redrafter_jax.engine.chunks import make_row
from redrafter_jax.engine.messages import Request, Token
from redrafter_jax.engine.pages import PagePool
from redrafter_jax.engine.scheduler import Pass, Row, Scheduler
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target


def scheduler_of(slots: int = 3, **options: int) -> Scheduler:
    sizes = {"parts": 1, "pages": 12, "width": 4, "prompts": 1, "lookahead": 0} | options
    return Scheduler(slots, **sizes)


def row_of(target: Target, length: int, number: int, limit: int = 40, token: int = 1) -> Row:
    return make_row(target, number, Request([token] * length, limit, 0), ())


def wait(scheduler: Scheduler, target: Target, *lengths: int, **options: int) -> list[Row]:
    rows = [row_of(target, length, number, **options) for number, length in enumerate(lengths)]
    scheduler.queue += rows
    return rows


def read_whole(scheduler: Scheduler, read: Pass, root: int = 5) -> None:
    """Read all prompts of a pass, and decide their first tokens."""
    for index in read.places.values():
        row = scheduler.row(index)
        row.cached = row.read_until
        scheduler.publish()
        row.add([Token(root, row.calls, None)])


def numbers_of(scheduler: Scheduler) -> list[int | None]:
    return [row and row.number for row in scheduler.slots]


def test_requests_get_slots_in_the_order_in_which_they_came(target: Target) -> None:
    scheduler = scheduler_of()
    wait(scheduler, target, 10, 20, 30, 40)
    for expected in ([0, None, None], [0, 1, None], [0, 1, 2], [0, 1, 2]):
        read = scheduler.admit(0)
        assert numbers_of(scheduler) == expected
        read_whole(scheduler, read)
    assert [row.number for row in scheduler.queue] == [3]
    scheduler.free(1)
    assert scheduler.admit(0) == Pass({0: 1}, {0: 1})
    assert numbers_of(scheduler) == [0, 3, 2]


def test_requests_of_a_lower_priority_come_first_and_give_up_their_slot_last(
    target: Target,
) -> None:
    # Each prompt fills its page, so that the next token of any needs another one.
    scheduler = scheduler_of(slots=2, pages=3, width=2)
    for number, priority in enumerate([0, 1, -1, 1, 0]):
        row = row_of(target, PAGE, number, token=1 + number)
        row.request = row.request._replace(priority=priority)
        scheduler.wait(row)
    assert [row.number for row in scheduler.queue] == [2, 0, 4, 1, 3]
    for _ in range(2):
        read_whole(scheduler, scheduler.admit(0))
    assert numbers_of(scheduler) == [2, 0]
    scheduler.grow(2)
    assert numbers_of(scheduler) == [2, None]
    assert [row.number for row in scheduler.queue] == [0, 4, 1, 3]


def test_a_prompt_that_is_not_read_whole_is_read_on_before_others(target: Target) -> None:
    scheduler = scheduler_of()
    rows = wait(scheduler, target, 10, 20)
    assert scheduler.admit(0) == Pass({0: 0}, {0: 0})
    rows[0].cached = 4
    assert scheduler.admit(0) == Pass({0: 0}, {})
    assert rows[0].reading


def test_a_pass_of_several_prompts_waits_until_it_is_full(target: Target) -> None:
    scheduler = scheduler_of(prompts=2)
    wait(scheduler, target, 3, 3, 3, 3)
    read = scheduler.admit(0)
    assert read == Pass({0: 0, 1: 1}, {0: 0, 1: 1})
    read_whole(scheduler, read)
    assert scheduler.admit(0) == Pass({}, {}), "two wait, and one slot is free"
    scheduler.free(0)
    assert scheduler.admit(0).places == {0: 0, 1: 2}
    assert not scheduler.queue


def test_each_slot_has_its_own_place_where_a_pass_has_room_for_all(target: Target) -> None:
    for prompts, expected in ((2, {0: 0, 2: 2, 3: 3}), (1, {0: 0, 1: 2})):
        scheduler = scheduler_of(4, parts=2, prompts=prompts)
        scheduler.slots[1] = row_of(target, 1, 0)
        wait(scheduler, target, 1, 1, 1)
        places, admitted = scheduler.admit(0)
        assert places == admitted == expected


def test_a_text_that_begins_like_another_has_the_same_pages(target: Target) -> None:
    scheduler = scheduler_of()
    first, second = wait(scheduler, target, 2 * PAGE + 9, 2 * PAGE + 1)
    read_whole(scheduler, scheduler.admit(0))
    assert scheduler.admit(0).admitted == {0: 1}
    assert second.holding.pages[:2] == first.holding.pages[:2]
    assert second.holding.pages[2] != first.holding.pages[2]
    assert scheduler.tables[1, :3].tolist() == second.holding.pages
    assert (second.cached, second.read_until, second.reading) == (2 * PAGE, 2 * PAGE + 1, True)


def test_a_text_goes_to_the_part_that_holds_its_beginning(target: Target) -> None:
    scheduler = scheduler_of(4, parts=2)
    first, other, second = wait(scheduler, target, PAGE + 1, 1, PAGE + 1)
    other.text = [7]
    read_whole(scheduler, scheduler.admit(0))
    assert numbers_of(scheduler) == [0, None, 1, None], "each part has a place in the pass"
    read_whole(scheduler, scheduler.admit(0))
    assert numbers_of(scheduler) == [0, 2, 1, None]
    assert second.holding.pages[0] == first.holding.pages[0]


def test_texts_that_begin_alike_are_spread_over_the_parts(target: Target) -> None:
    scheduler = scheduler_of(8, parts=4)
    for number in range(8):  # one after the other, each read before the next one comes
        scheduler.queue.append(row_of(target, PAGE + 9, number))
        read_whole(scheduler, scheduler.admit(0))
    taken = [[scheduler.slots[index] for index in part] for part in scheduler.parts]
    assert [sum(row is not None for row in rows) for rows in taken] == [2, 2, 2, 2]


def test_who_finds_no_pages_waits_and_so_do_those_behind(target: Target) -> None:
    scheduler = scheduler_of(pages=4)
    rows = wait(scheduler, target, 2 * PAGE, 3 * PAGE, 1)
    rows[1].text = [2] * (3 * PAGE)
    read_whole(scheduler, scheduler.admit(0))
    assert scheduler.admit(0).places == {}
    assert [row.number for row in scheduler.queue] == [1, 2]
    scheduler.free(0)
    assert scheduler.admit(0).places == {0: 0}
    assert scheduler.row(0).number == 1


def test_nobody_is_admitted_into_pages_that_those_who_run_need_next(target: Target) -> None:
    scheduler = scheduler_of(pages=4)
    first, second = wait(scheduler, target, 2 * PAGE - 4, 2 * PAGE - 4)
    second.text = [2] * len(second.text)
    read_whole(scheduler, scheduler.admit(0))
    # With ten tokens more each has three pages, and there are four.
    assert scheduler.admit(10).places == {}
    assert scheduler.admit(3).places == {0: 1}


def decode(scheduler: Scheduler, tokens: Sequence[int]) -> None:
    for index in scheduler.decoding:
        row = scheduler.row(index)
        row.add([Token(token, row.calls, None) for token in tokens])


def test_the_last_to_come_gives_way_and_goes_on_from_what_is_decided(target: Target) -> None:
    scheduler = scheduler_of(pages=4, width=4)
    rows = wait(scheduler, target, PAGE - 2, PAGE - 2, PAGE - 2, limit=150)
    for row in rows:
        row.text = [row.number] * (PAGE - 2)
    for _ in rows:
        read_whole(scheduler, scheduler.admit(0))
    assert len(scheduler.decoding) == 3
    scheduler.grow(4)
    assert numbers_of(scheduler) == [0, 1, None], "four pages, and all need a second"
    assert scheduler.preemptions == rows[2].preempted == 1
    decode(scheduler, [8] * 4)
    assert scheduler.admit(4).places == {}
    scheduler.free(0)
    assert scheduler.admit(4).places == {0: 0}
    assert rows[2].text == [2] * (PAGE - 2) + [5], "its first token is decided"
    assert (rows[2].read_until, rows[2].cached) == (PAGE - 1, 0)
    assert rows[2].arrays.lengths.tolist() == [PAGE - 1]
    assert rows[2].arrays.limits.tolist() == [PAGE - 2 + 150]


def test_who_gave_way_waits_before_those_who_came_later(target: Target) -> None:
    scheduler = scheduler_of(4, pages=4, width=4)
    rows = wait(scheduler, target, PAGE - 2, PAGE - 2, PAGE - 2, PAGE - 2, 5, limit=150)
    for row in rows:
        row.text = [row.number] * len(row.text)
    for _ in rows[:4]:
        read_whole(scheduler, scheduler.admit(0))
    scheduler.grow(4)
    assert numbers_of(scheduler) == [0, 1, None, None]
    assert [row.number for row in scheduler.queue] == [2, 3, 4]


def test_pages_are_given_up_only_on_the_part_that_lacks_them(target: Target) -> None:
    scheduler = scheduler_of(4, parts=2, pages=3, width=3, prompts=2)
    rows = wait(scheduler, target, PAGE - 2, 2 * PAGE - 2, PAGE - 2, 9, limit=150)
    for row in rows:
        row.text = [row.number] * len(row.text)
    read_whole(scheduler, scheduler.admit(0))
    assert numbers_of(scheduler) == [0, 2, 1, 3]
    scheduler.free(3)
    # Two of a page each, where there are three pages; and one of two pages by itself.
    scheduler.grow(4)
    assert numbers_of(scheduler) == [0, None, 1, None]
    scheduler.grow(4)
    assert [pool.used for pool in scheduler.pools] == [2, 3]


def test_a_row_never_asks_for_more_pages_than_its_limit_needs(target: Target) -> None:
    scheduler = scheduler_of()
    (row,) = wait(scheduler, target, PAGE - 2, limit=3)
    read_whole(scheduler, scheduler.admit(1000))
    assert len(row.holding.pages) == 1, "its last token is not cached"
    scheduler.grow(1000)
    assert len(row.holding.pages) == 1


def test_those_who_end_leave_no_page_behind(target: Target) -> None:
    scheduler = scheduler_of()
    rows = wait(scheduler, target, 10, PAGE * 2, 30, 40)
    read_whole(scheduler, scheduler.admit(0))
    read_whole(scheduler, scheduler.admit(0))
    assert list(scheduler.end(lambda row: row.number in (1, 3))) == [rows[3], rows[1]]
    assert numbers_of(scheduler) == [0, None, None]
    assert [row.number for row in scheduler.queue] == [2]
    list(scheduler.end(lambda row: True))
    assert scheduler.pools[0].used == 0
    assert not scheduler.queue


def test_a_request_costs_as_much_to_admit_however_many_are_admitted_with_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    missing = PagePool.missing
    monkeypatch.setattr(PagePool, "missing", lambda *a: counted.append(1) or missing(*a))

    def calls(rows: int) -> int:
        counted.clear()
        scheduler = scheduler_of(rows, prompts=rows, pages=rows)
        wait(scheduler, target, *[3] * rows, limit=4)
        assert len(scheduler.admit(1).admitted) == rows
        return len(counted)

    assert calls(32) == 4 * calls(8)
