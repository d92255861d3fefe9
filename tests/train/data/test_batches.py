"""Batches are shuffled, mixed by weight, and the same every time."""

import time

import numpy as np
import pytest

from redrafter_jax.errors import InputError
from train.data.batches import make_batches
from train.data.types import Windows


def examples(count: int) -> Windows:
    tokens = np.repeat(np.arange(count, dtype=np.int32)[:, None], 4, axis=1)
    return Windows(tokens, np.ones((count, 4), bool), np.ones((count, 4), np.int32))


def test_an_epoch_sees_every_window_once_in_a_shuffled_order() -> None:
    batches = make_batches([(examples(12), 1.0)], 4, seed=1)
    epoch = np.concatenate([next(batches)["tokens"][:, 0] for _ in range(3)])
    assert sorted(epoch) == list(range(12))
    assert list(epoch) != list(range(12))
    again = make_batches([(examples(12), 1.0)], 4, seed=1)
    np.testing.assert_array_equal(next(again)["tokens"][:, 0], epoch[:4])


def test_a_few_batches_are_read_ahead_however_large_they_are() -> None:
    read: list[int] = []

    def read_row(row: int) -> dict[str, np.ndarray]:
        read.append(row)
        return {}

    next(make_batches([(examples(1000), 1.0)], 4, seed=0, features=[read_row]))
    seen, deadline = -1, time.monotonic() + 60
    while seen < max(len(read), 4) and time.monotonic() < deadline:
        seen = len(read)
        time.sleep(0.2)
    assert 4 <= len(read) <= 4 * 10


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ([(3, 1.0)], r"sources\.0 gives 3 rows of \d+ tokens, fewer than its share of 4"),
        (
            [(3, 1.0), (2, 3.0)],
            r"sources\.1 gives 2 rows of \d+ tokens, fewer than its share of 3",
        ),
    ],
)
def test_too_few_windows_are_refused(sources: list[tuple[int, float]], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make_batches([(examples(count), weight) for count, weight in sources], 4, seed=0)


def test_sources_are_mixed_by_their_weights_in_every_stretch() -> None:
    ones = examples(8)._replace(tokens=np.full((8, 4), 100, np.int32))
    batches = make_batches([(examples(12), 1.0), (ones, 3.0)], 4, seed=0)
    for _ in range(10):
        assert (next(batches)["tokens"][:, 0] == 100).sum() == 3
