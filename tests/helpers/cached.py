"""What lies in a key-value cache, row by row."""

import numpy as np

from redrafter_jax.types import KVCache


def layers_of(cache: KVCache) -> list[np.ndarray]:
    """Of every layer the slots [B K S H], keys first, copied to the host."""
    table = np.asarray(cache.table)
    B, M = table.shape

    def slots(layer: object) -> np.ndarray:
        pages = np.asarray(layer)[table].swapaxes(1, 2)
        return np.array(pages.reshape(B, pages.shape[1], M * pages.shape[3], -1))

    return [slots(layer) for layer in (*cache.keys, *cache.values)]
