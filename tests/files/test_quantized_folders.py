"""Folders of GPTQ, AWQ and float8: loaded in their own bits, decoded, converted, refused."""

import dataclasses
import json
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed_folders import write_packed
from safetensors.flax import load_file as load_arrays
from safetensors.flax import save_file
from safetensors.numpy import load_file
from tiny_folders import change_json, damaged
from tiny_models import assert_same, logits_error, random_target, tiny_config

from redrafter_jax import InputError, load_target, save_target
from redrafter_jax.files.convert import convert
from redrafter_jax.files.parameters import dotted
from redrafter_jax.models.linear import QuantizedWeight, dequantize, parts_of
from redrafter_jax.parallel.mesh import make_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tiny_config(hidden_size=64, intermediate_size=128, head_dim=16)
QWEN2 = dataclasses.replace(CONFIG, attention_bias=True)
GEMMA3 = dataclasses.replace(
    CONFIG,
    qk_norm=True,
    hidden_act="gelu_pytorch_tanh",
    output_norms=True,
    zero_centered_norms=True,
    scaled_embeddings=True,
    tie_word_embeddings=True,
    rope_local_base_freq=1e4,
    query_pre_attn_scalar=16.0,
)
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}
SYMMETRIC = GPTQ | {"sym": True, "checkpoint_format": "gptq", "pack_dtype": "int32"}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "GEMM",
    "zero_point": True,
    "modules_to_not_convert": None,
}
PLAIN = ("lm_head", "embed_tokens")
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "stated", "plain"),
    [
        pytest.param(CONFIG, GPTQ, PLAIN, marks=pytest.mark.long),
        (CONFIG, GPTQ | {"desc_act": True, "group_size": 64}, PLAIN),
        pytest.param(CONFIG, SYMMETRIC, PLAIN, marks=pytest.mark.long),
        pytest.param(CONFIG, GPTQ_V2 | {"group_size": -1}, PLAIN, marks=pytest.mark.long),
        # Some modules are left plain; the head is quantized.
        (QWEN2, GPTQ_V2 | {"dynamic": {"-:.*o_proj": {}}}, ("embed_tokens", "o_proj")),
        pytest.param(CONFIG, AWQ, PLAIN, marks=pytest.mark.long),
        (CONFIG, AWQ | {"group_size": -1, "modules_to_not_convert": ["v_proj"]}, (*PLAIN, "v_")),
        (GEMMA3, AWQ | {"group_size": 64}, PLAIN),
    ],
)
def test_a_folder_is_loaded_in_its_own_bits(
    tmp_path: Path, config: Any, stated: dict[str, Any], plain: tuple[str, ...]
) -> None:
    folder = write_packed(tmp_path, random_target(config), stated, plain)
    loaded: Any = load_target(folder, "float32")
    numbers: Any = load_target(tmp_path / "numbers", "float32")
    weights, own = by_name(loaded), by_name(numbers)
    for name in ("layers.1.self_attn.k_proj", "layers.1.mlp.down_proj"):
        weight = weights[name]
        assert isinstance(weight, QuantizedWeight)
        assert weight.codes.dtype == jnp.int4
        assert (weight.minimum is None) == (stated.get("sym") is True)
        np.testing.assert_array_equal(dequantize(weight, jnp.float32), own[name])
    assert logits_error(loaded, numbers) < 1e-5


def by_name(model: Any) -> dict[str, Any]:
    """The weights as files have them, those apart that lie side by side."""
    flat = nnx.to_flat_state(model.params)
    return {dotted(path): value for path, value in chain.from_iterable(starmap(parts_of, flat))}


@pytest.mark.parametrize("stated", [SYMMETRIC, AWQ])
def test_converted_it_loads_the_same(tmp_path: Path, stated: dict[str, Any]) -> None:
    folder = write_packed(tmp_path, random_target(CONFIG), stated)
    (folder / "quantize_config.json").write_text(json.dumps(stated))
    convert(folder, tmp_path / "new")
    assert_same(load_target(tmp_path / "new", "float32"), load_target(folder, "float32"))
    described = json.loads((tmp_path / "new" / "config.json").read_text())
    assert described["quantization_config"] == {"quant_method": "redrafter"}
    assert not (tmp_path / "new" / "quantize_config.json").exists()
    with pytest.raises(InputError, match=r"is not a GGUF file, .* or leave the option out if"):
        convert(folder, tmp_path / "kept", keep_quantized=True)


@pytest.mark.parametrize("stated", [GPTQ, AWQ])
def test_every_device_of_a_mesh_gets_its_part(tmp_path: Path, stated: dict[str, Any]) -> None:
    folder = write_packed(tmp_path, random_target(CONFIG), stated)
    split: Any = load_target(folder, "float32", make_mesh(model=2))
    assert_same(split, load_target(folder, "float32"))
    weight = split.params["layers"][0]["mlp"]["down_proj"].get_value()
    shapes = [{shard.data.shape for shard in part.addressable_shards} for part in weight]
    assert shapes == [{(64, 64)}, {(2, 64)}, {(2, 64)}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target = random_target(tiny_config(hidden_size=64, intermediate_size=64, head_dim=16))
    return {
        stated["quant_method"]: write_packed(tmp_path_factory.mktemp("one"), target, stated)
        for stated in (GPTQ, AWQ)
    }


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        (GPTQ | {"bits": 8}, r"states bits=8 for quant_method 'gptq'; it must be 4\. Use another"),
        (GPTQ | {"group_size": 16}, "group_size=16 for quant_method 'gptq'; it must be 128 or"),
        (GPTQ | {"group_size": 32.0}, r"group_size=32\.0 for"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' for.* 'gptq_v2'"),
        (GPTQ | {"format": "gptq_p"}, "format='gptq_p' for quant_method 'gptq'; it must be 'gp"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True for"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype='int16' for"),
        (AWQ | {"version": "gemv"}, "version='gemv' for quant_method 'awq'; it must be 'gemm'"),
        (AWQ | {"bits": None, "w_bit": 3}, "w_bit=3 for quant_method 'awq'; it must be 4"),
        (AWQ | {"zero_point": False}, "zero_point=False for"),
        (AWQ | {"backend": "llm-awq"}, "backend='llm-awq' for"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'; supported: 'redrafter'"),
        ({"quant_method": ["gptq"]}, r"quant_method \['gptq'\]; supported: 'redrafter'"),
        ("gptq", r"config\.json states quantization_config='gptq'; it must be an object"),
    ],
)
def test_other_layouts_are_refused_by_name(
    tmp_path: Path, folders: dict[str, Path], stated: Any, sentence: str
) -> None:
    (tmp_path / "config.json").write_text((folders["gptq"] / "config.json").read_text())
    change_json(tmp_path / "config.json", quantization_config=stated)
    with pytest.raises(InputError, match=sentence):
        load_target(tmp_path)


ZEROS = f"{QUERY}.qzeros"
ACTIVATIONS = (np.arange(64)[::-1] // 32).astype(np.int32)


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        ("gptq", {ZEROS: None}, "holds '.*qweight', but '.*qzeros' is missing; the model is inc"),
        ("awq", {f"{QUERY}.scales": None}, "holds '.*qweight', but '.*scales' is missing"),
        ("gptq", {f"{QUERY}.qweight": None}, "holds no weight 'model.layers.0.*q_proj.weight'"),
        ("gptq", {f"{QUERY}.g_idx": ACTIVATIONS}, r"g_idx' orders inputs by their activations"),
        (
            "gptq",
            {f"{QUERY}.g_idx": ACTIVATIONS[:32]},
            r"g_idx' is I32 of shape \(32,\); with 64 in",
        ),
        ("gptq", {ZEROS: np.full((2, 8), -1, np.int32)}, "holds zero points that are stored as 15"),
        (
            "awq",
            {ZEROS: np.ones((1, 8), np.int32)},
            r"is I32 of shape \(1, 8\); with 64 inputs, 64",
        ),
        (
            "awq",
            {f"{QUERY}.scales": np.ones((2, 64), np.float32)},
            r"scales' is F32 of shape \(2, 64\); with 64 .* must be F16 or BF16 of shape \(2, 64\)",
        ),
        (
            "gptq",
            {f"{QUERY}.qweight": np.ones((7, 64), np.int32)},
            r"is I32 of shape \(7, 64\), for 56 inputs .* that the group size 32 divides",
        ),
        (
            "gptq",
            {
                f"{QUERY}.qweight": np.ones((8, 60), np.int32),
                ZEROS: np.ones((2, 7), np.int32),
                f"{QUERY}.scales": np.ones((2, 60), np.float16),
            },
            "for 64 inputs and 60 outputs; .* outputs that 8 divides",
        ),
        ("gptq", {f"{QUERY}.qweight": np.ones(7, np.int32)}, r"is I32 of shape \(7,\), for "),
        (
            "awq",
            {f"{QUERY}.qweight": np.ones((64, 8), np.int64)},
            r"is I64 of shape \(64, 8\); .* it must be I32 of",
        ),
        (
            "awq",
            {f"{QUERY}.weight": np.ones((64, 64), np.float16)},
            "the folder also holds '.*q_proj.weight'",
        ),
        (
            "gptq",
            {f"{QUERY}.weight_scale": np.ones((64, 1), np.float16)},
            "the folder also holds '.*_scale'",
        ),
        ("gptq", {f"{QUERY}.bias": np.ones(64, np.float16)}, r"weight '.*q_proj\.bias', which"),
    ],
)
def test_damaged_folders(
    tmp_path: Path, folders: dict[str, Path], method: str, changes: dict[str, Any], sentence: str
) -> None:
    folder = damaged(tmp_path, folders[method], changes)
    with pytest.raises(InputError, match=sentence):
        load_target(folder)


def test_zero_points_that_are_not_in_the_middle(tmp_path: Path) -> None:
    folder = write_packed(tmp_path, random_target(CONFIG), GPTQ)
    change_json(folder / "config.json", quantization_config=SYMMETRIC)
    with pytest.raises(InputError, match=r"zero points other than 8, but .* sym=true"):
        load_target(folder)


def test_what_early_folders_have_besides(tmp_path: Path) -> None:
    """A bias of zeros where the model has none, and no order of the inputs."""
    folder = write_packed(tmp_path, random_target(CONFIG), SYMMETRIC)
    changes: dict[str, Any] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        layer, _, part = name.rpartition(".")
        if part == "scales":
            changes |= {f"{layer}.g_idx": None, f"{layer}.bias": np.zeros_like(weight[0])}
    early = damaged(tmp_path / "early", folder, changes)
    assert_same(load_target(early, "float32"), load_target(folder, "float32"))


AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
MATRIX = f"{QUERY}.weight"


def write_fp8(folder: Path, stated: dict[str, Any], shape: Any, **changes: Any) -> Path:
    """A target in float8 in `fp8`, and with the same numbers in `numbers`.

    Args:
      folder: of both.
      stated: as `quantization_config`; `ignored_layers` and the embedding are plain.
      shape: of the scales of so many outputs.
      changes: weights that are stored instead, None being none.
    """
    save_target(random_target(tiny_config()), folder / "numbers")
    weights = load_arrays(folder / "numbers" / "model.safetensors")
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
        pytest.param(AUTO_FP8, lambda outputs: (), marks=pytest.mark.long),
        pytest.param(
            AUTO_FP8 | {"weight_block_size": None},
            lambda outputs: (outputs,),
            marks=pytest.mark.long,
        ),
        pytest.param(FBGEMM, lambda outputs: (outputs, 1), marks=pytest.mark.long),
    ],
)
def test_a_float8_folder_is_loaded_in_its_own_bits(
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
        (AUTO_FP8 | {"weight_block_size": [128, 128]}, {}, r"weight_block_size=\[128, 128\] for q"),
        (AUTO_FP8 | {"fmt": "e5m2"}, {}, "fmt='e5m2' for quant_method 'fp8'; it must be 'e4m3'"),
        (
            AUTO_FP8,
            {f"{MATRIX}_scale": None},
            "is quantized as F8_E4M3, but its scales '.*_scale'",
        ),
        (
            AUTO_FP8,
            {f"{MATRIX}_scale": jnp.ones(7)},
            r"_scale' has shape \(7,\); the scales of a",
        ),
        (
            AUTO_FP8,
            {MATRIX: jnp.ones(32, jnp.float8_e4m3fn)},
            r"numbers of shape \(32,\), but the con",
        ),
    ],
)
def test_other_and_damaged_float8_folders_are_refused(
    tmp_path: Path, stated: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    folder = write_fp8(tmp_path, stated, lambda outputs: (1,), **changes)
    with pytest.raises(InputError, match=sentence):
        load_target(folder)
