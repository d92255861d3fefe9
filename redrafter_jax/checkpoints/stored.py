"""Where a weight lies in a file, whatever the file's format."""

import math
from pathlib import Path
from typing import NamedTuple

# Bytes of a number, by safetensors' names of dtypes.
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class Stored(NamedTuple):
    """A weight in a file, its numbers in row-major order and little-endian.

    Attributes:
      path: the file.
      name: of the weight.
      dtype: safetensors' name of it, such as "BF16".
      shape: as stored.
      offset: of its first byte in the file.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """That it takes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
