"""Weights of float8_e4m3fn with one scale or one for each output, as AutoFP8 and FBGEMM write them.

Beside `X.weight` lies `X.weight_scale`, by which it is multiplied: of one number, or of as many as
there are outputs (https://github.com/neuralmagic/AutoFP8/blob/main/auto_fp8/quantize.py;
`FbgemmFp8Linear` of transformers). Activations stay as they are here, so their own scale,
`X.input_scale`, is not read.
"""

from functools import partial

import numpy as np
from jaxtyping import Float

from redrafter_jax.checkpoints.quantized import SCALE
from redrafter_jax.checkpoints.stored import Index, StoredWeight, dtype_of, memory_map


def with_output_scales(stored: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
    """The same weights, the scales of those in float8 [out, 1]; others are as they are."""
    found = dict(stored)
    for weight in stored.values():
        scale = stored.get(weight.name + SCALE)
        if weight.dtype != "F8_E4M3" or scale is None:
            continue
        outputs = (*weight.shape, 0)[0]
        if scale.shape in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
            spread = partial(_spread, scale, outputs)
            found[scale.name] = scale._replace(shape=(outputs, 1), unpack=spread)
    return found


def _spread(scale: StoredWeight, outputs: int, index: Index) -> Float[np.ndarray, "outputs 1"]:
    numbers = memory_map(scale, dtype_of(scale)).reshape(-1, 1)
    return np.broadcast_to(numbers, (outputs, 1))[index]
