"""Sampling parameters of the rows of a batch, as arrays."""

from collections.abc import Sequence

import jax
import numpy as np

from redrafter_jax.config import TargetConfig
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.requests import row_arrays
from redrafter_jax.types import Sampling


def stack_sampling(config: TargetConfig, rows: Sequence[Request]) -> Sampling:
    """Stack the sampling parameters of rows from `check_batch` into NumPy arrays."""
    own = [row_arrays(config, row).sampling for row in rows]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *own)
