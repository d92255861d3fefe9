"""Saves a model to a folder as `config.json` and `model.safetensors`."""

import json
import shutil
from collections.abc import Mapping
from itertools import chain, starmap
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.flax import save_file

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import write_atomically
from redrafter_jax.files.locate import SINGLE_FILE
from redrafter_jax.files.parameters import Layout, dotted, is_matrix
from redrafter_jax.files.quantized import MINIMUM, QUANT_METHOD, SCALE, pack
from redrafter_jax.models.linear import QuantizedWeight, parts_of, transposed
from redrafter_jax.parallel.model import Model


def save(
    folder: Path,
    model: Model[Any, Any],
    layout: Layout,
    config: Mapping[str, Any],
    tables: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Write `config.json` and `model.safetensors` to a folder, which is made if it is missing.

    Args:
      folder: the folder.
      model: the model, whose weights are written.
      layout: the names of the model's weights in files.
      config: the fields of `config.json`.
      tables: further arrays by name, which are stored with the weights.

    Raises:
      InputError: the weights cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {}
    dtype = None
    flat = nnx.to_flat_state(model.params)
    for path, value in chain.from_iterable(starmap(parts_of, flat)):
        own = dotted(path)
        name = layout.stored_name(model.config, own)
        if not isinstance(value, QuantizedWeight):
            dtype = value.dtype
            # safetensors would ignore the transposition of a NumPy array.
            value = jnp.asarray(value)
            tensors[name] = value.T if is_matrix(own, value) else value
            continue
        config = {**config, "quantization_config": {"quant_method": QUANT_METHOD}}
        parts = transposed(value) if is_matrix(own, value.codes) else value
        codes = np.asarray(parts.codes)
        stored = (pack(codes) if codes.dtype == jnp.int4 else codes, *parts[1:])
        endings = ("", SCALE, MINIMUM)
        tensors |= {
            name + ending: jnp.asarray(part)
            for ending, part in zip(endings, stored, strict=True)
            if part is not None
        }
    tensors |= tables
    fresh = folder / f"{SINGLE_FILE}.new"
    try:
        save_file(tensors, fresh, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for example
        fresh.unlink(missing_ok=True)
        raise InputError(f"{folder / SINGLE_FILE} could not be written ({error}).") from None
    # If the process is killed here, the folder holds no model, rather than parts of two models.
    (folder / "config.json").unlink(missing_ok=True)
    fresh.replace(folder / SINGLE_FILE)
    stated = {**config, "torch_dtype": str(dtype)}
    write_atomically(folder / "config.json", json.dumps(stated, indent=2) + "\n")
    # safetensors makes files that only the owner can read; other users should read these too.
    shutil.copymode(folder / "config.json", folder / SINGLE_FILE)
