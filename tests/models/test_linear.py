"""Linear maps of quantized weights, against the same map of the numbers they stand for."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from grouped_weights import Case, expected_output, numbers_of, random_inputs

from redrafter_jax.models.linear import (
    QuantizedWeight,
    dequantize,
    linear,
    quantize,
    read_rows,
    transposed,
)

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize(
    ("codes", "group", "scales"),
    [
        ("int8", 64, "float32"),
        ("int8", 16, "float16"),
        ("int4", 64, "float32"),
        ("int4", 32, "bfloat16"),
    ],
)
def test_a_product_is_that_of_the_numbers(
    codes: str, group: int, scales: str, minimum: bool
) -> None:
    inputs = random_inputs(Case(6, 64, 6, group, codes, minimum, "float32", scales))
    _, *parts = inputs.values()
    weight = QuantizedWeight(*parts)
    dequantized = dequantize(weight, jnp.float32)
    np.testing.assert_allclose(dequantized, numbers_of(*weight), rtol=1e-6, atol=1e-7)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = inputs["x"].astype(dtype)
        # The codes are exact in bfloat16: nothing but x was rounded on the way to float32.
        expected, sizes = expected_output(inputs | {"x": x})
        assert linear(x.reshape(2, 3, 64), weight).dtype == dtype
        wide = linear(x.reshape(2, 3, 64), weight, jnp.float32).reshape(6, 6)
        assert (np.abs(wide - expected) / sizes).max() < 1e-6


def test_rows_of_a_table_are_those_of_the_numbers() -> None:
    _, *parts = random_inputs(Case(3, 64, 6, 32, scales="float32")).values()
    matrix = QuantizedWeight(*parts)
    table, numbers = transposed(matrix), numbers_of(*matrix)
    rows = read_rows(table, jnp.asarray([[5, 0]]), 6, jnp.float32)
    np.testing.assert_allclose(rows, numbers.T[[[5, 0]]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("form", "steps", "groups"), [("int8", 254, lambda inputs: 1), ("int4", 15, lambda n: n // 64)]
)
def test_quantizing_errs_by_half_a_step_of_its_group(
    axis: int, form: Any, steps: int, groups: Any
) -> None:
    inputs = 192  # 128 does not divide it
    numbers = RANDOM.normal(size=(inputs, 5)).astype(np.float32)
    numbers[:, 3] = 0
    numbers[0, 2] = 40.0
    weight = quantize(jnp.asarray(numbers if axis == 0 else numbers.T), form, axis)
    assert isinstance(weight, QuantizedWeight)
    weight = weight if axis == 0 else transposed(weight)
    assert weight.scale.shape == (groups(inputs), 5)
    assert str(weight.codes.dtype) == form
    grouped = numbers.reshape(groups(inputs), -1, 5)
    span = 2 * np.abs(grouped).max(1) if form == "int8" else np.ptp(grouped, axis=1)
    half = span / steps / 2
    # bfloat16 rounds scale and minimum by up to 2 ** -9: of the span, and of the lowest number.
    slack = 0.0 if form == "int8" else span / 2**9 + np.abs(grouped).max(1) / 2**9
    error = np.abs(numbers_of(*weight) - numbers).reshape(grouped.shape).max(1)
    assert (error <= 1.001 * half + slack + 1e-7).all()
    assert not numbers_of(*weight)[:, 3].any()


@pytest.mark.parametrize("axis", [0, 1])
def test_fp8_has_four_bits_of_every_number(axis: int) -> None:
    numbers = (RANDOM.normal(size=(64, 5)) ** 3).astype(np.float32)
    numbers[:, 3] = 0
    weight = quantize(jnp.asarray(numbers if axis == 0 else numbers.T), "fp8", axis)
    weight = weight if axis == 0 else transposed(weight)
    assert weight.codes.dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(weight.scale, np.abs(numbers).max(axis=0)[None] / 448, rtol=1e-6)
    # Half of the last bit; numbers below 2 ** -6 of a scale have fewer, the last being 2 ** -9.
    half = np.maximum(np.abs(numbers) / 2**4, np.asarray(weight.scale) / 2**10)
    assert (np.abs(numbers_of(*weight) - numbers) <= 1.001 * half).all()
    x = jnp.asarray(RANDOM.normal(size=(3, 64)), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ numbers_of(*weight)
    sizes = np.abs(np.asarray(x, np.float64)) @ np.abs(numbers_of(*weight)) + 1e-9
    assert (np.abs(linear(x, weight, jnp.float32) - expected) / sizes).max() < 1e-6
