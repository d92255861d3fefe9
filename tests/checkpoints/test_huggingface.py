"""Targets in files, as Hugging Face has them, and folders that cannot be used."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_folders import change_json, stored_tensors
from tiny_models import assert_same, cast, random_target, tiny_config

from redrafter_jax import (
    InputError,
    load_drafter,
    load_target,
    save_target,
)
from redrafter_jax.checkpoints.huggingface import stored_shapes

D, V = 8, 13
CONFIG = tiny_config(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=32,
    rope_theta=5000.0,
    eos_token_ids=(2, 7),
)


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    save_target(random_target(CONFIG), tmp_path / "target")
    return tmp_path / "target"


LAYER_SHAPES = {
    "input_layernorm.weight": [D],
    "mlp.down_proj.weight": [D, 12],
    "mlp.gate_proj.weight": [12, D],
    "mlp.up_proj.weight": [12, D],
    "post_attention_layernorm.weight": [D],
    "self_attn.k_proj.weight": [12, D],
    "self_attn.o_proj.weight": [D, 24],
    "self_attn.q_proj.weight": [24, D],
    "self_attn.v_proj.weight": [12, D],
}
TARGET_SHAPES = {"model.embed_tokens.weight": [V, D], "model.norm.weight": [D]} | {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in LAYER_SHAPES.items()
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_targets_are_stored_as_hugging_face_stores_them(
    tmp_path: Path, tied: bool, dtype: str
) -> None:
    config = tiny_config(**(vars(CONFIG) | {"tie_word_embeddings": tied}))
    target = cast(random_target(config), dtype)
    save_target(target, tmp_path)
    head = {} if tied else {"lm_head.weight": [V, D]}
    code = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert stored_tensors(tmp_path / "model.safetensors") == {
        name: (code, shape) for name, shape in (TARGET_SHAPES | head).items()
    }
    assert_same(load_target(tmp_path, dtype=dtype), target)


def test_stored_matrices_are_out_by_in(target_folder: Path) -> None:
    decoder = random_target(CONFIG).merge()
    stored = load_file(target_folder / "model.safetensors")
    attention = decoder.layers[1].self_attn
    np.testing.assert_array_equal(
        stored["model.layers.1.self_attn.k_proj.weight"], np.asarray(attention.k_proj[...]).T
    )
    np.testing.assert_array_equal(stored["lm_head.weight"], np.asarray(decoder.lm_head[...]).T)
    np.testing.assert_array_equal(
        stored["model.embed_tokens.weight"], np.asarray(decoder.embed_tokens[...])
    )


def test_target_config_json_speaks_hugging_faces_fields(target_folder: Path) -> None:
    stated = json.loads((target_folder / "config.json").read_text())
    assert stated["model_type"] == "llama"
    assert stated["architectures"] == ["LlamaForCausalLM"]
    assert stated["torch_dtype"] == "float32"
    for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    ):
        assert stated[field] == getattr(CONFIG, field), field
    assert stated["eos_token_id"] == [2, 7]


def test_a_target_is_converted_to_the_dtype_asked_for(target_folder: Path) -> None:
    assert_same(load_target(target_folder), cast(random_target(CONFIG), jnp.bfloat16))
    assert_same(load_target(target_folder, dtype="float32"), random_target(CONFIG))


def shard(folder: Path) -> None:
    """Split the single file into two shards and an index, as transformers does."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"attention_bias": True, "attention_output_bias": True},
        {"qk_norm": True},
    ],
)
def test_biases_and_norms_are_stored_as_hugging_face_stores_them(
    tmp_path: Path, changes: dict[str, bool]
) -> None:
    target = random_target(tiny_config(**(vars(CONFIG) | changes)))
    save_target(target, tmp_path)
    added = {}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.self_attn"
        if changes.get("attention_bias"):
            added |= {f"{prefix}.q_proj.bias": [24], f"{prefix}.k_proj.bias": [12]}
            added |= {f"{prefix}.v_proj.bias": [12]}
        if changes.get("attention_output_bias"):
            added |= {f"{prefix}.o_proj.bias": [D]}
        if changes.get("qk_norm"):
            added |= {f"{prefix}.q_norm.weight": [6], f"{prefix}.k_norm.weight": [6]}
    expected = TARGET_SHAPES | {"lm_head.weight": [V, D]} | added
    stored = stored_tensors(tmp_path / "model.safetensors")
    assert {name: shape for name, (_, shape) in stored.items()} == expected
    shapes = stored_shapes(target.config)
    assert {name: list(shape) for name, shape in shapes.items()} == expected
    assert_same(load_target(tmp_path, dtype="float32"), target)


def test_shards_are_read_through_their_index(target_folder: Path) -> None:
    shard(target_folder)
    assert_same(load_target(target_folder, dtype="float32"), random_target(CONFIG))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("watched", [True, False])
def test_a_bar_is_drawn_where_somebody_watches(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    screen = Terminal() if watched else io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    load_target(target_folder)
    assert ("target:" in screen.getvalue()) == watched


# Folders that cannot be used


@pytest.mark.parametrize("load", [load_target, load_drafter])
def test_a_folder_without_config_json(tmp_path: Path, load: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"config\.json is missing; a model folder needs it\.$"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "int8", "fp32"])
def test_other_dtypes_are_refused(target_folder: Path, dtype: str) -> None:
    with pytest.raises(InputError, match=f"dtype '{dtype}' is not supported; use 'float32' or "):
        load_target(target_folder, dtype=dtype)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kept", [None, 0, 5, 100, -10])
def test_a_missing_or_truncated_file(target_folder: Path, sharded: bool, kept: int | None) -> None:
    if sharded:
        shard(target_folder)
    path = target_folder / ("model-00002-of-00002" if sharded else "model")
    path = path.with_suffix(".safetensors")
    content = path.read_bytes()
    path.unlink()
    if kept is not None:
        path.write_bytes(content[:kept])
    problem = "missing; " if kept is None else "truncated or no safetensors file"
    with pytest.raises(InputError, match=rf"{path.name} is {problem}"):
        load_target(target_folder)


def change_weights(folder: Path, added: dict[str, tuple[int, ...]], removed: str = "") -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors |= {name: np.zeros(shape, np.float32) for name, shape in added.items()}
    tensors.pop(removed, None)
    save_file(tensors, path)


QUERY, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("added", "removed", "sentence"),
    [
        ({}, UP, f"holds no weight '{UP}'; the folder is incomplete"),
        ({f"{QUERY}.bias": (24,)}, "", f"holds the weight '{QUERY}.bias', for which the model"),
        (
            {f"{QUERY}.bias": (24,), "visual.weight": (3,)},
            "",
            f"holds the weight '{QUERY}.bias' and 1 more, for which",
        ),
        # Transposed, a [24, 8] matrix must not slip through either.
        (
            {f"{QUERY}.weight": (D, 24)},
            "",
            r"q_proj\.weight' has shape \(8, 24\), config\.json asks for \(24, 8\)\.$",
        ),
    ],
)
def test_weights_that_do_not_fit_the_model(
    target_folder: Path, added: dict[str, tuple[int, ...]], removed: str, sentence: str
) -> None:
    change_weights(target_folder, added, removed)
    with pytest.raises(InputError, match=sentence):
        load_target(target_folder)


def test_rotary_frequencies_may_lie_in_the_file(target_folder: Path) -> None:
    change_weights(target_folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": (3,)})
    assert_same(load_target(target_folder, dtype="float32"), random_target(CONFIG))


@pytest.mark.parametrize("layers", [10_000, 1_000_000_000])
def test_more_layers_than_weights_are_refused_before_they_are_made(
    target_folder: Path, layers: int
) -> None:
    change_json(target_folder / "config.json", num_hidden_layers=layers)
    with pytest.raises(InputError, match=rf"config\.json states num_hidden_layers={layers}"):
        load_target(target_folder)


def test_a_tied_head_may_lie_in_the_file_if_it_is_the_embedding(tmp_path: Path) -> None:
    target = random_target(tiny_config(**(vars(CONFIG) | {"tie_word_embeddings": True})))
    save_target(target, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.copy()}, path)
    assert_same(load_target(tmp_path, dtype="float32"), target)

    other = embedding.copy()
    other[-1, -1] += 1
    for head, sentence in (
        (other, r"'lm_head\.weight' is not the same as 'model\.embed_tokens\.weight', though"),
        (embedding.astype(np.float16), r"'lm_head\.weight' is not the same as"),
        (np.zeros(3, np.float32), r"'lm_head\.weight' has shape \(3,\), .* asks for \(13, 8\)"),
    ):
        save_file(tensors | {"lm_head.weight": head}, path)
        with pytest.raises(InputError, match=sentence):
            load_target(tmp_path)


ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lm_head.weight": ...}, r"the weight 'lm_head\.weight', which .*index"),
        ({"lm_head.weight": TWO}, r"holds no weight 'lm_head\.weight', which the index"),
        ({"lm_head.weight": 1}, r"index\.json states lm_head\.weight=1; it must be a string"),
        (None, r"index\.json does not state 'weight_map'"),
        ([1], r"index\.json states weight_map=\[1\]; it must be an object"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(
    target_folder: Path, changes: Any, sentence: str
) -> None:
    shard(target_folder)
    path = target_folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    assert weight_map["lm_head.weight"] == ONE
    if isinstance(changes, dict):
        changes = {name: file for name, file in (weight_map | changes).items() if file is not ...}
    path.write_text(json.dumps({"weight_map": changes}))
    with pytest.raises(InputError, match=sentence):
        load_target(target_folder)
