"""Matrix products with a group-quantized weight.

All implementations have the same interface; `reference` is the specification.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Num

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.grouped_matmul.plan import why_unsupported
from pallas_kernels.grouped_matmul.reference import reference


def grouped_matmul(
    x: Float[Array, "N I"],
    codes: Num[Array, "I O"],
    scale: Float[Array, "groups O"],
    minimum: Float[Array, "groups O"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "N O"]:
    """Multiply rows by a group-quantized weight, with accumulation in float32.

    Without minima, a code stands for the number `scale * code`. With minima, it stands for
    `minimum + scale * (code - lowest)`; `lowest` is the smallest value of the codes' dtype.
    Codes are multiplied in the dtype of x, and the partial sums of each group are scaled. The
    kernel writes neither dequantized weights nor partial sums to memory. No bit of its result for a
    row depends on the other rows or on their number.

    Args:
      x: rows of I inputs, float32 or bfloat16.
      codes: codes of the weight from I inputs to O outputs, int4, int8 or, without minima,
        float8_e4m3fn. The inputs form groups of equal size, one for each row of `scale`.
      scale: scales per group and output, in any floating-point dtype.
      minimum: the value of the lowest code per group and output, in any floating-point dtype; None
        if code 0 is the value 0.
      implementation: a named implementation, or None for the platform's best: "mosaic_gpu" on
        Hopper GPUs for rows in bfloat16, codes in int4 or int8, and groups of 16, 32, 64 or 128
        inputs, else "reference". "mosaic_gpu_interpret" runs the same kernel slowly on the CPU,
        with race detection.

    Returns:
      The products, float32.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: the named implementation cannot run here.
    """
    _check_shapes(x, codes, scale, minimum)

    def kernel() -> Callable[..., Array]:
        from pallas_kernels.grouped_matmul.mosaic_gpu import mosaic_gpu

        # Layers of the same shape share one trace.
        return jax.jit(mosaic_gpu, static_argnames=("cores", "interpret"))

    return dispatch(
        "grouped_matmul",
        (x, codes, scale, minimum),
        implementation,
        reference=reference,
        unsupported=why_unsupported,
        kernel=kernel,
    )


def _check_shapes(x: Array, codes: Array, scale: Array, minimum: Array | None) -> None:
    for name, array in {"x": x, "codes": codes, "scale": scale}.items():
        if array.ndim != 2:
            raise ValueError(f"grouped_matmul: {name} has shape {array.shape}, not 2 axes.")
    inputs, outputs = codes.shape
    groups = len(scale)
    if x.shape[1] != inputs or scale.shape[1] != outputs:
        raise ValueError(
            f"grouped_matmul: x {x.shape} and scale {scale.shape} do not fit codes {codes.shape}, "
            f"which need {inputs} and {outputs} columns."
        )
    if not groups or inputs % groups:
        raise ValueError(f"grouped_matmul: {groups} groups do not divide {inputs} inputs.")
    if minimum is not None and minimum.shape != scale.shape:
        raise ValueError(
            f"grouped_matmul: minimum has shape {minimum.shape}, but scale has {scale.shape}."
        )
