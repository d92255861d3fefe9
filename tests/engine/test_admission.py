"""Who takes which slot, where its beginning comes from, and what the next pass reads."""

from collections import deque
from collections.abc import Callable

from redrafter_jax.engine.admission import (
    Row,
    Slot,
    admit,
    beginnings,
    idle_row,
    make_row,
    next_batch,
    next_chunk,
    take_slot,
)
from redrafter_jax.engine.messages import Request
from redrafter_jax.models.target import Target

ONE_PART = [range(3)]


def row_of(target: Target, prompt: list[int], number: int = 0) -> Row:
    return make_row(target, number, Request(prompt, 4, 0), ())


def kept(text: list[int], freed: int) -> Slot:
    """A free slot; the last token of its text is not in the cache."""
    return Slot(text=text, cached=len(text) - 1, freed=freed)


def test_a_common_beginning_is_copied_where_it_is_a_small_part_of_what_is_kept(
    target: Target,
) -> None:
    slots = [kept([9, 9], 2), kept([1, 2, 3, 4, 5, 6, 7], 4), kept([8], 3)]
    assert take_slot(slots, ONE_PART, row_of(target, [1, 2, 0])) == 0, "free for longest"
    assert (slots[0].cached, slots[0].source) == (2, 1)


def test_nobody_takes_a_beginning_that_is_not_there_yet(target: Target) -> None:
    slots = [Slot(freed=1), kept([1, 2, 3, 4, 5, 6, 7], 3), Slot(freed=2)]
    slots[1].row = row_of(target, [1, 2, 3])
    assert take_slot(slots, ONE_PART, row_of(target, [1, 2, 0, 0])) == 0
    assert take_slot(slots, ONE_PART, row_of(target, [1, 2, 0, 5])) == 2
    assert slots[2].source == 1, "row 0 will hold three of the tokens, after the next pass"


def test_the_last_token_of_a_prompt_is_always_read(target: Target) -> None:
    slots = [kept([1, 2, 3, 4], 0)]
    assert take_slot(slots, [range(1)], row_of(target, [1, 2, 3])) == 0
    assert slots[0].cached == 2


def test_nothing_crosses_the_parts_of_a_mesh(target: Target) -> None:
    parts = [range(2), range(2, 4)]
    slots = [kept([1, 2, 3, 4, 5, 6, 7], 9), Slot(), Slot(), Slot()]
    slots[1].row = row_of(target, [0])
    # The only free one of the part that holds the beginning.
    assert take_slot(slots, parts, row_of(target, [1, 2, 0])) == 0
    assert take_slot(slots, parts, row_of(target, [1, 2, 0])) in (2, 3)
    assert take_slot(slots, parts[:1], row_of(target, [5])) is None


def test_a_pass_of_several_prompts_waits_until_it_is_full(target: Target) -> None:
    slots = [Slot() for _ in range(3)]
    queue = deque(row_of(target, [1, 2, number], number) for number in range(4))
    places, admitted = admit(slots, queue, ONE_PART, 2)
    assert places == {0: 0, 1: 1}
    assert admitted == slots[:2]
    next_chunk(slots, places, 3, (2, 8), row_of(target, [0]))
    assert admit(slots, queue, ONE_PART, 2) == ({}, []), "two wait, and one slot is free"
    slots[0].row = None
    assert admit(slots, queue, ONE_PART, 2)[0] == {0: 0, 1: 2}
    assert not queue


def test_a_drafter_that_keeps_the_next_token_too_reads_the_last_one_it_shares_anew(
    target: Target,
) -> None:
    slots = [kept([1, 2, 3, 4, 5, 6], 0)]
    assert take_slot(slots, [range(1)], row_of(target, [1, 2, 3, 9]), lost=1) == 0
    assert slots[0].cached == 2
    slots = [kept([1, 2], 0)]
    assert take_slot(slots, [range(1)], row_of(target, [1, 9]), lost=1) == 0
    assert slots[0].cached == 0


def test_each_slot_has_its_own_place_where_a_pass_has_room_for_all(target: Target) -> None:
    parts = [range(2), range(2, 4)]
    for most, expected in ((2, {0: 0, 2: 2, 3: 3}), (1, {0: 0, 1: 2})):
        slots = [Slot() for _ in range(4)]
        slots[1].row = row_of(target, [1], 0)
        slots[1].cached = slots[1].prompt_length = 1
        queue = deque(row_of(target, [number], number) for number in range(1, 4))
        places, admitted = admit(slots, queue, parts, most)
        assert places == expected
        assert admitted == [slots[index] for index in sorted(places.values(), key=by_number(slots))]


def by_number(slots: list[Slot]) -> Callable[[int], int]:
    return lambda index: slots[index].number


def test_a_beginning_is_copied_once_within_its_part(target: Target) -> None:
    slots = [Slot() for _ in range(4)]
    slots[3] = Slot(row_of(target, [1, 2, 3]), 3, [1, 2, 3], cached=2, source=2)
    rows, sources = beginnings(slots, {1: 3}, 2, 2)
    assert (rows.tolist(), sources.tolist()) == ([2, 1], [0, 0]), "row 1 of its part, from row 0"
    assert slots[3].source is None
    assert beginnings(slots, {1: 3}, 2, 2)[0].tolist() == [2, 2], "2 is no row of it"


def test_a_chunk_is_left_aligned_and_tells_what_follows(target: Target) -> None:
    idle = idle_row(target, ())
    slots = [Slot(), Slot(), Slot()]
    slots[1] = Slot(row_of(target, [1, 2, 3, 4, 5]), 5, [1, 2, 3, 4, 5])
    quiet = make_row(target, 7, Request([6], 4, 9, speculate=False), (), 8)
    slots[2] = Slot(quiet, 1, [6])
    chunk = next_chunk(slots, {0: 1, 2: 2}, 3, (3, 4), idle)
    assert chunk.rows.tolist() == [1, 3, 2], "none of three is at place 1"
    assert chunk.begins.tolist() == [0, 0, 0]
    assert chunk.requests.tokens.tolist() == [[1, 2, 3, 4], [0] * 4, [6, 0, 0, 0]]
    assert chunk.following[0] == 5
    assert chunk.speculates.tolist() == [True, True, False]
    assert chunk.requests.lengths.tolist() == [5, 1, 1]
    assert chunk.requests.sampling.seeds.tolist() == [0, 0, 9]
    assert [slot.reading for slot in slots] == [False, True, False]
    # The last chunk ends with the prompt, and so begins with tokens that are known.
    chunk = next_chunk(slots, {0: 1}, 3, (3, 4), idle)
    assert chunk.begins.tolist() == [1, 0, 0]
    assert chunk.requests.tokens[0].tolist() == [2, 3, 4, 5]
    assert slots[1].decoding


def test_a_batch_holds_every_slot_or_the_active_ones_of_each_part() -> None:
    parts = [range(4), range(4, 8)]
    batch, places = next_batch([1, 3, 6], 8, parts)
    assert batch.tolist() == [4, 1, 4, 3, 4, 4, 2, 4]
    assert places == {1: 1, 3: 3, 6: 6}
    batch, places = next_batch([1, 3, 6], 4, parts)
    assert batch.tolist() == [1, 3, 2, 4]
    assert places == {0: 1, 1: 3, 2: 6}
