"""Compile for a named GPU on a machine that has none, and read what the compiler says of it.

    mesh = gpu_mesh("h200")                       # or ("h200", (2, 4), ("data", "model"))
    compiled = compile_on(mesh, jax.jit(f), x, y)
    compiled.memory.temp_size_in_bytes, compiled.hlo, compiled.kernels

Needs the packages of the extra `aot` and JAX on the CPU. Nothing is autotuned and nothing is run:
the matrix products of a real card may be tiled otherwise.
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
    """This process cannot compile for a GPU that is not there; the message says why."""


class Kernel(NamedTuple):
    """What ptxas says of one Mosaic kernel: registers per thread, and bytes spilled from them."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int


class Compilation(NamedTuple):
    """A compiled program."""

    memory: Any  # JAX's CompiledMemoryStats, of one device; its arguments include donated ones
    hlo: str  # the optimised HLO
    thunks: str  # what the runtime launches, a line each, nested: command buffers, kernels, copies
    kernels: tuple[Kernel, ...]  # its Mosaic kernels; XLA's own are not listed


def why_unavailable() -> str | None:
    """The sentence of the `AotUnavailableError` that `gpu_mesh` would raise, or None."""
    try:
        plugin = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:
        plugin = None
    if plugin is None:
        return "The compiler for GPUs is not installed; in a checkout `make aot` installs it."
    if (platforms := jax.config.jax_platforms) == "cpu":
        return None
    return (
        f"JAX_PLATFORMS is {platforms or 'not set'}; compiling for a GPU that is not there needs "
        "JAX_PLATFORMS=cpu in the environment."
    )


def gpu_mesh(gpu: str, shape: Sequence[int] = (1,), axes: Sequence[str] = ("device",)) -> Mesh:
    """A mesh of GPUs that exist on paper alone, so many along each axis; `GPUS` names them.

    Raises:
      ValueError: the GPU is not known.
      AotUnavailableError: packages are missing, or JAX is not on the CPU.
    """
    if gpu not in GPUS:
        raise ValueError(f"GPU {gpu!r} is not known; the known ones are {', '.join(GPUS)}.")
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

    Not for several threads at once: the output of the process is captured meanwhile. Mosaic kernels
    compile for one compute capability per process, that of the first one.

    Args:
      mesh: from `gpu_mesh`.
      function: from `jax.jit`, its donated and static arguments named there.
      arguments: arrays or `jax.ShapeDtypeStruct`s, in pytrees; what has no sharding over `mesh`
        is replicated. Static arguments go through as they are.
      keywords: as arguments.
    """

    def place(leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        if not (isinstance(sharding, NamedSharding) and sharding.mesh == mesh):
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    arguments, keywords = jax.tree.map(place, (arguments, keywords))

    # A kernel that this process compiled before would come from a cache, and ptxas be silent.
    jax.clear_caches()
    with tempfile.TemporaryDirectory() as folder, _captured_output() as output, jax.set_mesh(mesh):
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        lowered = function.lower(*arguments, **keywords)  # pyright: ignore[reportFunctionMemberAccess]
        compiled = lowered.compile(compiler_options=dump)
        # The second is written only where command buffers were formed.
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
    """The kernels in what `ptxas -v` printed."""
    return tuple(
        Kernel(found["name"], int(found["registers"]), int(found["stores"]), int(found["loads"]))
        for found in _PTXAS.finditer(output)
    )


@contextmanager
def _captured_output() -> Generator[list[str]]:
    """Capture what the process prints, from C++ too: ptxas's report is in it.

    All but that report is printed at the end.
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
            ctypes.CDLL(None).fflush(None)  # the C library has a buffer of its own
            os.dup2(stdout, 1)
            os.close(stdout)
            del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
            captured.seek(0)
            output.append(captured.read().decode(errors="replace"))
            sys.stdout.write(_PTXAS_LINES.sub("", output[0]))


_PTXAS_LINES = re.compile(r"^(ptxas info .*|    \d+ bytes stack frame.*)?\n", re.MULTILINE)
