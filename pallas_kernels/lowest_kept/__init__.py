"""The bound that top-k, top-p and min-p set on the scores of a row.

One contract for every implementation; `reference` is the specification.
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
    """The lowest logit of each row that passes its filters, all of which keep tokens that tie.

    The filters are top-k, top-p and min-p, in this order, each on what the one before it kept. They
    look at `logits / unit`, rounded to float32.

    Args:
      logits: float32; NaN keeps or drops any token.
      unit: the temperature, above 0.
      top_k: tokens that are kept, at least 1 and fewer than V; infinite for all.
      top_p: the probability above which tokens are dropped, above 0; infinite for none.
      min_p: the least probability of a token that is kept, as a part of the highest; 0 for none.
      implementation: a named one, or None for the best that this platform has: "mosaic_gpu" on
        Hopper GPUs for rows of at least one block, else "reference". "mosaic_gpu_interpret" is the
        same kernel on the CPU, slow, watched for races.

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
                f"lowest_kept: {name} has shape {bound.shape}, but logits {logits.shape} ask for "
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
