"""Linear maps side by side, against the same maps one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redrafter_jax.models.linear import (
    Joint,
    QuantizedWeight,
    SeparateWeights,
    dequantize,
    join,
    joined_linear,
    joined_param,
    quantize,
)
from redrafter_jax.models.linear import take_apart as apart

# Three groups, of each three outputs of the first map, and one of the others.
JOINT = Joint(("q", "k", "v"), 3, (3, 1, 1))
INPUTS = 32


def parts() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(INPUTS, JOINT.groups * width) for width in JOINT.widths]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def test_each_group_holds_its_share_of_every_map() -> None:
    q, k, v = (jnp.arange(3.0 * width) + 10 * at for at, width in enumerate(JOINT.widths))
    whole = join(JOINT, [q, k, v])
    np.testing.assert_array_equal(whole, [0, 1, 2, 10, 20, 3, 4, 5, 11, 21, 6, 7, 8, 12, 22])
    for part, expected in zip(apart(JOINT, whole), (q, k, v), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("form", [pytest.param("int8", marks=pytest.mark.long), "int4", "fp8"])
def test_quantized_alike_they_are_one_weight_with_the_same_numbers(form: Any) -> None:
    quantized = [quantize(part, form) for part in parts()]
    whole = join(JOINT, quantized)
    assert isinstance(whole, QuantizedWeight)
    expected = join(JOINT, [dequantize(part, jnp.float32) for part in quantized])
    np.testing.assert_array_equal(dequantize(whole, jnp.float32), expected)
    # As if the whole had been quantized.
    again = quantize(join(JOINT, parts()), form)  # pyright: ignore[reportArgumentType]
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    jax.tree.map(np.testing.assert_array_equal, list(apart(JOINT, whole)), quantized)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "forms", [(None, None, None), ("int8", "int8", "int8"), ("int4", None, "int8")]
)
def test_the_product_is_that_of_every_map_by_itself(forms: Any, biased: bool) -> None:
    weights: list[Any] = [
        part if form is None else quantize(part, form)
        for part, form in zip(parts(), forms, strict=True)
    ]
    values = iter(weights)
    param = joined_param(JOINT, (INPUTS,), lambda shape: next(values))
    assert isinstance(param.get_value(), SeparateWeights) == (len(set(forms)) > 1)
    bias = joined_param(JOINT._replace(names=("a", "b", "c")), (), jnp.ones) if biased else None
    x = jax.random.normal(jax.random.key(1), (2, 4, INPUTS))
    product = joined_linear(x, param, bias)
    assert product.shape == (2, 4, 3, 5)
    own = [np.asarray(x @ dequantize(weight, jnp.float32)) + biased for weight in weights]
    q, k, v = (part.reshape(2, 4, 3, -1) for part in own)
    np.testing.assert_allclose(product, np.concatenate([q, k, v], axis=-1), rtol=1e-5, atol=1e-5)
