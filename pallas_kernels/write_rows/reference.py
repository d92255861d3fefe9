"""The specification in jnp, for other platforms and as the oracle of the kernel's tests."""

from jaxtyping import Array, Int, Shaped


def reference(
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    layers: tuple[Shaped[Array, "pages K page H"], ...],
    fresh: tuple[Shaped[Array, "B T K H"], ...],
) -> tuple[Shaped[Array, "pages K page H"], ...]:
    """Implement `pallas_kernels.write_rows.write_rows`, with one scatter for each layer."""
    return tuple(
        layer.at[page, :, slot].set(rows, mode="drop", unique_indices=True)
        for layer, rows in zip(layers, fresh, strict=True)
    )
