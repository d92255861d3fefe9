"""Random arguments of grouped products, and what they are in float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Case(NamedTuple):
    """One call."""

    rows: int
    inputs: int
    outputs: int
    group: int = 128
    codes: str = "int4"
    minimum: bool = True
    dtype: Any = jnp.bfloat16  # of rows
    scales: Any = jnp.bfloat16
    minima: Any = None  # their dtype; None is that of the scales
    cores: int = 132


def random_inputs(case: Case) -> dict[str, Any]:
    """Numbers of the weight are about as large above zero as below."""
    keys = jax.random.split(jax.random.key(case.rows), 4)
    half = 128 if case.codes == "int8" else 8
    groups = case.inputs // case.group, case.outputs
    scale = jax.random.uniform(keys[0], groups, minval=0.5) / half
    minimum = jax.random.normal(keys[1], groups) / 4 - 1
    codes = jax.random.randint(keys[2], (case.inputs, case.outputs), -half, half)
    return {
        "x": jax.random.normal(keys[3], (case.rows, case.inputs)).astype(case.dtype),
        "codes": codes.astype(case.codes),
        "scale": scale.astype(case.scales),
        "minimum": minimum.astype(case.minima or case.scales) if case.minimum else None,
    }


def numbers_of(codes: Any, scale: Any, minimum: Any) -> np.ndarray:
    """What a weight [in, out] stands for, row by row, in float64."""
    lowest = {"int4": -8, "int8": -128}.get(str(codes.dtype), 0)
    codes, scale = (np.asarray(array, np.float64) for array in (codes, scale))
    group = len(codes) // len(scale)
    numbers = np.empty(codes.shape)
    for row, of_outputs in enumerate(codes):
        own = scale[row // group]
        numbers[row] = own * of_outputs
        if minimum is not None:
            low = np.asarray(minimum, np.float64)[row // group]
            numbers[row] = low + own * (of_outputs - lowest)
    return numbers


def expected_output(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The products in float64, and those of all numbers without their signs."""
    x, *weight = inputs.values()
    x, numbers = np.asarray(x, np.float64), numbers_of(*weight)
    return x @ numbers, np.abs(x) @ np.abs(numbers)
