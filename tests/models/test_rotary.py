import numpy as np

from redrafter_jax.config import YarnScaling
from redrafter_jax.models.rotary import rotary_frequencies


def test_a_yarn_ramp_of_no_width_is_a_step() -> None:
    # Unscaled the pairs turn one radian per position, a tenth, a hundredth and a thousandth.
    # Of 10 positions no pair makes even 5 turns: the ramp starts and ends at the first.
    scaling = YarnScaling(4.0, 10, 1.0, beta_fast=50.0, beta_slow=5.0)
    expected = [1.0, 0.1 / 4, 0.01 / 4, 0.001 / 4]
    np.testing.assert_allclose(rotary_frequencies(8, 1e4, scaling), expected, rtol=1e-6)
