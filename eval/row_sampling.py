"""How the rows of a batch choose their tokens, as arrays."""

from collections.abc import Sequence

import jax
import numpy as np

from redrafter_jax.config import TargetConfig
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.requests import row_arrays
from redrafter_jax.types import Sampling


def stack_sampling(config: TargetConfig, rows: Sequence[Request]) -> Sampling:
    """How the tokens of checked rows are chosen, as NumPy's arrays."""
    own = [row_arrays(config, row).sampling for row in rows]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *own)
