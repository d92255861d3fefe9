import jax.numpy as jnp
import numpy as np
import pytest

from redrafter_jax.config import Activation
from redrafter_jax.models.layers import gated_feed_forward, rms_norm, rotary_angles, rotate


def test_rms_norm_divides_by_the_root_mean_square_and_scales() -> None:
    # The mean square of (3, 4) is 12.5.
    x = jnp.asarray([[3.0, 4.0]])
    normalised = rms_norm(x, jnp.asarray([1.0, 10.0]), 0.0)
    np.testing.assert_allclose(normalised, [[3 / 12.5**0.5, 40 / 12.5**0.5]], rtol=1e-6)


def test_zero_centered_norms_multiply_by_one_plus_their_weight_before_they_round() -> None:
    random = np.random.default_rng(0)
    x, weight = (jnp.asarray(random.normal(size=64), jnp.bfloat16) for _ in range(2))
    wide, factor = np.asarray(x, np.float64), 1 + np.asarray(weight, np.float64)
    expected = (wide / np.sqrt((wide**2).mean()) * factor).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, weight, 0.0, zero_centered=True), expected)


def test_rms_norm_squares_in_float32() -> None:
    # 300 squared overflows float16; 257 is no bfloat16 number, but its dtype is kept.
    x = jnp.full((1, 4), 300.0, jnp.float16)
    np.testing.assert_allclose(rms_norm(x, jnp.ones(4, jnp.float16), 0.0), 1.0)
    x = jnp.full((1, 4), 3.0, jnp.bfloat16)
    assert rms_norm(x, jnp.ones(4, jnp.bfloat16), 0.0).dtype == jnp.bfloat16


def frequencies(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


def test_rotation_turns_each_pair_by_position_times_its_frequency() -> None:
    # Pairs are (0, 2) and (1, 3).
    positions = jnp.asarray([[0, 3]])
    cosine, sine = rotary_angles(positions, frequencies(1.0, 0.01))
    x = jnp.asarray([1.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    turned = rotate(jnp.broadcast_to(x, (1, 2, 1, 4)), cosine, sine)[0, :, 0]
    expected = [[1, 1, 0, 0], [np.cos(3), np.cos(0.03), np.sin(3), np.sin(0.03)]]
    np.testing.assert_allclose(turned, expected, atol=1e-6)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def product(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, *rotary_angles(jnp.asarray([[position]]), frequencies(1.0, 0.1, 0.01, 0.001)))
            for x, position in ((q, query_position), (k, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(7, 2) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(7, 2) != pytest.approx(product(8, 2), abs=1e-2)


def test_rotation_keeps_the_dtype_and_turns_in_float32() -> None:
    # In bfloat16 position 257 would be 256, half a turn of the fastest pair away at 3.14.
    cosine, sine = rotary_angles(jnp.asarray([[257]]), frequencies(1.0))
    turned = rotate(jnp.asarray([1.0, 0.0], jnp.bfloat16).reshape(1, 1, 1, 2), cosine, sine)
    assert turned.dtype == jnp.bfloat16
    expected = [np.cos(257), np.sin(257)]
    np.testing.assert_allclose(np.asarray(turned[0, 0, 0], np.float64), expected, atol=4e-3)


@pytest.mark.parametrize(
    ("activation", "gate"),
    [
        ("silu", 2 / (1 + np.exp(-2))),
        ("gelu_pytorch_tanh", 1 + np.tanh((2 / np.pi) ** 0.5 * (2 + 0.044715 * 8))),
    ],
)
def test_feed_forward_is_gated_by_its_activation(activation: Activation, gate: float) -> None:
    # Gate 2, up 3, then down by 5.
    gate_proj, up, down = (jnp.asarray([[weight]]) for weight in (2.0, 3.0, 5.0))
    out = gated_feed_forward(jnp.asarray([[1.0]]), gate_proj, up, down, activation)
    np.testing.assert_allclose(out, [[gate * 3 * 5]], rtol=1e-6)
