"""The bound of the filters: the specification, and the kernel in the interpreter and compiled."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_kernels import races_found, watched_interpreter
from needs import needs_compiler, needs_hopper

from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.lowest_kept import lowest_kept
from pallas_kernels.lowest_kept.mosaic_gpu import mosaic_gpu
from pallas_kernels.lowest_kept.plan import AHEAD, BLOCK

NONE = {"unit": 1.0, "top_k": np.inf, "top_p": np.inf, "min_p": 0.0}
# Each is a row of a batch.
ROWS = [
    NONE | {"top_k": 1},
    NONE | {"top_k": 40, "unit": 0.3},
    NONE | {"top_p": 0.9},
    NONE | {"top_p": 1.2e-38, "unit": 1.7},
    NONE | {"min_p": 0.05, "unit": 0.7},
    NONE | {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "unit": 1.3},
    NONE | {"top_k": 550},
]


def random_inputs(V: int, rows: int = 2) -> dict[str, Any]:
    """Scores of both signs; many that tie, zeros of both signs, and more that are minus infinity.

    In the last row of the batch all that are kept are not enough for its top-k.
    """
    random = np.random.default_rng(0)
    logits = 4 * random.normal(size=(len(ROWS), rows, V)).astype(np.float32)
    logits[..., ::3] = np.round(logits[..., ::3])
    logits[..., 5::7] = -0.0
    logits[..., 3::11] = -np.inf
    logits[-1, :, 500:] = -np.inf
    bounds = {name: np.asarray([row[name] for row in ROWS], np.float32) for name in NONE}
    return {"logits": jnp.asarray(logits), **{name: jnp.asarray(bounds[name]) for name in bounds}}


def lowest_by_sorting(
    logits: np.ndarray, unit: float, top_k: float, top_p: float, min_p: float
) -> np.ndarray:
    """The bound of one row, in float64."""
    scaled = (logits / np.float32(unit)).astype(np.float64)
    order = np.argsort(-scaled, kind="stable")
    bound = -np.inf if np.isinf(top_k) else scaled[order[int(top_k) - 1]]
    weights = np.where(scaled >= bound, np.exp(scaled - scaled.max()), 0)
    above = np.concatenate([[0], np.cumsum(weights[order])[:-1]]) / weights.sum()
    if np.isfinite(top_p):
        bound = max(bound, scaled[order[np.flatnonzero(above < top_p)[-1]]])
    with np.errstate(divide="ignore"):
        bound = max(bound, scaled.max() + np.log(np.float64(min_p)))
    return logits[scaled >= bound].min()


def expected_output(inputs: dict[str, Any]) -> np.ndarray:
    logits = np.asarray(inputs["logits"])
    return np.array(
        [
            [lowest_by_sorting(row, **bounds) for row in rows]
            for rows, bounds in zip(logits, ROWS, strict=False)
        ]
    )


@pytest.mark.parametrize("V", [600, 2048, 4001])
def test_the_specification_is_what_sorting_finds(V: int) -> None:
    inputs = random_inputs(V)
    np.testing.assert_array_equal(lowest_kept(**inputs), expected_output(inputs))


# A block and one that is filled up, where rows begin at no whole vectors; a block; many, and one
# that is filled up.
@pytest.mark.parametrize(
    "V", [BLOCK + 1, *(pytest.param(V, marks=pytest.mark.long) for V in (BLOCK, AHEAD * BLOCK + 4))]
)
def test_the_kernel_finds_what_the_specification_does(V: int) -> None:
    inputs = random_inputs(V, rows=1)
    with watched_interpreter(cores=1):
        kernel = partial(lowest_kept, implementation="mosaic_gpu_interpret")
        output = np.asarray(jax.jit(kernel)(**inputs))
        assert not races_found()
    np.testing.assert_array_equal(output, lowest_kept(**inputs, implementation="reference"))


@needs_compiler
@pytest.mark.parametrize("V", [32000, 128256, 50257])
def test_the_assembler_spills_no_register(V: int) -> None:
    inputs = jax.eval_shape(lambda: random_inputs(V))
    [kernel] = compile_on(gpu_mesh("h200"), jax.jit(mosaic_gpu), **inputs).kernels
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.registers <= 168


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("logits", (3, 7), r"logits has shape \(3, 7\), not 3 axes\."),
        ("top_p", (2,), r"top_p has shape \(2,\), but logits \(7, 2, 600\) need \(7,\)\."),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    inputs: dict[str, Any] = random_inputs(600) | {name: jnp.ones(shape)}
    with pytest.raises(ValueError, match=message):
        lowest_kept(**inputs)


def test_a_row_shorter_than_a_block_is_not_the_kernels() -> None:
    with (
        watched_interpreter(cores=1),
        pytest.raises(NotImplementedError, match="needs 2048 tokens or more, but there are 600"),
    ):
        lowest_kept(**random_inputs(600), implementation="mosaic_gpu_interpret")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("V", [2049, 32000, 128256])
def test_the_gpu_finds_what_the_specification_does(V: int) -> None:
    inputs = random_inputs(V)
    output = jax.jit(partial(lowest_kept, implementation="mosaic_gpu"))(**inputs)
    np.testing.assert_array_equal(output, expected_output(inputs))
