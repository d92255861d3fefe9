"""Residual sum and norm: the specification, and the kernel in the interpreter and compiled."""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_kernels import races_found, watched_interpreter
from needs import needs_compiler, needs_hopper

from pallas_kernels.add_norm import add_norm
from pallas_kernels.add_norm.mosaic_gpu import mosaic_gpu
from pallas_kernels.aot import compile_on, gpu_mesh

EPSILON = 1e-5
run = partial(add_norm, epsilon=EPSILON)


def random_inputs(
    rows: int = 2, D: int = 512, parts: int = 3, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """Rows of several sizes, for which epsilon matters and for which it does not."""
    random = np.random.default_rng(0)
    scales = np.logspace(-3, 1, rows)[:, None]
    shapes = {"x": (rows, D), "parts": (parts, rows, D)}
    arrays = {name: scales * random.normal(size=shape) for name, shape in shapes.items()}
    return {
        "x": jnp.asarray(arrays["x"], dtype),
        "parts": jnp.asarray(arrays["parts"], jnp.float32),
        "weight": jnp.asarray(random.normal(size=D), dtype),
    }


def expected_output(inputs: dict[str, Any], *, zero_centered: bool) -> tuple[Any, Any]:
    """In float64, rounded where a product, a sum and a norm in the dtype are."""
    x, parts, weight = (np.asarray(one, np.float64) for one in inputs.values())
    dtype = inputs["x"].dtype

    def rounded(numbers: np.ndarray) -> np.ndarray:
        return numbers.astype(dtype).astype(np.float64)

    added = rounded(x + rounded(parts.sum(axis=0)))
    scaled = added / np.sqrt((added**2).mean(axis=-1, keepdims=True) + EPSILON)
    normed = scaled * (1 + weight) if zero_centered else rounded(scaled) * weight
    return added, rounded(normed)


def assert_close(output: Any, expected: tuple[Any, Any]) -> None:
    """Within one rounding of bfloat16: sums in float32 may round to the other neighbour."""
    for one, right in zip(output, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), right, rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_specification_is_the_sum_and_its_norm(zero_centered: bool) -> None:
    inputs = random_inputs(rows=3, D=40)
    expected = expected_output(inputs, zero_centered=zero_centered)
    assert_close(run(**inputs, zero_centered=zero_centered), expected)


def run_kernel(inputs: dict[str, Any], **options: Any) -> tuple[Any, bool]:
    """The kernel's output in the interpreter, and whether its warpgroups raced."""
    with watched_interpreter(cores=1):
        kernel = partial(run, **options, implementation="mosaic_gpu_interpret")
        output = jax.tree.map(np.asarray, jax.jit(kernel)(**inputs))
        return output, races_found()


# Elements that a thread has side by side: one and two; a float16 row of many parts.
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"D": 512}, {}),
        ({"D": 1024, "rows": 3}, {"zero_centered": True}),
        ({"D": 512, "rows": 1, "parts": 8, "dtype": jnp.float16}, {}),
        ({"D": 512, "parts": 1}, {}),
    ],
    ids=str,
)
def test_the_kernel_computes_what_the_specification_does(
    shape: dict[str, Any], options: dict[str, Any]
) -> None:
    inputs = random_inputs(**shape)
    output, raced = run_kernel(inputs, **options)
    assert not raced
    assert_close(output, run(**inputs, **options, implementation="reference"))
    assert_close(output, expected_output(inputs, **{"zero_centered": False} | options))


def test_the_removal_of_its_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    _, raced = run_kernel(random_inputs())
    assert raced


def test_a_row_has_the_same_bits_beside_others() -> None:
    inputs = random_inputs(rows=3)
    together, _ = run_kernel(inputs)
    last = {"x": inputs["x"][2:], "parts": inputs["parts"][:, 2:], "weight": inputs["weight"]}
    alone, _ = run_kernel(last)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one[0], other[2])


@needs_compiler
@pytest.mark.parametrize(("rows", "D"), [(8, 4096), (32, 4096), (8, 8192), (8, 1536)])
def test_the_assembler_spills_no_register(rows: int, D: int) -> None:
    inputs = jax.eval_shape(lambda: random_inputs(rows, D, parts=8))
    function = jax.jit(partial(mosaic_gpu, epsilon=EPSILON))
    [kernel] = compile_on(gpu_mesh("h200"), function, **inputs).kernels
    assert kernel.spill_stores == kernel.spill_loads == 0
    # Of 65536, with 512 threads.
    assert kernel.registers <= 128


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("x", (2, 3, 512), r"x has shape \(2, 3, 512\), not 2 axes\."),
        ("parts", (3, 1, 512), r"parts has shape \(3, 1, 512\), but x \(2, 512\) needs \(3, 2, "),
        ("weight", (2,), r"weight has shape \(2,\), but x \(2, 512\) needs \(512,\)\."),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    inputs: dict[str, Any] = random_inputs() | {name: jnp.ones(shape)}
    with pytest.raises(ValueError, match=message):
        run(**inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (random_inputs(D=768), "its row size must be a multiple of 512, but is 768"),
        (random_inputs(dtype=jnp.float32), "both bfloat16 or both float16, but are float32 and"),
        (
            random_inputs() | {"parts": jnp.ones((3, 2, 512), jnp.bfloat16)},
            "its parts must be float32, but are bfloat16",
        ),
    ],
)
def test_what_the_kernel_cannot_take_is_named(inputs: dict[str, Any], message: str) -> None:
    with watched_interpreter(cores=1), pytest.raises(NotImplementedError, match=message):
        run(**inputs, implementation="mosaic_gpu_interpret")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_gpu_computes_what_the_specification_does(zero_centered: bool) -> None:
    inputs = random_inputs(32, 4096, parts=8)
    kernel = jax.jit(partial(run, zero_centered=zero_centered, implementation="mosaic_gpu"))
    assert_close(kernel(**inputs), expected_output(inputs, zero_centered=zero_centered))
