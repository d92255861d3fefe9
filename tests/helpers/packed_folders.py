"""Folders as GPTQ and AWQ write them, packed number by number as their authors describe it."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny_folders import change_json

from redrafter_jax import save_target
from redrafter_jax.models.target import Target

# The output that lies in each eighth of a word, from the lowest bits up.
ORDERS = {"gptq": range(8), "awq": (0, 2, 4, 6, 1, 3, 5, 7)}


def words(numbers: np.ndarray, method: str) -> np.ndarray:
    """Eight neighbours of the last axis to an int32."""
    packed = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // 8), np.uint32)
    for place, neighbour in enumerate(ORDERS[method]):
        packed |= numbers[..., neighbour::8].astype(np.uint32) << (4 * place)
    return packed.view(np.int32)


def write_packed(
    folder: Path,
    target: Target,
    stated: dict[str, Any],
    plain: tuple[str, ...] = ("lm_head", "embed_tokens"),
) -> Path:
    """The target with its matrices in 4 bits in `packed`, and with the same numbers in `numbers`.

    Args:
      folder: of both.
      target: to be rounded.
      stated: as `quantization_config`; what it leaves out is as its method has it by default.
      plain: what is named so is not quantized.
    """
    save_target(target, folder / "numbers")
    weights = load_file(folder / "numbers" / "model.safetensors")
    packed = {}
    for name, weight in list(weights.items()):
        if weight.ndim != 2 or any(part in name for part in plain):
            packed[name] = weight
            continue
        size = stated["group_size"]
        groups = weight.reshape(len(weight), -1, weight.shape[1] if size == -1 else size)
        codes, zeros, scales = rounded(groups, symmetric=stated.get("sym") is True)
        numbers = (codes - zeros[..., None]) * scales.astype(np.float64)[..., None]
        weights[name] = numbers.astype(np.float32).reshape(weight.shape)
        layer, codes = name.removesuffix(".weight"), codes.reshape(weight.shape)
        method = stated["quant_method"]
        if method == "gptq":
            group = weight.shape[1] if size == -1 else size
            packed[f"{layer}.g_idx"] = (np.arange(weight.shape[1]) // group).astype(np.int32)
            packed[f"{layer}.qweight"] = words(codes, method).T
            zeros = zeros - (stated.get("checkpoint_format") != "gptq_v2")
        else:
            packed[f"{layer}.qweight"] = words(codes.T, method)
        packed[f"{layer}.qzeros"] = words(zeros.T, method)
        packed[f"{layer}.scales"] = scales.T
    save_file(weights, folder / "numbers" / "model.safetensors")
    shutil.copytree(folder / "numbers", folder / "packed")
    change_json(folder / "packed" / "config.json", quantization_config=stated)
    # safetensors writes the bytes as they lie, whatever their order.
    packed = {name: np.ascontiguousarray(weight) for name, weight in packed.items()}
    save_file(packed, folder / "packed" / "model.safetensors")
    return folder / "packed"


def rounded(groups: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes from 0 to 15, zero points from 1 to 15, and scales."""
    if symmetric:
        scales = (np.abs(groups).max(-1) / 8).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        scales = ((groups.max(-1) - groups.min(-1)) / 15).astype(np.float16)
        zeros = np.clip(np.round(-groups.min(-1) / scales), 1, 15).astype(np.int64)
    codes = np.round(groups / scales[..., None]) + zeros[..., None]
    return np.clip(codes, 0, 15).astype(np.int64), zeros, scales
