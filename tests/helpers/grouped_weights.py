"""Random arguments of grouped products, and what they are in float64."""

from typing import Any, NamedTuple

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
    random = np.random.default_rng([case.rows, case.inputs, case.outputs])
    half = 128 if case.codes == "int8" else 8
    groups = case.inputs // case.group, case.outputs
    scale = random.uniform(0.5, 1, groups) / half
    minimum = random.normal(size=groups) / 4 - 1
    codes = random.integers(-half, half, (case.inputs, case.outputs))
    return {
        "x": jnp.asarray(random.normal(size=(case.rows, case.inputs)), case.dtype),
        "codes": jnp.asarray(codes).astype(case.codes),
        "scale": jnp.asarray(scale, case.scales),
        "minimum": jnp.asarray(minimum, case.minima or case.scales) if case.minimum else None,
    }


def expected_output(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The products in float64, and those of all numbers without their signs."""
    x, codes, scale, minimum = (
        None if array is None else np.asarray(array, np.float64) for array in inputs.values()
    )
    assert x is not None
    assert codes is not None
    assert scale is not None
    lowest = {"int4": -8, "int8": -128}[str(inputs["codes"].dtype)]
    group = len(codes) // len(scale)
    numbers = np.empty(codes.shape)
    for row, of_outputs in enumerate(codes):
        own = scale[row // group]
        numbers[row] = own * of_outputs
        if minimum is not None:
            numbers[row] = minimum[row // group] + own * (of_outputs - lowest)
    return x @ numbers, np.abs(x) @ np.abs(numbers)
