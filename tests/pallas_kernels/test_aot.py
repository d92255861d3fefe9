"""Compiling for GPUs that are not there: the tool itself.

`make aot` installs the compiler in an environment of its own and runs all of them.
"""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from needs import needs_compiler
from places import ROOT

from pallas_kernels import aot
from pallas_kernels.aot import Kernel, compile_on, gpu_mesh, read_ptxas
from pallas_kernels.gpus import GPUS


@pytest.mark.parametrize(
    ("package", "sentence"),
    [
        (None, r"install it with `make aot` in a checkout"),
        (object(), r"is cuda; set JAX_PLATFORMS=cpu"),
    ],
)
def test_what_is_missing_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, package: object, sentence: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    monkeypatch.setattr(aot, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="cuda")))
    with pytest.raises(aot.AotUnavailableError, match=sentence):
        gpu_mesh("h200")


def test_an_unknown_gpu_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="GPU 'h20' is not known; use one of h100, h200"):
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
    memory = compiled.memory
    assert memory.argument_size_in_bytes == (256 * 512 + 512 * 512) * 2
    assert memory.output_size_in_bytes == memory.alias_size_in_bytes == 256 * 512 * 2
    assert "HloModule jit_step" in compiled.hlo
    assert "kCustomKernel" in compiled.thunks
    assert compiled.kernels == ()


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
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert finished.stderr == ""
