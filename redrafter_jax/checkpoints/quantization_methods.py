"""What `config.json` states of a folder's quantization: ours, or a method of the hub's."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from redrafter_jax.checkpoints.config_files import field
from redrafter_jax.checkpoints.fp8_folders import with_output_scales
from redrafter_jax.checkpoints.packed_words import Packing, unpack_layers
from redrafter_jax.checkpoints.quantized import QUANT_METHOD
from redrafter_jax.checkpoints.stored import StoredWeight
from redrafter_jax.errors import InputError

# What is read of each method: a field's names, and its values, of which the first is the default.
_SIZES = {("bits", "w_bit"): (4,), ("group_size", "q_group_size"): (128, 64, 32, -1)}
_FORMAT = ("checkpoint_format", "format")
_FIELDS: Mapping[str, Mapping[tuple[str, ...], tuple[Any, ...]]] = {
    "gptq": {
        **_SIZES,
        _FORMAT: ("gptq", "gptq_v2"),
        ("is_marlin_format",): (False,),
        ("pack_dtype",): ("int32",),
    },
    "awq": {
        **_SIZES,
        ("version", *_FORMAT): ("gemm",),
        ("zero_point",): (True,),
        ("backend",): ("autoawq", "auto"),
        ("pack_dtype",): ("int32",),
    },
    "fp8": {("weight_block_size",): (None,), ("fmt",): ("e4m3",)},
    "fbgemm_fp8": {},
}
# From the weights of a folder to the same, quantized ones as `weight_with_scales` looks for them.
FindQuantized = Callable[[dict[str, StoredWeight]], dict[str, StoredWeight]]


def read_method(values: Mapping[str, Any], path: Path) -> FindQuantized:
    """How the quantized weights of a target are found; plain ones and ours are as they are.

    Args:
      values: the fields of `config.json`.
      path: of the file.

    Raises:
      InputError: the method, or a variant of it, is not supported.
    """
    method = check_method(values, path, (QUANT_METHOD, *_FIELDS))
    if method is None or method == QUANT_METHOD:
        return dict
    stated = values["quantization_config"]
    found = {}
    for names, supported in _FIELDS[method].items():
        name = next((name for name in names if stated.get(name) is not None), names[0])
        value = stated.get(name)
        value = supported[0] if value is None else value
        value = value.lower() if isinstance(value, str) else value
        # Not `in`: to Python, 1 is true and 128.0 a whole number.
        if not any(type(value) is type(one) and value == one for one in supported):
            raise InputError(
                f"{path} states {name}={stated[name]!r} of quant_method {method!r}; supported is "
                f"{' or '.join(map(repr, supported))}. Take such a folder, or plain weights and "
                "`redrafter convert --quantize`."
            )
        found[names[0]] = value
    if "group_size" not in found:
        return with_output_scales
    packing = Packing(
        by_inputs=method == "gptq",
        group_size=found["group_size"],
        zero_offset=int(found.get("checkpoint_format") == "gptq"),
        symmetric=method == "gptq" and stated.get("sym") is True,
    )
    return partial(unpack_layers, packing=packing)


def check_method(
    values: Mapping[str, Any], path: Path, supported: tuple[str, ...] = (QUANT_METHOD,)
) -> str | None:
    """The method of quantization that a `config.json` states, if it states any.

    Raises:
      InputError: it is not supported, or the field is no object.
    """
    if values.get("quantization_config") is None:
        return None
    method = field(values, "quantization_config", path, dict).get("quant_method")
    if method not in supported:
        others = "".join(f", {name!r}" for name in supported if name != QUANT_METHOD)
        raise InputError(
            f"{path} states quantization_config of quant_method {method!r}; supported is "
            f"{QUANT_METHOD!r}, which `redrafter convert --quantize` writes from plain weights"
            f"{others}."
        )
    return method
