"""Compiling for GPUs that are not there: the tool, and what it says of the whole decode loop.

pip install redrafter-jax[aot] && JAX_PLATFORMS=cpu python -m pytest tests/test_aot.py
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from eval.abstract import abstract_drafter, abstract_state, abstract_target, bytes_of
from eval.config import PlanSettings
from pallas_kernels import aot
from pallas_kernels.aot import Compilation, Kernel, compile_on, gpu_mesh, read_ptxas
from pallas_kernels.gpus import GPUS
from redrafter_jax.command_line import load_settings
from redrafter_jax.decode import decode
from redrafter_jax.drafter import Drafter
from redrafter_jax.target import Target
from redrafter_jax.types import DecodeState

CONFIGS = Path(__file__).parents[1] / "configs"
UNAVAILABLE = aot.why_unavailable()
needs_compiler = pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")


def test_missing_packages_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(aot.AotUnavailableError, match=r"`pip install redrafter-jax\[aot\]`"):
        gpu_mesh("h200")


def test_another_platform_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(aot, "jax", FakeJax)
    with pytest.raises(aot.AotUnavailableError, match=r"is 'cuda'; .* needs JAX_PLATFORMS=cpu"):
        gpu_mesh("h200")


class FakeJax:
    class config:  # noqa: N801 - the name is JAX's
        jax_platforms = "cuda"


def test_an_unknown_gpu_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="GPU 'h20' is not known; the known ones are h100, h200"):
        gpu_mesh("h20")


def test_ptxas_reports_are_read() -> None:
    said = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 136 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""
    assert read_ptxas(said) == (Kernel("first", 136, 0, 0), Kernel("second", 255, 20, 16))


@needs_compiler
@pytest.mark.parametrize("gpu", GPUS)
def test_a_function_is_compiled_for_every_gpu(gpu: str) -> None:
    @partial(jax.jit, donate_argnums=0)
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(x) @ w

    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    compiled = compile_on(gpu_mesh(gpu), step, x, w)
    assert compiled.memory.arguments == (256 * 512 + 512 * 512) * 2
    assert compiled.memory.outputs == compiled.memory.aliased == 256 * 512 * 2
    assert "HloModule jit_step" in compiled.hlo
    assert "kCustomKernel" in compiled.thunks
    assert compiled.kernels == ()


@needs_compiler
def test_eight_devices_share_the_work() -> None:
    mesh = gpu_mesh("h200", (2, 4), ("data", "model"))

    def over(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    x, w = over((1024, 2048), "data", "model"), over((2048, 512), "model")
    compiled = compile_on(mesh, jax.jit(jnp.matmul), x, w)
    assert compiled.memory.arguments == (512 * 512 + 512 * 512) * 2
    assert "all-reduce" in compiled.hlo


@jax.jit
def doubled(x: jax.Array) -> jax.Array:
    print("traced")  # noqa: T201 - what a function prints must come through

    @partial(
        plgpu.kernel,
        out_type=jax.ShapeDtypeStruct((128, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((128, 128), jnp.float32)],
        grid=(1,),
        grid_names=("i",),
    )
    def double(x_ref: Any, out_ref: Any, tile: Any) -> None:
        tile[...] = x_ref[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return double(x)


@needs_compiler
def test_registers_and_spills_of_mosaic_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    for _ in range(2):  # the second time it comes from JAX's caches
        compiled = compile_on(gpu_mesh("h200"), doubled, x)
        (kernel,) = compiled.kernels
        assert "double" in kernel.name
        assert 0 < kernel.registers <= 255
        assert kernel.spill_stores == kernel.spill_loads == 0
    said = capfd.readouterr().out
    assert "ptxas" not in said
    assert "traced" in said
    assert "MOSAIC_GPU_DUMP_PTXAS" not in os.environ


@needs_compiler
def test_command_lines_do_not_tell_of_missing_cuda() -> None:
    code = "import jax; from redrafter_jax.command_line import run; run(lambda: jax.devices())"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=CONFIGS.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert finished.stderr == ""


class Step(NamedTuple):
    """A decode loop, and what it was compiled for."""

    target: Target
    drafter: Drafter | None
    state: DecodeState
    compiled: Compilation


def compile_step(config: str, batch_size: int, *, speculative: bool = True) -> Step:
    """The decode loop of a configuration for an H200: bfloat16, 4096 cache slots."""
    settings = load_settings(PlanSettings, CONFIGS / config)
    draft = settings.draft.build() if speculative else None
    target = abstract_target(settings.target.build(), jnp.bfloat16)
    drafter = abstract_drafter(settings.drafter_config(), jnp.bfloat16) if speculative else None
    state = abstract_state(target, batch_size, 4096, draft.max_path if draft else 1)
    loop = jax.jit(partial(decode, draft=draft), donate_argnums=2)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_on(gpu_mesh("h200"), loop, target, drafter, state, steps)
    return Step(target, drafter, state, compiled)


STEPS: dict[str, Callable[[], Step]] = {
    f"{name}, {kind}, B={batch}": partial(
        compile_step, f"plan_{name}.yaml", batch, speculative=kind == "speculative"
    )
    for name in ("vicuna_7b", "llama_3_1_8b")
    for kind, batch in (("speculative", 1), ("speculative", 8), ("plain", 1))
}


@pytest.fixture(scope="module", params=STEPS)
def step(request: pytest.FixtureRequest) -> Step:
    return STEPS[request.param]()


@needs_compiler
def test_the_whole_state_is_updated_in_place(step: Step) -> None:
    memory = step.compiled.memory
    state = bytes_of(step.state)
    # The cache, the token buffer, the context and every counter: all that is donated.
    assert memory.aliased == state > bytes_of(step.state.cache)
    # The table of addresses of the results is all that is new.
    assert memory.outputs - memory.aliased < 1024
    assert memory.arguments == state + bytes_of((step.target, step.drafter)) + 4


@needs_compiler
def test_temporaries_are_small(step: Step) -> None:
    assert step.compiled.memory.temporaries < 0.05 * bytes_of(step.target)


@needs_compiler
def test_no_weight_and_no_cache_is_copied_or_transposed(step: Step) -> None:
    arrays = jax.tree.leaves((step.target, step.drafter, step.state.cache))
    large = {leaf.size for leaf in arrays if leaf.ndim > 1}
    assert not large & moved_sizes(step.compiled.hlo)


@needs_compiler
def test_a_transposed_cache_would_be_seen() -> None:
    cache = jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.bfloat16)
    compiled = compile_on(gpu_mesh("h200"), jax.jit(lambda x: x.swapaxes(1, 2)), cache)
    assert cache.size in moved_sizes(compiled.hlo)


@needs_compiler
def test_kernels_are_launched_from_command_buffers(step: Step) -> None:
    launched = thunks_in_loop(step.compiled.thunks)
    # What may stay outside: the loop over the rounds and the conditions of the two loops. A
    # conditional outside would bring its predicate to the host.
    outside = [thunk.kind for thunk in launched if not thunk.in_command_buffer]
    rounds = int(step.drafter is not None)
    assert outside.count("kWhile") == rounds
    assert outside.count("kCustomKernel") <= 2 + rounds
    assert set(outside) <= {"kWhile", "kCustomKernel", "kCommandBuffer"}
    assert sum(thunk.in_command_buffer for thunk in launched) > 100


@needs_compiler
def test_nothing_goes_to_the_host_inside_the_loop(step: Step) -> None:
    on_device = {
        "kAsyncDone",
        "kAsyncStart",
        "kCommandBuffer",
        "kConditional",
        "kCopy",
        "kCustomCall",
        "kCustomKernel",
        "kDynamicSliceFusion",
        "kWhile",
    }
    assert {thunk.kind for thunk in thunks_in_loop(step.compiled.thunks)} <= on_device
    assert not re.search(r" (infeed|outfeed|send|recv)\(", step.compiled.hlo)
    assert "S(5)" not in step.compiled.hlo, "host memory"
    targets = set(re.findall(r'custom_call_target="([^"]*)"', step.compiled.hlo))
    assert targets <= {"__gpu$TopK", "mosaic_gpu_v2"}


def moved_sizes(hlo: str) -> set[int]:
    """Elements of every array that a copy or a transposition makes, within fusions too."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|transpose|copy-start)\(", hlo)
    return {prod(int(length) for length in shape.split(",") if length) for shape in shapes}


class Thunk(NamedTuple):
    kind: str
    in_command_buffer: bool


def thunks_in_loop(text: str) -> list[Thunk]:
    """All that the outermost loop launches, its condition first."""
    above: list[tuple[int, str]] = []
    found = []
    for line in text.splitlines():
        match = re.match(r"( *)\d+: (k\w+)", line)
        if match is None:
            continue
        indent, kind = len(match[1]), match[2]
        above = [(depth, name) for depth, name in above if depth < indent]
        if above:
            found.append(Thunk(kind, any(name == "kCommandBuffer" for _, name in above)))
        above.append((indent, kind))
    return found
