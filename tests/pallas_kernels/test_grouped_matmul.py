"""Grouped products: the reference, and what is refused.

test_grouped_matmul_mosaic.py: the kernel.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.fuser  # its import, by the first kernel, would empty jit's caches
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_weights import Case, expected_output, random_inputs

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.reference import _padded_product, _scaled_product
from redrafter_jax.models.linear import linear, quantize

CASE = Case(3, 64, 32, group=32, dtype=jnp.float32)


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        CASE._replace(rows=1, group=64, codes="int8", minimum=False, scales=np.float32),
        CASE._replace(group=16, codes="int8", scales=np.float16),
        CASE._replace(minimum=False, dtype=jnp.bfloat16),
        CASE._replace(dtype=jnp.bfloat16),
    ],
)
def test_equals_the_product_of_the_numbers(case: Case) -> None:
    inputs = random_inputs(case)
    output = jax.jit(partial(grouped_matmul, implementation="reference"))(**inputs)
    assert output.dtype == jnp.float32
    expected, sizes = expected_output(inputs)
    # The codes are exact in bfloat16: nothing is rounded on the way to float32.
    assert (np.abs(output - expected) / sizes).max() < 1e-6


def test_a_padded_product_for_few_rows_is_the_same() -> None:
    """What other devices than CPUs run for the reference, here on one."""
    inputs = random_inputs(CASE)
    arrays = inputs["x"], inputs["codes"], inputs["scale"].astype(jnp.float32)
    np.testing.assert_allclose(
        _padded_product(*arrays), _scaled_product(*arrays), rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("x", (64,), "x has shape (64,), not 2 axes."),
        ("x", (3, 32), "x (3, 32) and scale (2, 32) do not fit codes (64, 32)"),
        ("scale", (2, 16), "scale (2, 16) do not fit codes (64, 32)"),
        ("scale", (3, 32), "3 groups do not divide 64 inputs."),
        ("minimum", (1, 32), "minimum has shape (1, 32), but scale has (2, 32)."),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    inputs = random_inputs(CASE)
    inputs[name] = jnp.zeros(shape, inputs[name].dtype)
    with pytest.raises(ValueError, match=f"^grouped_matmul: .*{re.escape(words)}"):
        grouped_matmul(**inputs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "its rows must be bfloat16, but are float32"),
        ({"codes": "float8_e4m3fn", "minimum": False}, "int4 or int8, but are float8_e4m3fn"),
        ({"rows": 0}, "it needs a row or more"),
        ({"inputs": 256, "group": 256}, "16, 32, 64 or 128 inputs, but have 256"),
        ({"outputs": 48}, "a multiple of 32 outputs in int4, but has 48"),
        ({"outputs": 24, "codes": "int8"}, "a multiple of 16 outputs in int8, but has 24"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_the_reason(
    change: dict[str, object], reason: str
) -> None:
    case = CASE._replace(dtype=jnp.bfloat16)._replace(**change)
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu_interpret' .*{reason}; use"):
        grouped_matmul(**random_inputs(case), implementation="mosaic_gpu_interpret")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA for CPUs")
@pytest.mark.parametrize(("form", "wider"), [("int8", 0), ("int4", 1), ("fp8", 2)])
def test_a_cpu_holds_one_weight_in_the_dtype_of_the_inputs(form: Any, wider: int) -> None:
    """Besides the codes in `wider` bytes each, where their own dtype is slow to convert."""
    size, layers = 128, 8
    numbers = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    weights = [quantize(jnp.asarray(numbers), form)] * layers

    def through(x: Any, weights: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(linear(x, weight))
        return x

    memory = jax.jit(through).lower(jnp.ones((1, size)), weights).compile().memory_analysis()
    whole = size * size
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * 4 * whole + layers * wider * whole
