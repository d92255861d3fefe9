"""Finds the lowest of a row's logits that pass the filters top-k, top-p and min-p.

All implementations have the same interface; `reference` is the specification.
"""

from collections.abc import Callable

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.lowest_kept.plan import why_unsupported
from pallas_kernels.lowest_kept.reference import reference


def lowest_kept(
    logits: Float[Array, "B M V"],
    unit: Float[Array, " B"],
    top_k: Float[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B M"]:
    """Find, for each row of V logits, the lowest logit that passes the filters.

    The filters are top-k, top-p and min-p, in this order. Each filter is applied to the tokens that
    the previous filter kept, and keeps ties. The filters use the scores `logits / unit`, rounded to
    float32.

    Args:
      logits: float32 logits of V tokens, in M rows for each of B requests. If a row has a NaN, the
        result is unspecified.
      unit: temperature of each request, above 0.
      top_k: number of tokens to keep, at least 1 and less than V; infinity keeps all.
      top_p: cumulative probability above which tokens are dropped, above 0; infinity drops none.
      min_p: minimum probability of kept tokens, relative to the highest probability; 0 drops none.
      implementation: a named implementation, or None for the platform's best: "mosaic_gpu" on
        Hopper GPUs if V is 2048 or more, else "reference". "mosaic_gpu_interpret" runs the same
        kernel slowly on the CPU, with race detection.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: the named implementation cannot run here.
    """
    if logits.ndim != 3:
        raise ValueError(f"lowest_kept: logits has shape {logits.shape}, not 3 axes.")
    bounds = {"unit": unit, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, bound in bounds.items():
        if bound.shape != logits.shape[:1]:
            raise ValueError(
                f"lowest_kept: {name} has shape {bound.shape}, but logits {logits.shape} need "
                f"{logits.shape[:1]}."
            )

    def kernel() -> Callable[..., Array]:
        from pallas_kernels.lowest_kept.mosaic_gpu import mosaic_gpu

        return mosaic_gpu

    return dispatch(
        "lowest_kept",
        (logits, *bounds.values()),
        implementation,
        reference=reference,
        unsupported=why_unsupported,
        kernel=kernel,
    )
