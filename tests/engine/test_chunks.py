"""What the next pass reads and the next call decodes, as arrays."""

from redrafter_jax.engine.chunks import beginnings, idle_row, make_row, next_batch, next_chunk
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.scheduler import Row
from redrafter_jax.models.target import Target


def row_of(target: Target, prompt: list[int], **state: int) -> Row:
    row = make_row(target, 0, Request(prompt, 4, 0), ())
    row.read_until = len(prompt)
    for name, value in state.items():
        setattr(row, name, value)
    return row


def test_tokens_that_are_not_read_are_told_to_their_row(target: Target) -> None:
    slots = [None, row_of(target, [1, 2, 3], cached=2), row_of(target, [4]), None]
    rows, texts = beginnings(slots, {0: 2, 1: 1}, 2, (3, 5))
    assert rows.tolist() == [2, 1, 2], "row 1 of its part; 2 is no row of it"
    assert texts[1].tolist() == [1, 2, 0, 0, 0]
    assert beginnings(slots, {}, 2, (3, 5))[0].tolist() == [2, 2, 2]


def test_a_chunk_is_left_aligned_and_tells_what_follows(target: Target) -> None:
    idle = idle_row(target, ())
    quiet = make_row(target, 7, Request([6], 4, 9, speculate=False), (), 8)
    quiet.read_until = 1
    slots = [None, row_of(target, [1, 2, 3, 4, 5]), quiet]
    chunk = next_chunk(slots, {0: 1, 2: 2}, 3, (3, 4), idle)
    assert chunk.rows.tolist() == [1, 3, 2], "none of three is at place 1"
    assert chunk.begins.tolist() == [0, 0, 0]
    assert chunk.is_new.tolist() == [True, False, True]
    assert chunk.requests.tokens.tolist() == [[1, 2, 3, 4], [0] * 4, [6, 0, 0, 0]]
    assert chunk.following[0] == 5
    assert chunk.speculates.tolist() == [True, True, False]
    assert chunk.requests.lengths.tolist() == [5, 1, 1]
    assert chunk.requests.sampling.seeds.tolist() == [0, 0, 9]
    assert [row and row.reading for row in slots] == [None, True, False]
    chunk = next_chunk(slots, {0: 1}, 3, (3, 4), idle)
    assert chunk.begins.tolist() == [4, 0, 0]
    assert chunk.is_new.tolist() == [False] * 3
    assert chunk.requests.tokens[0].tolist() == [5, 0, 0, 0]
    assert slots[1] is not None
    assert not slots[1].reading


def test_a_batch_holds_every_slot_or_the_active_ones_of_each_part() -> None:
    parts = [range(4), range(4, 8)]
    batch, places = next_batch([1, 3, 6], 8, parts)
    assert batch.tolist() == [4, 1, 4, 3, 4, 4, 2, 4]
    assert places == {1: 1, 3: 3, 6: 6}
    batch, places = next_batch([1, 3, 6], 4, parts)
    assert batch.tolist() == [1, 3, 2, 4]
    assert places == {0: 1, 1: 3, 2: 6}
