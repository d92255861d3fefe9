"""Acceptance lengths and rates, held to literal examples and to counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrafter_jax.acceptance import acceptance_length, acceptance_rate_per_depth

P = 4
gains_per_call = st.lists(st.integers(1, P), min_size=1, max_size=30)


def histogram(gains: list[int]) -> np.ndarray:
    return np.asarray([gains.count(gain) for gain in range(1, P + 1)])


def test_without_a_call_the_acceptance_length_is_one() -> None:
    assert acceptance_length(np.zeros((2, 3), int)) == 1.0


@given(gains_per_call)
def test_acceptance_length_counts_calls(gains: list[int]) -> None:
    assert acceptance_length(histogram(gains)) == pytest.approx(sum(gains) / len(gains))


def test_rows_are_pooled_not_averaged() -> None:
    rows = np.asarray([[9, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(acceptance_rate_per_depth(rows), [0.1, 1.0])


@given(gains_per_call)
def test_rates_by_walking_down_every_call(gains: list[int]) -> None:
    asked, accepted = [0] * P, [0] * P
    for gain in gains:
        for depth in range(1, P):
            asked[depth] += 1
            if gain <= depth:
                break
            accepted[depth] += 1
    measured = acceptance_rate_per_depth(histogram(gains))
    for depth in range(1, P):
        if asked[depth]:
            assert measured[depth - 1] == pytest.approx(accepted[depth] / asked[depth])
        else:
            assert np.isnan(measured[depth - 1])
