"""Dispatch of a kernel interface to an implementation: a named one, or the platform's best."""

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax

_TILE_ROWS = 8

Implementation = Literal["reference", "mosaic_gpu", "mosaic_gpu_interpret"]
Result = TypeVar("Result")


def dispatch(
    name: str,
    arrays: tuple[Any, ...],
    implementation: Implementation | None,
    *,
    reference: Callable[..., Result],
    unsupported: Callable[..., str | None],
    kernel: Callable[[], Callable[..., Result]],
) -> Result:
    """Run an implementation of a kernel interface on these arrays.

    Args:
      name: name of the interface, such as "add_norm", for errors and the log.
      arrays: the arguments, which may include None and tuples.
      implementation: a named implementation, or None for the kernel if it can run, and otherwise
        the reference.
      reference: the specification, written in jnp.
      unsupported: function that returns the reason why the kernel cannot take the arrays, as a
        clause, or None.
      kernel: function that imports and returns the kernel, which takes the arrays, `cores` and
        `interpret`. The import takes half a second, and only GPUs need it.

    Raises:
      NotImplementedError: the named implementation cannot run here.
    """
    if implementation == "reference":
        return reference(*arrays)
    interpret = implementation == "mosaic_gpu_interpret"
    device = current_device()
    reason = _too_few_workers() if interpret else why_not_hopper(device)
    reason = reason or unsupported(*arrays)
    if reason and implementation:
        raise NotImplementedError(
            f"{name} implementation {implementation!r} cannot run here: {reason}; "
            "use 'reference' or None."
        )
    if reason:
        _log_once(name, f"{name} runs as 'reference'; for 'mosaic_gpu', {reason}.")
        return reference(*arrays)
    chosen = functools.partial(kernel(), cores=_cores(device), interpret=interpret)
    if implementation:
        return chosen(*arrays)
    _log_once(name, f"{name} runs as 'mosaic_gpu'.")
    # On a machine with a GPU, code that is lowered for the CPU runs the reference.
    return jax.lax.platform_dependent(*arrays, cuda=chosen, default=reference)


def current_device() -> Any:
    """A device on which the computation runs: one of the mesh in use, or JAX's first device."""
    mesh = jax.sharding.get_abstract_mesh()
    return (None if mesh.empty else mesh.abstract_device) or jax.devices()[0]


def fewest_rows() -> int:
    """Return the number of rows below which a matrix product is not faster on this device.

    A GPU multiplies a tile of rows at once. With fewer rows than a tile, XLA may compute the
    product elementwise, with an intermediate array as large as the matrix.
    """
    return _TILE_ROWS if on_gpu() else 1


def on_gpu() -> bool:
    """Whether the computation runs on a GPU, where every kernel launch costs time."""
    return current_device().platform == "gpu"


def why_not_hopper(device: Any) -> str | None:
    """The reason why the device is not a Hopper GPU, as a clause; None for a Hopper GPU.

    Later GPUs do not have Hopper's matrix instructions.
    """
    capability = getattr(device, "compute_capability", None)
    if capability is None:  # a mesh has only the names of its devices
        named = re.search(r"\bG?H(20|100|200|800)\b", device.device_kind)
        capability = "9.0" if device.platform == "gpu" and named else "unknown"
    if capability.startswith("9."):
        return None
    return f"it needs a Hopper GPU, of compute capability 9, but this is {device.device_kind!r}"


def _cores(device: Any) -> int:
    if known := getattr(device, "core_count", None) or getattr(device, "num_cores", None):
        return known
    from pallas_kernels.gpus import GPUS

    return GPUS["h100"].cores


def _too_few_workers() -> str | None:
    """The reason, as a clause, why the interpreter would run out of XLA's threads, or None."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = int(os.environ.get("NPROC") or cores or 1)
    if workers >= 4:
        return None
    return f"it needs 4 CPU cores, or NPROC=4 in the environment before JAX starts, not {workers}"


@functools.cache
def _log_once(name: str, message: str) -> None:
    logging.getLogger(f"pallas_kernels.{name}").debug(message)
