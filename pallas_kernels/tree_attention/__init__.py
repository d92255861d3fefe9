"""Attention of tree nodes over a key-value cache and over each other.

One contract for every implementation; `reference` is the specification.
"""

import functools
import logging
import os
import re
from typing import Any, Literal

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention.plan import CORES, why_unsupported
from pallas_kernels.tree_attention.reference import reference

Implementation = Literal["reference", "mosaic_gpu", "mosaic_gpu_interpret"]


def tree_attention(
    q: Float[Array, "B N Q H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    k_tree: Float[Array, "B N K H"],
    v_tree: Float[Array, "B N K H"],
    mask: Bool[Array, "B N N"],
    *,
    scale: float,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B N Q H"]:
    """Softmax attention of N tree nodes, each over the cached tokens and its ancestors.

    Args:
      q: queries of the nodes.
      k_cache: keys of decided tokens; slots at and past `lengths` may hold anything, NaN included.
      v_cache: values of decided tokens, likewise.
      lengths: cached tokens per row, 0 allowed, at most S.
      k_tree: keys of the nodes themselves.
      v_tree: values of the nodes themselves.
      mask: mask[b, i, j] is True where node i sees node j; the diagonal is True.
      scale: factor on the scores before the softmax.
      window: positions that a node sees, its own included; None for all before it. A node stands
        as many positions after the cached tokens as it sees other nodes.
      implementation: a named one, or None for the best that this platform has: "mosaic_gpu" on
        Hopper GPUs for the shapes and dtypes it takes, else "reference". "mosaic_gpu_interpret"
        is the same kernel on the CPU, slow, watched for races.

    Returns:
      One output per node and query head, in q's dtype; softmax and sums are float32.

    Raises:
      ValueError: shapes do not fit together, or the window holds no position.
      NotImplementedError: the named implementation cannot run here.
    """
    arrays = q, k_cache, v_cache, lengths, k_tree, v_tree, mask
    _check_shapes(*arrays)
    if window is not None and window < 1:
        raise ValueError(f"tree_attention: window is {window}, but a node sees at least itself.")
    # No position lies further back: what follows is the program without a window.
    if window is not None and window >= k_cache.shape[2] + q.shape[1]:
        window = None
    specified = functools.partial(reference, scale=scale, window=window)
    if implementation == "reference":
        return specified(*arrays)

    interpret = implementation == "mosaic_gpu_interpret"
    device = _device()
    reason = _too_few_workers() if interpret else _why_not_hopper(device)
    reason = reason or why_unsupported(q, k_cache, v_cache, k_tree, v_tree, window)
    if reason and implementation:
        raise NotImplementedError(
            f"tree_attention implementation {implementation!r} cannot run here: {reason}; "
            "use 'reference' or None."
        )
    if reason:
        _log_once(f"tree_attention runs as 'reference'; for 'mosaic_gpu', {reason}.")
        return specified(*arrays)

    # Here, because it takes half a second and who has no GPU needs none of it.
    from pallas_kernels.tree_attention.mosaic_gpu import mosaic_gpu

    kernel = functools.partial(mosaic_gpu, scale=scale, cores=_cores(device), interpret=interpret)
    if implementation:
        return kernel(*arrays)
    _log_once("tree_attention runs as 'mosaic_gpu'.")
    # What runs on the CPU beside a GPU keeps the specification.
    return jax.lax.platform_dependent(*arrays, cuda=kernel, default=specified)


def _device() -> Any:
    """One of those that the computation is for: of the mesh in use, else the first there is."""
    mesh = jax.sharding.get_abstract_mesh()
    return (None if mesh.empty else mesh.abstract_device) or jax.devices()[0]


def _why_not_hopper(device: Any) -> str | None:
    """Half a sentence unless it is a Hopper: later GPUs dropped its matrix instructions."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:  # a mesh knows the names of its devices alone
        named = re.search(r"\bG?H(20|100|200|800)\b", device.device_kind)
        capability = "9.0" if device.platform == "gpu" and named else "unknown"
    if capability.startswith("9."):
        return None
    return f"it needs a Hopper GPU, of compute capability 9, but this is {device.device_kind!r}"


def _cores(device: Any) -> int:
    return getattr(device, "core_count", None) or getattr(device, "num_cores", None) or CORES


def _too_few_workers() -> str | None:
    """Half a sentence where the warpgroups that wait would hold every thread that XLA has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = int(os.environ.get("NPROC") or cores or 1)
    if workers >= 4:
        return None
    return f"it needs 4 CPU cores, or NPROC=4 in the environment before JAX starts, not {workers}"


@functools.cache
def _log_once(message: str) -> None:
    logging.getLogger(__name__).debug(message)


def _check_shapes(q: Array, k_cache: Array, *others: Array) -> None:
    for name, array in {"q": q, "k_cache": k_cache}.items():
        if array.ndim != 4:
            raise ValueError(f"tree_attention: {name} has shape {array.shape}, not 4 axes.")
    B, N, Q, H = q.shape
    K, S = k_cache.shape[1:3]
    expected = {
        "k_cache": (B, K, S, H),
        "v_cache": (B, K, S, H),
        "lengths": (B,),
        "k_tree": (B, N, K, H),
        "v_tree": (B, N, K, H),
        "mask": (B, N, N),
    }
    for (name, shape), array in zip(expected.items(), (k_cache, *others), strict=True):
        if array.shape != shape:
            raise ValueError(
                f"tree_attention: {name} has shape {array.shape}, but q {q.shape} and k_cache "
                f"{k_cache.shape} ask for {shape}."
            )
    if Q % K:
        raise ValueError(f"tree_attention: {K} key heads do not divide {Q} query heads.")
