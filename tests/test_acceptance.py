"""Acceptance lengths and rates, held to literal examples."""

import numpy as np

from redrafter_jax.acceptance import acceptance_length, acceptance_rate_per_depth


def test_rows_are_pooled_not_averaged() -> None:
    rows = np.asarray([[9, 0, 0], [0, 0, 1]])
    assert acceptance_length(rows) == 1.2
    np.testing.assert_array_equal(acceptance_rate_per_depth(rows), [0.1, 1.0])


def test_without_a_call_the_length_is_one_and_a_rate_is_no_number() -> None:
    assert acceptance_length(np.zeros((2, 3), int)) == 1.0
    np.testing.assert_array_equal(acceptance_rate_per_depth(np.asarray([9, 0, 0])), [0.0, np.nan])
