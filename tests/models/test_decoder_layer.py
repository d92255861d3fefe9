"""What layers compute in float32 and where they round; the rest the goldens of models show."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import cast, random_target, tiny_config

from redrafter_jax.config import YarnScaling
from redrafter_jax.models import decoder_layer, linear
from redrafter_jax.models.decoder_layer import normalised
from redrafter_jax.models.rotary import rotary_angles, rotary_frequencies, rotate


def test_zero_centered_norms_multiply_by_one_plus_their_weight_before_they_round() -> None:
    random = np.random.default_rng(0)
    x, weight = (jnp.asarray(random.normal(size=64), jnp.bfloat16) for _ in range(2))
    wide, factor = np.asarray(x, np.float64), 1 + np.asarray(weight, np.float64)
    expected = (wide / np.sqrt((wide**2).mean()) * factor).astype(jnp.bfloat16)
    config = tiny_config(zero_centered_norms=True, rms_norm_eps=1e-12)
    np.testing.assert_array_equal(normalised(x, nnx.Param(weight), config), expected)


def test_norms_square_in_float32() -> None:
    # 300 squared overflows float16.
    x = jnp.full((1, 4), 300.0, jnp.float16)
    weight = nnx.Param(jnp.ones(4, jnp.float16))
    np.testing.assert_allclose(normalised(x, weight, tiny_config()), 1.0)
    x = jnp.full((1, 4), 3.0, jnp.bfloat16)
    weight = nnx.Param(jnp.ones(4, jnp.bfloat16))
    assert normalised(x, weight, tiny_config()).dtype == jnp.bfloat16


def test_rotation_keeps_the_dtype_and_turns_in_float32() -> None:
    # In bfloat16 position 257 would be 256, half a turn of the fastest pair away at 3.14.
    cosine, sine = rotary_angles(jnp.asarray([[257]]), np.ones(1, np.float32))
    turned = rotate(jnp.asarray([1.0, 0.0], jnp.bfloat16).reshape(1, 1, 1, 2), cosine, sine)
    assert turned.dtype == jnp.bfloat16
    expected = [np.cos(257), np.sin(257)]
    np.testing.assert_allclose(np.asarray(turned[0, 0, 0], np.float64), expected, atol=4e-3)


def test_a_yarn_ramp_of_no_width_is_a_step() -> None:
    # Unscaled the pairs turn one radian per position, a tenth, a hundredth and a thousandth.
    # Of 10 positions no pair makes even 5 turns: the ramp starts and ends at the first.
    scaling = YarnScaling(4.0, 10, 1.0, beta_fast=50.0, beta_slow=5.0)
    expected = [1.0, 0.1 / 4, 0.01 / 4, 0.001 / 4]
    np.testing.assert_allclose(rotary_frequencies(8, 1e4, scaling), expected, rtol=1e-6)


WIDE = tiny_config(
    vocab_size=31,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


# With output norms and a bias, blocks are not in parts; with more rows than parts are for, neither.
@pytest.mark.parametrize(
    ("rows", "changes", "in_parts"),
    [
        (8, {}, 6),
        pytest.param(8, {"zero_centered_norms": True}, 6, marks=pytest.mark.long),
        (8, {"attention_output_bias": True}, 3),
        (8, {"output_norms": True}, 0),
        pytest.param(64, {}, 6, marks=pytest.mark.long),
        (72, {}, 0),
    ],
    ids=str,
)
def test_blocks_in_parts_are_the_blocks(
    rows: int, changes: dict[str, Any], in_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = cast(random_target(replace(WIDE, **changes)), jnp.bfloat16)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 31, (1, rows)))
    whole, keys, _ = target.merge().forward(tokens, None, (0,))
    found = []

    def seen(*arguments: Any) -> Any:
        parts = linear.product_in_parts(*arguments)
        found.append(parts is not None)
        return parts

    monkeypatch.setattr(linear, "fewest_rows", lambda: 8)
    monkeypatch.setattr("pallas_kernels.add_norm.has_kernel", lambda width: True)
    monkeypatch.setattr(decoder_layer, "product_in_parts", seen)
    added, keys_then, _ = target.merge().forward(tokens, None, (0,))
    assert sum(found) == in_parts
    for one, other in zip((added, *keys_then), (whole, *keys), strict=True):
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        assert np.linalg.norm(one - other) <= 0.02 * np.linalg.norm(other)
