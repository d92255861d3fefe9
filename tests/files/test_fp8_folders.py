"""Folders of the hub in float8: loaded in their own bits, converted, refused."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file
from tiny_folders import change_json, damaged
from tiny_models import assert_same, logits_error, random_target, tiny_config

from redrafter_jax import InputError, load_target, save_target
from redrafter_jax.files.convert import convert

pytestmark = pytest.mark.usefixtures("quick_compilation")

AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def write_fp8(folder: Path, stated: dict[str, Any], shape: Any, **changes: Any) -> Path:
    """A target in float8 in `fp8`, and with the same numbers in `numbers`.

    Args:
      folder: of both.
      stated: as `quantization_config`; `ignored_layers` and the embedding are plain.
      shape: of the scales of so many outputs.
      changes: weights that are stored instead, None being none.
    """
    save_target(random_target(tiny_config()), folder / "numbers")
    weights = load_file(folder / "numbers" / "model.safetensors")
    stored, plain = {}, ["norm", "embed_tokens", *stated.get("ignored_layers", [])]
    for name, weight in list(weights.items()):
        stored[name] = weight
        if any(part in name for part in plain):
            continue
        outputs = len(weight)
        per_output = np.prod(shape(outputs), dtype=int) == outputs
        highest = np.abs(weight).max(axis=1) if per_output else np.abs(weight).max(keepdims=True)[0]
        scale = np.asarray(highest, np.float32) / 448
        codes = jnp.asarray(weight / scale[:, None]).astype(jnp.float8_e4m3fn)
        stored[name] = codes
        stored[f"{name}_scale"] = jnp.asarray(scale.reshape(shape(outputs)))
        stored[name.replace("weight", "input_scale")] = jnp.ones(1)
        weights[name] = jnp.asarray(np.asarray(codes, np.float32) * scale[:, None])
    save_file(weights, folder / "numbers" / "model.safetensors")
    fp8 = damaged(folder / "fp8", folder / "numbers", stored | changes)
    change_json(fp8 / "config.json", quantization_config=stated)
    return fp8


@pytest.mark.parametrize(
    ("stated", "shape"),
    [
        (AUTO_FP8, lambda outputs: (1,)),
        (AUTO_FP8, lambda outputs: ()),
        (AUTO_FP8 | {"weight_block_size": None}, lambda outputs: (outputs,)),
        (FBGEMM, lambda outputs: (outputs, 1)),
    ],
)
def test_a_folder_is_loaded_in_its_own_bits(
    tmp_path: Path, stated: dict[str, Any], shape: Any
) -> None:
    folder = write_fp8(tmp_path, stated, shape)
    loaded: Any = load_target(folder, "float32")
    codes, scale, minimum = loaded.params["layers"][0]["mlp"]["down_proj"].get_value()
    assert codes.dtype == jnp.float8_e4m3fn
    assert scale.shape == (1, 32)
    assert minimum is None
    assert logits_error(loaded, load_target(tmp_path / "numbers", "float32")) < 1e-5
    *_, left_out = convert(folder, tmp_path / "new")
    assert "input_scale" in left_out
    assert_same(load_target(tmp_path / "new", "float32"), loaded)


@pytest.mark.parametrize(
    ("stated", "changes", "sentence"),
    [
        (AUTO_FP8 | {"weight_block_size": [128, 128]}, {}, r"weight_block_size=\[128, 128\] of q"),
        (AUTO_FP8 | {"fmt": "e5m2"}, {}, "fmt='e5m2' of quant_method 'fp8'; supported is 'e4m3'"),
        (AUTO_FP8, {f"{QUERY}_scale": None}, "is quantized as F8_E4M3, but no scales '.*_scale'"),
        (AUTO_FP8, {f"{QUERY}_scale": jnp.ones(7)}, r"_scale' has shape \(7,\); the scales of a"),
        (AUTO_FP8, {QUERY: jnp.ones(32, jnp.float8_e4m3fn)}, r"numbers of shape \(32,\), its con"),
    ],
)
def test_others_and_damaged_ones_are_refused(
    tmp_path: Path, stated: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    folder = write_fp8(tmp_path, stated, lambda outputs: (1,), **changes)
    with pytest.raises(InputError, match=sentence):
        load_target(folder)
