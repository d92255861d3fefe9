"""Ranking tokens by how often they are learnt, on rows that can be counted by hand."""

import numpy as np
import pytest

from redrafter_jax.errors import InputError
from train.data.types import Windows
from train.vocabulary import most_frequent


def windows(tokens: list[list[int]], mask: list[list[int]]) -> Windows:
    ids = np.asarray(tokens, np.int32)
    return Windows(ids, np.asarray(mask, bool), np.ones_like(ids))


# Token 5 is learnt three times, 2 twice, 7 once; 1 is there four times and never learnt.
TEXT = windows([[5, 2, 1, 1], [5, 7, 1, 1], [5, 2, 9, 9]], [[1, 1, 0, 0]] * 3)


@pytest.mark.parametrize(("count", "expected"), [(1, (5,)), (2, (2, 5)), (3, (2, 5, 7))])
def test_the_most_learnt_tokens_come_in_rising_order(count: int, expected: tuple[int, ...]) -> None:
    assert most_frequent([(TEXT, 1.0)], count, vocab_size=10) == expected


def test_of_equally_rare_tokens_the_lower_are_taken() -> None:
    assert most_frequent([(TEXT, 1.0)], 5, vocab_size=10) == (0, 1, 2, 5, 7)


def test_some_tokens_are_always_taken() -> None:
    assert most_frequent([(TEXT, 1.0)], 2, vocab_size=10, always=(9,)) == (5, 9)


def test_a_source_counts_by_its_weight_not_its_size() -> None:
    small = windows([[8, 8]], [[1, 1]])
    assert most_frequent([(TEXT, 1.0), (small, 1.0)], 1, vocab_size=10) == (8,)
    # 5 is half of what TEXT teaches: at nine to one more than all of the other.
    assert most_frequent([(TEXT, 9.0), (small, 1.0)], 1, vocab_size=10) == (5,)


@pytest.mark.parametrize("count", [0, 11])
def test_a_vocabulary_that_cannot_be_is_one_sentence(count: int) -> None:
    with pytest.raises(InputError, match=rf"draft_vocab_size is {count}; .* ask for 1 to 10"):
        most_frequent([(TEXT, 1.0)], count, vocab_size=10, always=(9,))
