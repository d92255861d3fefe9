"""Writes new keys or values into the cache pages of several layers, in one kernel for all layers.

All implementations have the same interface; `reference` is the specification.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int, Shaped

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.write_rows.plan import why_unsupported
from pallas_kernels.write_rows.reference import reference


def write_rows(
    layers: tuple[Shaped[Array, "pages K page H"], ...],
    fresh: tuple[Shaped[Array, "B T K H"], ...],
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Shaped[Array, "pages K page H"], ...]:
    """Write rows for T tokens of each of B texts into every layer; return the new layers.

    A compiled program writes in place if it does not read the old layers afterwards.

    Args:
      layers: keys or values of each layer, in pages; all arrays have one shape and dtype.
      fresh: new rows of each layer: K heads of H numbers for every token.
      page: page number of every token, at least 0. A token is not written if its page does not
        exist.
      slot: slot of every token in its page. No two tokens may have the same page and slot.
      implementation: a named implementation, or None for the platform's best: "mosaic_gpu" on
        Hopper GPUs for supported shapes and dtypes, else "reference". "mosaic_gpu_interpret" runs
        the same kernel slowly on the CPU, with race detection.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: the named implementation cannot run here.
    """
    _check_shapes(layers, fresh, page, slot)

    def kernel() -> Callable[..., Any]:
        from pallas_kernels.write_rows.mosaic_gpu import mosaic_gpu

        return mosaic_gpu

    return dispatch(
        "write_rows",
        (page, slot, layers, fresh),
        implementation,
        reference=reference,
        unsupported=why_unsupported,
        kernel=kernel,
    )


def _check_shapes(layers: tuple[Any, ...], fresh: tuple[Any, ...], page: Any, slot: Any) -> None:
    if not layers or len(layers) != len(fresh):
        raise ValueError(
            f"write_rows: there are {len(layers)} layers and new rows for {len(fresh)}; it needs "
            "one or more layers, and rows for each."
        )
    (_, K, _, H), own = layers[0].shape, page.shape
    for name, one, shape in (
        *((f"layers[{at}]", layer, layers[0].shape) for at, layer in enumerate(layers)),
        *((f"fresh[{at}]", rows, (*own, K, H)) for at, rows in enumerate(fresh)),
        ("slot", slot, own),
    ):
        if one.shape != shape:
            raise ValueError(
                f"write_rows: {name} has shape {one.shape}, but layers[0] {layers[0].shape} and "
                f"page {own} need {shape}."
            )
