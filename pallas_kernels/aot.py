"""Compile for a named GPU on a machine that has none, and read what the compiler says of it.

    mesh = gpu_mesh("h200")                       # or ("h200", (2, 4), ("data", "model"))
    compiled = compile_on(mesh, jax.jit(f), x, y)
    compiled.memory.temporaries, compiled.hlo, compiled.kernels

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

from pallas_kernels.gpus import find_gpu


class AotUnavailableError(RuntimeError):
    """This process cannot compile for a GPU that is not there; the message says why."""


class Memory(NamedTuple):
    """Bytes on one device.

    Attributes:
      arguments: of all arguments, those given back included.
      outputs: of all results.
      aliased: of the results that lie where a donated argument lay.
      temporaries: held during the run beside arguments and results.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int


class Kernel(NamedTuple):
    """What ptxas says of one Mosaic kernel: registers per thread, and bytes spilled from them."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int


class Compilation(NamedTuple):
    """A compiled program.

    Attributes:
      memory: what it needs.
      hlo: the optimised HLO as text.
      thunks: what the runtime launches, one line each, nested: command buffers, kernels, copies.
      kernels: its Mosaic kernels. XLA's own kernels are not listed.
    """

    memory: Memory
    hlo: str
    thunks: str
    kernels: tuple[Kernel, ...]


def why_unavailable() -> str | None:
    """The sentence of the `AotUnavailableError` that `gpu_mesh` would raise, or None."""
    try:
        plugin = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:
        plugin = None
    if plugin is None:
        return "The compiler for GPUs is not installed; `pip install redrafter-jax[aot]` brings it."
    platforms = jax.config.jax_platforms
    if platforms != "cpu":
        return (
            f"JAX_PLATFORMS is {platforms!r}; compiling for a GPU that is "
            "not there needs JAX_PLATFORMS=cpu in the environment."
        )
    return None


def gpu_mesh(gpu: str, shape: Sequence[int] = (1,), axes: Sequence[str] = ("device",)) -> Mesh:
    """A mesh of GPUs that exist on paper alone.

    Args:
      gpu: a key of `pallas_kernels.gpus.GPUS`.
      shape: devices along each axis.
      axes: names of the axes.

    Raises:
      ValueError: the GPU is not known.
      AotUnavailableError: packages are missing, or JAX is not on the CPU.
    """
    config = find_gpu(gpu).target_config()
    reason = why_unavailable()
    if reason:
        raise AotUnavailableError(reason)
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=config, topology=f"1x1x{math.prod(shape)}"
    )
    return topologies.make_mesh(topology, tuple(shape), tuple(axes))


def compile_on(
    mesh: Mesh, function: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Compilation:
    """Compile a jitted function for the devices of `gpu_mesh`.

    Not for several threads at once: the output of the process is held back meanwhile. And Mosaic
    kernels compile for one compute capability per process, that of the first one.

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

    def compile_once() -> Compilation:
        with tempfile.TemporaryDirectory() as folder, _held_output() as said, jax.set_mesh(mesh):
            dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            lowered = function.lower(*arguments, **keywords)  # pyright: ignore[reportFunctionMemberAccess]
            compiled = lowered.compile(compiler_options=dump)
            thunks = _read_thunks(Path(folder))
        analysis = compiled.memory_analysis()
        return Compilation(
            memory=Memory(
                arguments=analysis.argument_size_in_bytes,
                outputs=analysis.output_size_in_bytes,
                aliased=analysis.alias_size_in_bytes,
                temporaries=analysis.temp_size_in_bytes,
            ),
            hlo=compiled.as_text(),
            thunks=thunks,
            kernels=read_ptxas("".join(said)),
        )

    compilation = compile_once()
    if len(set(_KERNEL_HASH.findall(compilation.hlo))) != len(compilation.kernels):
        # A kernel that this process compiled before is taken from a cache, and ptxas is silent.
        jax.clear_caches()
        compilation = compile_once()
    return compilation


def _read_thunks(folder: Path) -> str:
    # The second is written only where command buffers were formed.
    dumps = (*folder.glob("*.thunk_sequence.txt"), *folder.glob("*.thunk_sequence_after_*.txt"))
    return dumps[-1].read_text() if dumps else ""


_KERNEL_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')

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
def _held_output() -> Generator[list[str]]:
    """Collect what the process prints, the compiler's C++ included, with ptxas's report in it.

    What is not of ptxas is printed at the end.
    """
    name = "MOSAIC_GPU_DUMP_PTXAS"
    before = os.environ.get(name)
    said: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as held:
        os.environ[name] = "1"
        os.dup2(held.fileno(), 1)
        try:
            yield said
        finally:
            sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)  # the C library has a buffer of its own
            os.dup2(kept, 1)
            os.close(kept)
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
            held.seek(0)
            said.append(held.read().decode(errors="replace"))
            rest = _PTXAS_LINES.sub("", said[0])
            if rest.strip():
                sys.stdout.write(rest)


_PTXAS_LINES = re.compile(r"^(ptxas info .*|    \d+ bytes stack frame.*)\n", re.MULTILINE)
