"""Adds a product, given as partial sums, to a residual stream and norms the result.

All implementations have the same interface; `reference` is the specification.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.add_norm.plan import THREADS, WARPGROUPS, why_unsupported
from pallas_kernels.add_norm.reference import reference
from pallas_kernels.dispatch import Implementation, current_device, dispatch, why_not_hopper


def add_norm(
    x: Float[Array, "rows D"],
    parts: Float[Array, "splits rows D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float,
    zero_centered: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Add the sum of the parts to x, and apply a root-mean-square norm to the result.

    The sum of the parts is rounded to x's dtype before it is added, as a product would be.

    Args:
      x: the residual stream.
      parts: float32 partial sums of a product, each over one split of the product's inputs.
      weight: weight of the norm (arXiv 1910.07467), which is computed in float32.
      epsilon: added to the mean square.
      zero_centered: whether the norm multiplies by `1 + weight` in float32, and then rounds to x's
        dtype. If False, the norm rounds first and then multiplies by `weight`.
      implementation: a named implementation, or None for the platform's best: "mosaic_gpu" on
        Hopper GPUs for supported shapes and dtypes, else "reference". "mosaic_gpu_interpret" runs
        the same kernel slowly on the CPU, with race detection.

    Returns:
      The new residual stream and the normed stream, in x's dtype.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: the named implementation cannot run here.
    """
    _check_shapes(x, parts, weight)
    options: Any = {"epsilon": epsilon, "zero_centered": zero_centered}

    def kernel() -> Callable[..., tuple[Array, Array]]:
        from pallas_kernels.add_norm.mosaic_gpu import mosaic_gpu

        return partial(mosaic_gpu, **options)

    return dispatch(
        "add_norm",
        (x, parts, weight),
        implementation,
        reference=partial(reference, **options),
        unsupported=why_unsupported,
        kernel=kernel,
    )


def has_kernel(width: int) -> bool:
    """Return whether `add_norm` runs its kernel for 16-bit rows of this width on this device."""
    return why_not_hopper(current_device()) is None and width % (WARPGROUPS * THREADS) == 0


def _check_shapes(x: Any, parts: Any, weight: Any) -> None:
    if x.ndim != 2:
        raise ValueError(f"add_norm: x has shape {x.shape}, not 2 axes.")
    for name, one, shape in (
        ("parts", parts, (*parts.shape[:1], *x.shape)),
        ("weight", weight, x.shape[1:]),
    ):
        if one.shape != shape:
            raise ValueError(
                f"add_norm: {name} has shape {one.shape}, but x {x.shape} needs {shape}."
            )
