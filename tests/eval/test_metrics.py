"""The measures, held to literal examples and to counting by hand."""

import numpy as np
import pytest

from eval.metrics import (
    Spread,
    first_divergence,
    identical_fraction,
    rates,
    spread,
)


@pytest.mark.parametrize(
    ("tokens", "expected", "place"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([7], [1, 5, 3], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
    ],
)
def test_first_divergence_is_where_a_token_differs_or_is_missing(
    tokens: list[int], expected: list[int], place: int | None
) -> None:
    assert first_divergence(tokens, expected) == place


def test_identical_fraction_counts_texts_without_divergence() -> None:
    assert identical_fraction([None, 0, None, 12]) == 0.5
    assert identical_fraction([None]) == 1.0


def test_spread_is_the_median_between_the_quartiles() -> None:
    assert spread(np.asarray([5.0, 1.0, 4.0, 2.0, 3.0])) == Spread(2.0, 3.0, 4.0)


def test_spread_leaves_out_what_is_no_number() -> None:
    assert spread(np.asarray([np.nan, 8.0])) == Spread(8.0, 8.0, 8.0)
    assert spread(np.asarray([np.nan])) is None
    assert spread(np.asarray([])) is None


def test_a_rate_of_nothing_is_no_number() -> None:
    measured = rates(np.asarray([10, 0]), np.asarray([4.0, 4.0]))
    np.testing.assert_array_equal(measured, [2.5, np.nan])
