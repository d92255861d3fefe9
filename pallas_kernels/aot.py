"""Ahead-of-time compilation for a GPU that is not present, with the compiler's statistics.

    mesh = gpu_mesh("h200")                       # or ("h200", (2, 4), ("data", "model"))
    compiled = compile_on(mesh, jax.jit(f), x, y)
    compiled.memory.temp_size_in_bytes, compiled.hlo, compiled.kernels

This needs the packages of the extra `aot` and JAX on the CPU. Nothing is autotuned or run, so
matrix products may be tiled differently on a real card.
"""

import ctypes
import importlib.util
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.gpus import GPUS


class AotUnavailableError(RuntimeError):
    """The error for a process that cannot compile for an absent GPU; the message says why."""


class Kernel(NamedTuple):
    """Statistics of a Mosaic kernel from ptxas: registers per thread, and bytes of spills."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int


class Compilation(NamedTuple):
    """A compiled program."""

    memory: Any  # JAX's CompiledMemoryStats per device; its argument size counts donated ones too
    hlo: str  # the optimised HLO
    thunks: str  # the runtime's launches, one per line, nested: command buffers, kernels, copies
    kernels: tuple[Kernel, ...]  # the Mosaic kernels, without XLA's own


def why_unavailable() -> str | None:
    """The reason, as a sentence, why this process cannot compile for an absent GPU, or None."""
    try:
        plugin = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:
        plugin = None
    if plugin is None:
        return "The GPU compiler is not installed; install it with `make aot` in a checkout."
    if (platforms := jax.config.jax_platforms) == "cpu":
        return None
    return (
        f"JAX_PLATFORMS is {platforms or 'not set'}; set JAX_PLATFORMS=cpu in the environment to "
        "compile for an absent GPU."
    )


def gpu_mesh(gpu: str, shape: Sequence[int] = (1,), axes: Sequence[str] = ("device",)) -> Mesh:
    """Make a mesh of absent GPUs for `compile_on`; `gpu` is a key of `GPUS`.

    Raises:
      ValueError: the GPU is not known.
      AotUnavailableError: packages are missing, or JAX is not on the CPU.
    """
    if gpu not in GPUS:
        raise ValueError(f"GPU {gpu!r} is not known; use one of {', '.join(GPUS)}.")
    if reason := why_unavailable():
        raise AotUnavailableError(reason)
    topology = topologies.get_topology_desc(
        "",
        platform="cuda",
        target_config=GPUS[gpu].target_config(),
        topology=f"1x1x{math.prod(shape)}",
    )
    return topologies.make_mesh(topology, tuple(shape), tuple(axes))


def compile_on(
    mesh: Mesh, function: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Compilation:
    """Compile a jitted function for the devices of `gpu_mesh`.

    This is not thread-safe, because it captures the output of the process. All Mosaic kernels of a
    process are compiled for one compute capability, that of the first kernel.

    Args:
      mesh: mesh from `gpu_mesh`.
      function: function from `jax.jit`, with its donated and static arguments declared there.
      arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s; leaves without a sharding over `mesh`
        are replicated. Static arguments are passed on unchanged.
      keywords: keyword arguments, treated like `arguments`.
    """

    def place(leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        if not (isinstance(sharding, NamedSharding) and sharding.mesh == mesh):
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    arguments, keywords = jax.tree.map(place, (arguments, keywords))

    # Kernels from JAX's caches would not be compiled again, so ptxas would not report them.
    jax.clear_caches()
    with tempfile.TemporaryDirectory() as folder, _captured_output() as output, jax.set_mesh(mesh):
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        lowered = function.lower(*arguments, **keywords)  # pyright: ignore[reportFunctionMemberAccess]
        compiled = lowered.compile(compiler_options=dump)
        # The second dump exists only if command buffers were formed.
        names = "*.thunk_sequence.txt", "*.thunk_sequence_after_*.txt"
        dumps = [dump.read_text() for name in names for dump in Path(folder).glob(name)]
    memory, kernels = compiled.memory_analysis(), read_ptxas("".join(output))
    return Compilation(memory, compiled.as_text(), (dumps or [""])[-1], kernels)


_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def read_ptxas(output: str) -> tuple[Kernel, ...]:
    """Parse the statistics of every kernel in the output of `ptxas -v`."""
    return tuple(
        Kernel(found["name"], int(found["registers"]), int(found["stores"]), int(found["loads"]))
        for found in _PTXAS.finditer(output)
    )


@contextmanager
def _captured_output() -> Generator[list[str]]:
    """Capture the output of the process, including the report of ptxas, which C++ code prints.

    At the end, everything except this report is printed.
    """
    output: list[str] = []
    sys.stdout.flush()
    stdout = os.dup(1)
    with tempfile.TemporaryFile() as captured:
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        os.dup2(captured.fileno(), 1)
        try:
            yield output
        finally:
            sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)  # the C library has its own buffer
            os.dup2(stdout, 1)
            os.close(stdout)
            del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
            captured.seek(0)
            output.append(captured.read().decode(errors="replace"))
            sys.stdout.write(_PTXAS_LINES.sub("", output[0]))


_PTXAS_LINES = re.compile(r"^(ptxas info .*|    \d+ bytes stack frame.*)?\n", re.MULTILINE)
