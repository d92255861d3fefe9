"""Quantized weights in files: written, loaded again, kept from GGUF, refused."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_folders import write_packed
from safetensors.flax import load_file, save_file
from tiny_folders import damaged, write_index
from tiny_gguf import CONFIG as GGUF_CONFIG
from tiny_gguf import tokenizer_fields, write_random
from tiny_models import assert_same, logits_error, random_drafter, random_target, tiny_config

from redrafter_jax import (
    InputError,
    RecurrentConfig,
    load_drafter,
    load_target,
    save_drafter,
    save_target,
)
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.drafters.medusa import MedusaConfig
from redrafter_jax.files.convert import convert
from redrafter_jax.files.gguf_blocks import BLOCK_KINDS
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.linear import QuantizedWeight, dequantize
from redrafter_jax.models.quantize import quantize_model

CONFIG = tiny_config(hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        pytest.param(CONFIG, Quantization.of("int8"), marks=pytest.mark.long),
        (CONFIG, Quantization("int4", None, "int4")),
        pytest.param(CONFIG, Quantization("fp8", "fp8", "fp8"), marks=pytest.mark.long),
        (TIED, Quantization("int4", "int4")),
    ],
)
def test_a_quantized_target_loads_bit_for_bit(
    tmp_path: Path, config: Any, quantization: Quantization
) -> None:
    target = random_target(config)
    save_target(target, tmp_path / "plain")
    told, _ = convert(tmp_path / "plain", tmp_path / "new", quantization=quantization)
    expected = quantize_model(target, quantization)
    loaded = load_target(tmp_path / "new", "float32")
    assert_same(loaded, expected)
    size = sum(
        math.ceil(leaf.size * (0.5 if leaf.dtype == jnp.int4 else leaf.dtype.itemsize))
        for leaf in jax.tree.leaves(expected)
    )
    plain = sum(leaf.nbytes for leaf in jax.tree.leaves(target))
    assert f"{size:,} bytes" in told
    assert f"quantized from {plain:,} bytes of" in told
    # Written and converted again, nothing changes.
    save_target(loaded, tmp_path / "saved")
    assert_same(load_target(tmp_path / "saved", "float32"), expected)
    convert(tmp_path / "new", tmp_path / "again")
    assert_same(load_target(tmp_path / "again", "float32"), expected)
    # Norms alone take another dtype.
    rounded = load_target(tmp_path / "new")
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} >= {jnp.dtype(jnp.bfloat16)}
    with pytest.raises(InputError, match="new is quantized already; convert the model that it was"):
        convert(tmp_path / "new", tmp_path / "twice", quantization=Quantization.of("int8"))


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (RecurrentConfig(24, hidden_size=32, exit_dim=64, num_draft_layers=1), "int8"),
        (MedusaConfig(24, hidden_size=32, num_heads=2, num_draft_layers=1), "int4"),
    ],
)
def test_a_quantized_drafter_loads_bit_for_bit(tmp_path: Path, config: Any, form: Any) -> None:
    drafter, quantization = random_drafter(config), Quantization.of(form)
    save_drafter(drafter, tmp_path / "plain")
    *_, unknown = convert(tmp_path / "plain", tmp_path / "new", quantization=quantization)
    assert "Apple's code cannot load it" in unknown
    loaded = load_drafter(tmp_path / "new", "float32")
    assert_same(loaded, quantize_model(drafter, quantization))
    save_drafter(loaded, tmp_path / "saved")
    assert_same(load_drafter(tmp_path / "saved", "float32"), loaded)
    described = json.loads((tmp_path / "new" / "config.json").read_text())
    assert described["quantization_config"] == {
        "quant_method": "redrafter",
        "layers": form,
        "embedding": "int8",
        "head": "int8",
    }
    with pytest.raises(InputError, match=r"is a drafter with quantized weights|with Medusa heads"):
        convert(tmp_path / "new", tmp_path / "apple", for_apple=True)


def test_numbers_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    target = random_target(tiny_config())
    save_target(target, tmp_path / "plain")
    with pytest.raises(InputError, match=r"'.*down_proj.*' has 48 inputs, which no group size"):
        convert(tmp_path / "plain", tmp_path / "new", quantization=Quantization.of("int4"))
    path = tmp_path / "plain" / "model.safetensors"
    weights = load_file(path)
    weights[QUERY] = weights[QUERY].at[3, 2].set(jnp.nan)
    save_file(weights, path)
    with pytest.raises(InputError, match=r"q_proj\.weight' holds numbers that are not finite, wh"):
        convert(tmp_path / "plain", tmp_path / "new", quantization=Quantization.of("int8"))


@pytest.fixture(scope="module")
def int4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    save_target(random_target(CONFIG), folder / "plain")
    convert(folder / "plain", folder / "int4", quantization=Quantization.of("int4"))
    return folder / "int4"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{QUERY}_scale": None}, "is quantized as U8, but its scales '.*_scale' are missing"),
        (
            {f"{QUERY}_scale": jnp.ones((64, 7))},
            r"_scale' has shape \(64, 7\); the scales of a wei",
        ),
        ({f"{QUERY}_scale": jnp.ones((64, 1), jnp.int8)}, "_scale' is stored as I8; scales and"),
        ({f"{QUERY}_scale": np.ones((64, 1))}, "_scale' is stored as F64; .* one of F32, F16,"),
        ({f"{QUERY}_minimum": jnp.ones((64, 2))}, r"_minimum' has shape \(64, 2\), but the"),
        ({QUERY: jnp.ones((64, 31), jnp.uint8)}, r"quantized numbers of shape \(64, 62\), but the"),
        ({QUERY: jnp.ones((64, 64), jnp.int32)}, "has scales and is stored as I32; the supported"),
        ({QUERY: jnp.ones((64, 64))}, "has scales and is stored as F32; .* are I8, F8_E4M3"),
    ],
)
def test_damaged_quantized_weights(
    tmp_path: Path, int4_folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    folder = damaged(tmp_path, int4_folder, changes)
    with pytest.raises(InputError, match=sentence):
        load_target(folder)


@pytest.mark.parametrize("endings", [(".weight_scale", ".weight_minimum"), (".scales", ".qzeros")])
def test_parts_of_a_weight_in_files_of_their_own(
    tmp_path: Path, int4_folder: Path, endings: tuple[str, str]
) -> None:
    words = {"quant_method": "awq", "bits": 4, "group_size": 32}
    is_ours = endings[0].startswith(".weight")
    whole = int4_folder if is_ours else write_packed(tmp_path, random_target(CONFIG), words)
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text((whole / "config.json").read_text())
    shards: dict[str, dict[str, Any]] = {}
    for name, weight in load_file(whole / "model.safetensors").items():
        apart = [ending for ending in endings if name.endswith(ending)]
        shards.setdefault(f"{(*apart, 'others')[0]}.safetensors", {})[name] = weight
    for file, weights in shards.items():
        save_file(weights, folder / file)
    placed = {name: file for file, weights in shards.items() for name in weights}
    write_index(folder / "model.safetensors.index.json", placed)
    expected = load_target(whole, "float32")
    assert_same(load_target(folder, "float32"), expected)
    convert(folder, tmp_path / "new")
    assert_same(load_target(tmp_path / "new", "float32"), expected)
    # What is kept for a model goes by its digest.
    digests = {open_target(folder).digest()}
    for ending in endings:
        name = QUERY.removesuffix(".weight") + ending
        weights = shards[f"{ending}.safetensors"]
        save_file(weights | {name: weights[name] + 1}, folder / f"{ending}.safetensors")
        digests.add(open_target(folder).digest())
    assert len(digests) == 3


SHORT = ("Q4_1", "Q4_K")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] * (kind not in SHORT)) for kind in BLOCK_KINDS],
)
def test_blocks_of_gguf_are_kept(tmp_path: Path, kind: str) -> None:
    """Against a target of the numbers that the `gguf` package makes of the same blocks."""
    path = tmp_path / "model.gguf"
    write_random(path, kind)
    plain = load_target(path, "float32")
    kept: Any = load_target(path, "float32", keep_quantized=True)
    # Products of two numbers are rounded to float16.
    tolerance = 1e-6 if kind.endswith(("_0", "_1")) else 2**-10
    layer, own = kept.params["layers"][0], plain.params["layers"][0]
    for variable, expected in (
        (kept.params["embed_tokens"], plain.params["embed_tokens"]),
        (kept.params["lm_head"], plain.params["lm_head"]),
        (layer["self_attn"]["qkv_proj"], own["self_attn"]["qkv_proj"]),
        (layer["mlp"]["down_proj"], own["mlp"]["down_proj"]),
    ):
        weight, numbers = variable.get_value(), np.asarray(expected[...])
        assert isinstance(weight, QuantizedWeight)
        close = np.abs(np.asarray(dequantize(weight, jnp.float32)) - numbers).max()
        assert close <= tolerance * np.abs(numbers).max()
    if tolerance < 2**-10:
        assert logits_error(kept, plain) < 1e-5
    convert(path, tmp_path / "folder", keep_quantized=True)
    assert_same(load_target(tmp_path / "folder", "float32"), kept)


def test_blocks_that_cannot_be_kept_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random(path, "IQ4_NL")
    with pytest.raises(InputError, match="stored as IQ4_NL, but only Q8"):
        load_target(path, keep_quantized=True)


@pytest.mark.long
def test_the_command_tells_what_changes(tmp_path: Path, run_redrafter: Any) -> None:
    config = dataclasses.replace(GGUF_CONFIG, vocab_size=900, max_position_embeddings=512)
    source, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    write_random(source, "F16", config, **tokenizer_fields("smollm"))
    text.write_text("the house of the other is what they have seen there, " * 60)
    folder = tmp_path / "new"
    options = ("--quantize", "int8", "--quantize-head", "none", "--text", str(text))
    short = tmp_path / "short.txt"
    short.write_text("the house of the other")
    code, _, err = run_redrafter("convert", str(source), str(folder), *options[:-1], str(short))
    assert code == 2
    assert "short.txt has " in err
    assert not folder.exists()
    _, out, err = run_redrafter("convert", str(source), str(folder), *options)
    assert not err
    told, written, loss, greedy = out.splitlines()
    assert "quantized from" in told
    assert "Written: model.safetensors, config.json" in written
    assert "tokens of held-out text the loss goes from " in loss
    assert "greedy continuations of 64 tokens" in greedy
    loaded: Any = load_target(folder, "float32")
    assert isinstance(loaded.params["embed_tokens"].get_value(), QuantizedWeight)
    assert not isinstance(loaded.params["lm_head"].get_value(), QuantizedWeight)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--quantize-head", "int8"],
            "--quantize-head is for --quantize int8, int4 or fp8; give --quantize too",
        ),
        (
            ["--text", "none.txt"],
            "--text measures what --quantize changes; give both, or leave --text out",
        ),
        (["--quantize", "int8", "--text", "none.txt"], "Cannot read none.txt: No such file"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, run_redrafter: Any, options: list[str], sentence: str
) -> None:
    code, _, err = run_redrafter("convert", "nowhere", str(tmp_path / "new"), *options)
    assert code == 2
    assert sentence in err
