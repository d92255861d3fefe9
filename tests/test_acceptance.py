"""Acceptance lengths and rates, held to literal examples."""

import numpy as np
import pytest

from redrafter_jax.acceptance import (
    acceptance_length,
    acceptance_rate_per_depth,
    ends_at_once,
)


def test_rows_are_pooled_not_averaged() -> None:
    rows = np.asarray([[9, 0, 0], [0, 0, 1]])
    assert acceptance_length(rows) == 1.2
    np.testing.assert_array_equal(acceptance_rate_per_depth(rows), [0.1, 1.0])


def test_without_a_call_the_length_is_one_and_a_rate_is_no_number() -> None:
    assert acceptance_length(np.zeros((2, 3), int)) == 1.0
    np.testing.assert_array_equal(acceptance_rate_per_depth(np.asarray([9, 0, 0])), [0.0, np.nan])


@pytest.mark.parametrize(
    ("tokens", "at_once"),
    [([], False), ([9], True), ([1, 1, 1, 9], True), ([1, 1, 1, 1, 9], False), ([9, 1], False)],
)
def test_a_text_ends_at_once_where_a_stop_token_is_among_its_first_four(
    tokens: list[int], at_once: bool
) -> None:
    assert ends_at_once(tokens, (8, 9)) == at_once
