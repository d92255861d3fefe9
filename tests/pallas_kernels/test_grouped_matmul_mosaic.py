"""The Mosaic GPU kernel: in the interpreter with race detection, and compiled for real shapes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_weights import Case, expected_output, random_inputs
from jax.sharding import PartitionSpec
from mosaic_kernels import Device, fenced, races_found, watched_interpreter
from needs import needs_compiler, needs_hopper

from pallas_kernels import dispatch
from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu import mosaic_gpu
from pallas_kernels.grouped_matmul.plan import make_plan


def long(name: str) -> Any:
    """A case that takes seconds in the interpreter."""
    return pytest.param(name, marks=pytest.mark.long)


CASES = {
    "a half-filled block and program": Case(3, 64, 96, 64),
    "a ring that goes round": Case(9, 1152, 32, cores=1),
    "splits, the last with fewer steps": Case(1, 1152, 32),
    "two tiles of rows, two columns of programs": Case(70, 128, 160, 32),
    "GPTQ": Case(5, 128, 32, scales=jnp.float16, minima=jnp.float32),
    "Q8_0": Case(8, 160, 48, 32, "int8", minimum=False, scales=jnp.float16),
    "groups of 16": Case(17, 128, 32, 16, "int8", scales=np.float32),
}
SHORT = "a half-filled block and program"

interpreted = partial(grouped_matmul, implementation="mosaic_gpu_interpret")


@pytest.mark.parametrize("name", [SHORT, *(long(name) for name in CASES if name != SHORT)])
def test_equals_the_product_in_float64_without_races(name: str) -> None:
    inputs = random_inputs(CASES[name])
    with watched_interpreter(CASES[name].cores):
        output = np.asarray(jax.jit(interpreted)(**inputs), np.float64)
        assert not races_found()
    expected, sizes = expected_output(inputs)
    assert (np.abs(output - expected) / sizes).max() < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("case", [Case(70, 256, 32, 64), Case(70, 1152, 32)], ids=str)
def test_a_row_has_the_same_bits_whatever_the_others_are(case: Case) -> None:
    """One row alone, in a batch, and beside rows without a number; tiles of 8, 16 and 40 rows.

    NumPy, which multiplies in the interpreter, sums a group in an order of its own. So rows are
    whole numbers, whose products with the codes of a group have one sum, and scales are not.
    """
    inputs = random_inputs(case)
    inputs["x"] = jnp.round(4 * inputs["x"])
    multiply = jax.jit(interpreted)
    with watched_interpreter(case.cores):
        of_all = np.asarray(multiply(**inputs))
        for first, last in ((4, 5), (0, 9)):
            few = inputs | {"x": inputs["x"][first:last]}
            np.testing.assert_array_equal(multiply(**few), of_all[first:last])
        spoiled = inputs["x"].at[::2].set(np.nan)
        output = np.asarray(multiply(**inputs | {"x": spoiled}))
        np.testing.assert_array_equal(output[1::2], of_all[1::2])
        assert np.isnan(output[::2]).all()


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 1024), (4096, 14336), (576, 192)])
def test_splits_do_not_depend_on_the_rows(inputs: int, outputs: int) -> None:
    plans = [make_plan(N, inputs, outputs, 4, 64, True, 132) for N in (1, 8, 33, 64, 65, 2048)]
    assert len({(plan.splits, plan.steps) for plan in plans}) == 1
    assert all(plan.rows <= 64 and plan.stages >= 4 for plan in plans)


# What comes right after the fence that orders it behind the use of shared memory.
FENCED = {"a slot is given back": "mbarrier.arrive.", "the output is copied out": "global.shared"}


def fenced_of(name: str) -> list[str]:
    inputs = jax.eval_shape(lambda: random_inputs(COMPILED[name]))
    return fenced(partial(mosaic_gpu, cores=132), inputs, FENCED)


def test_lowered_for_cuda_each_path_has_its_fence() -> None:
    assert fenced_of("Llama's down, 64 rows") == list(FENCED)


COMPILED = {
    "Llama's gate, one row": Case(1, 4096, 14336),
    "Llama's gate, a tree": Case(24, 4096, 14336),
    "Llama's down, 64 rows": Case(64, 14336, 4096),
    "Llama's keys, 200 rows": Case(200, 4096, 1024),
    "GPTQ": Case(24, 4096, 4096, scales=jnp.float16, minima=jnp.float32),
    "SmolLM2's keys": Case(7, 576, 192, 64),
    "SmolLM2's down": Case(33, 1536, 576),
    "Q4_0": Case(64, 4096, 4096, 32, minimum=False, scales=jnp.float16),
    "Q4_1": Case(64, 4096, 4096, 32, scales=jnp.float16),
    "Q8_0": Case(64, 4096, 4096, 32, "int8", minimum=False, scales=jnp.float16),
    "Q6_K": Case(64, 4096, 4096, 16, "int8", minimum=False, scales=jnp.float16),
}


@needs_compiler
@pytest.mark.parametrize("name", COMPILED)
def test_the_assembler_spills_no_registers_and_nothing_large_is_written(name: str) -> None:
    case = COMPILED[name]
    inputs = jax.eval_shape(lambda: random_inputs(case))
    compiled = compile_on(gpu_mesh("h200"), jax.jit(grouped_matmul), **inputs)
    [kernel] = compiled.kernels
    assert "grouped_matmul" in kernel.name
    assert kernel.spill_stores == kernel.spill_loads == 0
    # One warpgroup that copies beside two that compute share 65536 registers, and each thread
    # starts with as many.
    assert kernel.registers == 168
    # Parts of the output for each split, and padded rows with their sums.
    plan = make_plan(
        case.rows, case.inputs, case.outputs, int(case.codes[3:]), case.group, case.minimum, 132
    )
    parts = plan.splits * plan.padded_rows * case.outputs * 4
    assert compiled.memory.temp_size_in_bytes <= 1.1 * parts + 4 * plan.padded_rows * case.inputs


@needs_compiler
@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_on_eight_gpus_each_multiplies_by_its_own_part(split: str) -> None:
    mesh = gpu_mesh("h200", (8,), ("model",))
    of_weight = PartitionSpec(None, "model") if split == "outputs" else PartitionSpec("model")
    of_x = PartitionSpec() if split == "outputs" else PartitionSpec(None, "model")

    def multiply(x: Any, codes: Any, scale: Any, minimum: Any) -> Any:
        product = grouped_matmul(x, codes, scale, minimum)
        return product if split == "outputs" else jax.lax.psum(product, "model")

    sharded = jax.shard_map(
        multiply,
        mesh=mesh,
        in_specs=(of_x, *3 * [of_weight]),
        out_specs=of_weight if split == "outputs" else PartitionSpec(),
        check_vma=False,
    )
    shapes = jax.eval_shape(lambda: random_inputs(COMPILED["Llama's gate, a tree"]))
    placed = (
        jax.ShapeDtypeStruct(
            shapes[name].shape, shapes[name].dtype, sharding=jax.NamedSharding(mesh, spec)
        )
        for name, spec in zip(
            ("x", "codes", "scale", "minimum"), (of_x, *3 * [of_weight]), strict=True
        )
    )
    compiled = compile_on(mesh, jax.jit(sharded), *placed)
    assert "mosaic_gpu" in compiled.hlo
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in compiled.hlo
    assert ("all-reduce" in compiled.hlo) == (split == "inputs")


def test_none_is_the_kernel_on_hopper_for_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "current_device", Device)

    def lowered(platform: str, **change: Any) -> str:
        inputs = random_inputs(Case(2, 128, 64)._replace(**change))
        traced = jax.jit(grouped_matmul).trace(**inputs)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "mosaic_gpu" in lowered("cuda")
    assert "mosaic_gpu" not in lowered("cpu")
    assert "mosaic_gpu" not in lowered("cuda", dtype=jnp.float32)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", COMPILED)
def test_the_gpu_computes_what_the_specification_says(name: str) -> None:
    inputs = random_inputs(COMPILED[name])
    multiply = jax.jit(partial(grouped_matmul, implementation="mosaic_gpu"))
    output = np.asarray(multiply(**inputs), np.float64)
    expected, sizes = expected_output(inputs)
    assert (np.abs(output - expected) / sizes).max() < 1e-6


@pytest.mark.gpu
@needs_hopper
def test_on_the_gpu_a_row_has_the_same_bits_whatever_the_others_are() -> None:
    inputs = random_inputs(Case(200, 4096, 1024))
    multiply = jax.jit(partial(grouped_matmul, implementation="mosaic_gpu"))
    of_all = np.asarray(multiply(**inputs))
    for rows in (1, 8, 9, 24, 64, 65):
        few = inputs | {"x": inputs["x"][:rows]}
        np.testing.assert_array_equal(multiply(**few), of_all[:rows])
