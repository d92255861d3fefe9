"""The Mosaic GPU kernel: in the interpreter with race detection, and lowered for real shapes."""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from attention_arrays import Case, expected_output, newest, paged, random_inputs
from mosaic_kernels import Device, fenced, races_found, watched_interpreter
from needs import needs_compiler, needs_hopper

from pallas_kernels import dispatch
from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.merge import ROW, merge, merge_rows
from pallas_kernels.tree_attention.mosaic_gpu import mosaic_gpu
from pallas_kernels.tree_attention.plan import make_plan


def long(*case: Any) -> Any:
    """A case that takes seconds in the interpreter."""
    return pytest.param(*case, marks=pytest.mark.long)


LLAMA = Case((4096,), 32, 4, 4096, head_dim=128, heads=8)
VICUNA = Case((4096,), 32, 1, 4096, head_dim=128, heads=32)

CASES = {
    "one node, four splits": Case((0, 1, 64, 256), 1, 8, 256),
    "one node, one program, the ring goes round": Case((700,), 1, 4, 704, 128, cores=1),
    "two ways, a last page in part": Case((0, 80, 64, 13), 7, 2, 80),
    "three tiles share the reads": Case((65,), 33, 4, 128),
    "two groups of tiles": Case((100,), 33, 8, 128, heads=2),
    "a full tile of nodes": Case((64, 1), 64, 1, 128, 128),
    "two blocks of nodes": Case((130,), 70, 1, 200, dtype=jnp.float16),
    "four blocks of nodes, an empty cache": Case((0,), 256, 1, 64),
}
# The case of `make test`.
SHORT = "two ways, a last page in part"

interpreted = partial(tree_attention, implementation="mosaic_gpu_interpret")


@pytest.mark.parametrize("name", [SHORT, *(long(name) for name in CASES if name != SHORT)])
def test_equals_attention_in_float64_without_races(name: str) -> None:
    case = CASES[name]
    inputs = random_inputs(case)
    scale = case.head_dim**-0.5
    expected = expected_output(inputs, scale)
    with watched_interpreter(case.cores):
        output = np.asarray(jax.jit(partial(interpreted, scale=scale))(**paged(inputs)))
        assert not races_found()
    assert output.dtype == case.dtype
    error = np.linalg.norm(output.astype(np.float64) - expected, axis=-1)
    assert (error < 1e-2 * np.linalg.norm(expected, axis=-1)).all()


@pytest.mark.parametrize(
    ("name", "attending"),
    [
        ("two ways, a last page in part", 3),
        long("two blocks of nodes", 5),
        long("four blocks of nodes, an empty cache", 70),
    ],
)
def test_the_newest_nodes_of_a_tree_attend_alone(name: str, attending: int) -> None:
    case = CASES[name]
    inputs = random_inputs(case)
    scale = case.head_dim**-0.5
    expected = expected_output(inputs, scale)[:, -attending:]
    with watched_interpreter(case.cores):
        attend = jax.jit(partial(interpreted, scale=scale))
        output = np.asarray(attend(**newest(paged(inputs), attending)))
        assert not races_found()
    error = np.linalg.norm(output.astype(np.float64) - expected, axis=-1)
    assert (error < 1e-2 * np.linalg.norm(expected, axis=-1)).all()


def test_the_kernel_merges_what_the_specification_does() -> None:
    """Three splits, of which one has seen nothing; three nodes and padding, two query heads."""
    N, G, rows = 3, 2, 16
    random = np.random.default_rng(0)
    output = random.normal(size=(3, 1, 2, rows, ROW)).astype(np.float32)
    maximum, total = (random.uniform(1, 9, (3, 1, 2, 64)).astype(np.float32) for _ in range(2))
    output[1], total[1], maximum[1] = 0, 0, np.finfo(np.float32).min
    output, maximum, total = (jnp.asarray(part) for part in (output, maximum, total))
    with watched_interpreter(cores=1):
        merged = np.asarray(merge(output, maximum, total, N, G, jnp.float32, interpret=True))
        assert not races_found()
    expected = merge_rows(output, maximum[..., :rows], total[..., :rows])
    by_node = expected.reshape(1, 2, G, 8, ROW)[:, :, :, :N].transpose(0, 3, 1, 2, 4)
    np.testing.assert_allclose(merged, by_node.reshape(1, N, 2 * G, ROW), rtol=1e-5, atol=1e-6)


def test_the_interpreter_finds_the_races_of_a_kernel_that_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    with watched_interpreter(cores=1):
        inputs = random_inputs(Case((8,), 1, 1, 64))
        jax.block_until_ready(jax.jit(partial(interpreted, scale=0.1))(**paged(inputs)))
        assert races_found()


LOWERED = {
    "Llama-3.1-8B, one node": LLAMA._replace(nodes=1),
    "Llama-3.1-8B, 256 nodes": LLAMA._replace(nodes=256),
    "Vicuna-7B, 64 nodes": VICUNA._replace(nodes=64, slots=8200),
}
# What comes right after the fence that orders it behind the stores to shared memory.
FENCED = {
    "the copier arrives after clearing": "mbarrier.arrive.",
    "the output is copied out": "global.shared",
}


def fenced_of(name: str) -> list[str]:
    inputs = jax.eval_shape(lambda: paged(random_inputs(LOWERED[name])))
    return fenced(partial(mosaic_gpu, scale=0.1), inputs, FENCED)


@pytest.mark.parametrize("name", LOWERED)
def test_lowered_for_cuda_each_path_has_its_fence(name: str) -> None:
    assert fenced_of(name) == list(FENCED)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "all bfloat16 or all float16, but are float32"),
        ({"k_cache": jnp.zeros((1, 1, 64, 64), jnp.float16)}, "but are bfloat16 and float16"),
        ({"head_dim": 96}, "64 or 128, but is 96"),
        ({"window": 8}, "but the window is 8 positions"),
    ],
)
def test_what_it_does_not_take_is_refused_with_the_reason(
    change: dict[str, Any], reason: str
) -> None:
    shape = {name: value for name, value in change.items() if name in Case._fields}
    inputs = paged(random_inputs(Case((1,), 2, 2, 64)._replace(**shape)))
    inputs |= {name: value for name, value in change.items() if name not in Case._fields}
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu_interpret' .*{reason}; use"):
        tree_attention(**inputs, scale=1.0, implementation="mosaic_gpu_interpret")


@needs_compiler
@pytest.mark.parametrize(("slots", "dtype"), [(1024, jnp.float16), (4096, jnp.bfloat16)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("nodes", [1, 32, 70, 256])
def test_the_assembler_gives_the_registers_planned_and_spills_none(
    nodes: int, group: int, head_dim: int, slots: int, dtype: Any
) -> None:
    case = Case((slots,), nodes, group, slots, head_dim, 2, dtype)
    inputs = jax.eval_shape(lambda: paged(random_inputs(case)))
    kernels = compile_on(
        gpu_mesh("h200"), jax.jit(partial(mosaic_gpu, scale=0.1)), **inputs
    ).kernels
    assert all(kernel.spill_stores == kernel.spill_loads == 0 for kernel in kernels)
    [kernel] = [kernel for kernel in kernels if "tree_attention" in kernel.name]
    # XLA merges the splits of heads that are not as wide as a program of the merging kernel.
    assert len(kernels) == 1 + (head_dim == ROW)
    plan = make_plan(1, nodes, nodes, 2 * group, 2, slots, head_dim, 132)
    # One warpgroup that copies beside two or three that compute share 65536 registers, and each
    # thread starts with as many.
    assert kernel.registers == {2: 168, 3: 128}[plan.warpgroups]


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        (Device(), True),
        (Device("gpu", "NVIDIA H100 80GB HBM3", 132, "9.0"), True),
        (Device(device_kind="NVIDIA GH200 480GB"), True),
        (Device("cpu", "cpu"), False),
        (Device("gpu", "NVIDIA RTX 2000 Ada Generation", 22), False),
    ],
)
def test_hoppers_take_the_kernel(device: Device, kernel: bool) -> None:
    assert (dispatch.why_not_hopper(device) is None) == kernel


def test_none_is_the_kernel_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "current_device", Device)
    attend = jax.jit(partial(tree_attention, scale=0.1))
    lowered = attend.trace(**paged(random_inputs(Case((1,), 2, 2, 64)))).lower
    assert "mosaic_gpu" in lowered(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in lowered(lowering_platforms=("cpu",)).as_text()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="is about machines without a Hopper")
def test_the_kernel_cannot_run_without_a_hopper() -> None:
    inputs = paged(random_inputs(Case((1,), 2, 2, 64)))
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' cannot run here: it needs a Hopp"):
        tree_attention(**inputs, scale=1.0, implementation="mosaic_gpu")


def test_too_few_threads_for_the_interpreter_are_no_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NPROC", "2")
    inputs = paged(random_inputs(Case((1,), 1, 1, 64)))
    with pytest.raises(NotImplementedError, match="not 2; use"):
        tree_attention(**inputs, scale=0.1, implementation="mosaic_gpu_interpret")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("nodes", "attending"), [(5, 4), (41, 10), (61, 1), (131, 10), (256, 70)])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gpu_takes_the_newest_nodes_alone(
    head_dim: int, group: int, nodes: int, attending: int
) -> None:
    case = Case((0, 1, 64, 777, 2080), nodes, group, 2080, head_dim, heads=2)
    inputs = random_inputs(case)
    attend = jax.jit(partial(tree_attention, scale=head_dim**-0.5, implementation="mosaic_gpu"))
    expected = expected_output(inputs, head_dim**-0.5)[:, -attending:]
    output = np.asarray(attend(**newest(paged(inputs), attending)), np.float64)
    error = np.linalg.norm(output - expected, axis=-1)
    assert (error < 1e-2 * np.linalg.norm(expected, axis=-1)).all()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("nodes", [1, 7, 33, 64, 70, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gpu_computes_what_the_specification_says(
    head_dim: int, group: int, nodes: int, dtype: Any
) -> None:
    case = Case((0, 1, 64, 777, 2080), nodes, group, 2080, head_dim, heads=2, dtype=dtype)
    inputs = random_inputs(case)
    attend = jax.jit(partial(tree_attention, scale=head_dim**-0.5, implementation="mosaic_gpu"))
    expected = expected_output(inputs, head_dim**-0.5)
    error = np.linalg.norm(np.asarray(attend(**paged(inputs)), np.float64) - expected, axis=-1)
    assert (error < 1e-2 * np.linalg.norm(expected, axis=-1)).all()
