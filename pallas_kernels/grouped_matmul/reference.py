"""The specification in jnp, for other platforms and for the tests of the kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

# With fewer rows than a tensor core's tile, XLA for GPUs would write the dequantized weight.
_FEWEST_ROWS = 16


def reference(
    x: Float[Array, "N I"],
    codes: Num[Array, "I O"],
    scale: Float[Array, "groups O"],
    minimum: Float[Array, "groups O"] | None,
) -> Float[Array, "N O"]:
    """Implement `pallas_kernels.grouped_matmul.grouped_matmul`.

    With several groups, the partial sums are an intermediate array [groups, N, O].
    """
    scale = scale.astype(jnp.float32)
    product = jax.lax.platform_dependent(
        x, codes, scale, cpu=_product_in_turn, default=_padded_product
    )
    if minimum is not None:
        sums = x.astype(jnp.float32).reshape(len(x), len(scale), -1).sum(axis=-1)
        # The value of code 0.
        zeros = minimum.astype(jnp.float32) - jnp.iinfo(codes.dtype).min * scale
        product += jnp.matmul(sums, zeros, precision="highest")
    return product


def _scaled_product(
    x: Float[Array, "N I"], codes: Num[Array, "I O"], scale: Float[Array, "groups O"]
) -> Float[Array, "N O"]:
    """Compute `x @ (scale * codes)` in float32, as a sum of scaled products of groups."""
    groups = len(scale)
    if groups == 1:
        return jnp.matmul(x, codes.astype(x.dtype), preferred_element_type=jnp.float32) * scale
    products = jnp.einsum(
        "NGI,GIO->GNO",
        x.reshape(len(x), groups, -1),
        codes.reshape(groups, -1, codes.shape[-1]).astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return (products * scale[:, None]).sum(axis=0)


def _product_in_turn(
    x: Float[Array, "N I"], codes: Num[Array, "I O"], scale: Float[Array, "groups O"]
) -> Float[Array, "N O"]:
    """Compute the product of `_scaled_product` with one weight in the dtype of x at a time.

    Without the barrier, XLA for CPUs would convert the codes of all layers before the first
    product, and keep all of them. int4 and float8 are slow to convert. So they are first converted
    to a wider dtype that represents them exactly; XLA may keep these codes throughout a loop.
    """
    wider = {jnp.dtype(jnp.int4): jnp.int8, jnp.dtype(jnp.float8_e4m3fn): jnp.bfloat16}
    codes = codes.astype(wider.get(codes.dtype, codes.dtype))
    x, codes = jax.lax.optimization_barrier((x, codes))
    return _scaled_product(x, codes, scale)


def _padded_product(
    x: Float[Array, "N I"], codes: Num[Array, "I O"], scale: Float[Array, "groups O"]
) -> Float[Array, "N O"]:
    padding = max(_FEWEST_ROWS - len(x), 0) if len(scale) > 1 else 0
    return _scaled_product(jnp.pad(x, ((0, padding), (0, 0))), codes, scale)[: len(x)]
