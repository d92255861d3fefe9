"""Which implementation of a contract runs: a named one, or the best that this platform has."""

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array

_TILE_ROWS = 8

Implementation = Literal["reference", "mosaic_gpu", "mosaic_gpu_interpret"]


def dispatch(
    name: str,
    arrays: tuple[Any, ...],
    implementation: Implementation | None,
    *,
    reference: Callable[..., Array],
    unsupported: Callable[..., str | None],
    kernel: Callable[[], Callable[..., Array]],
) -> Array:
    """The result of a contract on these arrays.

    Args:
      name: of the contract.
      arrays: its arguments, None among them where it allows that.
      implementation: a named one, or None for the kernel where it can run, else the reference.
      reference: the specification in jnp.
      unsupported: from the arrays to why the kernel cannot take them, half a sentence, or None.
      kernel: imports and returns the kernel, which takes the arrays, `cores` and `interpret`;
        deferred, since the import costs half a second and only GPUs need it.

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
    # Code for the CPU of a machine with a GPU runs the reference.
    return jax.lax.platform_dependent(*arrays, cuda=chosen, default=reference)


def current_device() -> Any:
    """One of those that the computation is for: of the mesh in use, else the first there is."""
    mesh = jax.sharding.get_abstract_mesh()
    return (None if mesh.empty else mesh.abstract_device) or jax.devices()[0]


def fewest_rows() -> int:
    """The number of rows below which a matrix product takes no less time, on this device.

    A GPU multiplies a tile of them at once. Of fewer XLA may make a matrix-vector product, which it
    writes out elementwise, as large as the matrix.
    """
    return _TILE_ROWS if on_gpu() else 1


def on_gpu() -> bool:
    """Whether the computation is for a GPU, where each kernel that is started costs time."""
    return current_device().platform == "gpu"


def why_not_hopper(device: Any) -> str | None:
    """Half a sentence unless it is a Hopper: later GPUs dropped its matrix instructions."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:  # a mesh knows the names of its devices alone
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
    """Half a sentence where the warpgroups that wait would hold every thread that XLA has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = int(os.environ.get("NPROC") or cores or 1)
    if workers >= 4:
        return None
    return f"it needs 4 CPU cores, or NPROC=4 in the environment before JAX starts, not {workers}"


@functools.cache
def _log_once(name: str, message: str) -> None:
    logging.getLogger(f"pallas_kernels.{name}").debug(message)
