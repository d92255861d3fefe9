import math

import numpy as np

from redrafter_jax.config import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from redrafter_jax.models.rotary import rotary_frequencies

# Head of 8, base 10000: one radian per position, a tenth, a hundredth and a thousandth.
PLAIN = np.asarray([1.0, 0.1, 0.01, 0.001])


def test_frequencies_fall_evenly_from_one() -> None:
    frequencies = rotary_frequencies(8, 10000.0)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, PLAIN, rtol=1e-7)


def test_linear_scaling_divides_all_alike() -> None:
    np.testing.assert_allclose(rotary_frequencies(8, 1e4, LinearScaling(4.0)), PLAIN / 4, rtol=1e-7)


def test_dynamic_scaling_is_none_where_texts_end() -> None:
    np.testing.assert_allclose(rotary_frequencies(8, 1e4, DynamicScaling(4.0)), PLAIN, rtol=1e-7)


def test_llama_3_scaling_keeps_fast_pairs_and_slows_slow_ones() -> None:
    # In 100 positions the pairs turn 15.9, 1.59, 0.159 and 0.0159 times; from 1 to 4 is the ramp,
    # and 1.59 lies 0.197 of the way.
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 100)
    share = (100 * 0.1 / (2 * math.pi) - 1) / 3
    expected = [1.0, 0.1 * share + 0.1 / 8 * (1 - share), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(rotary_frequencies(8, 1e4, scaling), expected, rtol=1e-6)


def test_yarn_keeps_and_slows_along_the_head() -> None:
    # A pair i turns 1000 / (2 pi) * 10^-i times: 159, 15.9, 1.59 and 0.159. 20 turns are at pair
    # 0.9, rounded down to 0, and 1 turn at pair 2.2, rounded up to 3.
    scaling = YarnScaling(4.0, 1000, 1.0, beta_fast=20.0, beta_slow=1.0)
    kept = np.asarray([1, 2 / 3, 1 / 3, 0])
    expected = PLAIN * kept + PLAIN / 4 * (1 - kept)
    np.testing.assert_allclose(rotary_frequencies(8, 1e4, scaling), expected, rtol=1e-6)


def test_a_yarn_ramp_of_no_width_is_a_step() -> None:
    # Of 10 positions no pair makes even 5 turns: the ramp starts and ends at the first.
    scaling = YarnScaling(4.0, 10, 1.0, beta_fast=50.0, beta_slow=5.0)
    expected = [1.0, 0.1 / 4, 0.01 / 4, 0.001 / 4]
    np.testing.assert_allclose(rotary_frequencies(8, 1e4, scaling), expected, rtol=1e-6)
