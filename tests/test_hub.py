import io
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from safetensors.numpy import load_file, save_file
from tiny_folders import change_json
from tiny_models import assert_same, cast, random_drafter, random_target, tiny_config

from redrafter_jax import (
    DrafterConfig,
    InputError,
    load_drafter,
    load_target,
    save_drafter,
    save_target,
)
from redrafter_jax.drafter import init_drafter
from redrafter_jax.hub import stored_shapes

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


def stored_tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape by name, from the file's header: its length in 8 bytes, then JSON."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}


# Targets


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


# Drafters


RNN_SHAPES = {"rnn_u.weight": [D, D], "rnn_u.bias": [D], "rnn_w.weight": [D, D]}


@pytest.mark.parametrize(
    ("exit_dim", "layers", "rnn", "expected"),
    [
        (
            5,
            2,
            True,
            RNN_SHAPES
            | {
                "input_proj.weight": [5, 2 * D],
                "input_proj.bias": [5],
                "lm_head.0.linear.weight": [5, 5],
                "lm_head.0.linear.bias": [5],
                "lm_head.1.linear.weight": [5, 5],
                "lm_head.1.linear.bias": [5],
                "lm_head.2.weight": [V, 5],
            },
        ),
        (
            2 * D,
            1,
            True,
            RNN_SHAPES
            | {
                "lm_head.0.linear.weight": [2 * D, 2 * D],
                "lm_head.0.linear.bias": [2 * D],
                "lm_head.1.weight": [V, 2 * D],
            },
        ),
        (2 * D, 0, False, {"lm_head.0.weight": [V, 2 * D]}),
        (
            D,
            0,
            False,
            {
                "input_proj.weight": [D, 2 * D],
                "input_proj.bias": [D],
                "lm_head.0.weight": [V, D],
            },
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafters_are_stored_in_apples_layout(
    tmp_path: Path,
    exit_dim: int,
    layers: int,
    rnn: bool,
    expected: dict[str, list[int]],
    dtype: str,
) -> None:
    config = DrafterConfig(
        V, D, exit_dim=exit_dim, num_draft_layers=layers, cell="simple" if rnn else "sum"
    )
    drafter = cast(random_drafter(config), dtype)
    save_drafter(drafter, tmp_path)
    code = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert stored_tensors(tmp_path / "model.safetensors") == {
        name: (code, shape) for name, shape in expected.items()
    }
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated["model_type"] == "recurrent_drafting_drafter"
    assert (stated["vocab_size"], stated["hidden_size"]) == (V, D)
    assert (stated["exit_dim"], stated["num_draft_layers"]) == (exit_dim, layers)
    assert stated["rnn"] is rnn
    assert "num_lookback_tokens" in stated
    assert_same(load_drafter(tmp_path, dtype=dtype), drafter)


@pytest.fixture
def apple_folder(tmp_path: Path) -> Path:
    """A drafter folder as Apple's PyTorch code leaves it, written by hand: y = W x + b."""
    random = np.random.default_rng(0)
    shapes = RNN_SHAPES | {
        "input_proj.weight": [5, 2 * D],
        "input_proj.bias": [5],
        "lm_head.0.linear.weight": [5, 5],
        "lm_head.0.linear.bias": [5],
        "lm_head.1.weight": [V, 5],
    }
    save_file(
        {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": V,
        "hidden_size": D,
        "exit_dim": 5,
        "num_draft_layers": 1,
        "num_lookback_tokens": -1,
        "rnn": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_apples_drafters_compute_what_their_matrices_say(apple_folder: Path) -> None:
    head = load_drafter(apple_folder, dtype="float32").merge()
    weights = load_file(apple_folder / "model.safetensors")
    context, state, embedding = np.random.default_rng(1).normal(size=(3, D)).astype(np.float32)

    stepped = oracles.silu(
        weights["rnn_w.weight"] @ embedding
        + weights["rnn_u.weight"] @ state
        + weights["rnn_u.bias"]
    )
    np.testing.assert_allclose(
        head.step(jnp.asarray(state), jnp.asarray(embedding)), stepped, rtol=1e-4, atol=1e-5
    )
    x = weights["input_proj.weight"] @ np.concatenate([context, state]) + weights["input_proj.bias"]
    x = x + oracles.silu(weights["lm_head.0.linear.weight"] @ x + weights["lm_head.0.linear.bias"])
    np.testing.assert_allclose(
        head.logits(jnp.asarray(context), jnp.asarray(state)),
        weights["lm_head.1.weight"] @ x,
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_drafter_of_some_tokens_comes_back(tmp_path: Path) -> None:
    config = DrafterConfig(V, D, exit_dim=5, num_draft_layers=1, draft_tokens=(0, 3, 4))
    drafter = init_drafter(config, 0)
    save_drafter(drafter, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["draft_tokens"] == [0, 3, 4]
    assert load_file(tmp_path / "model.safetensors")["lm_head.1.weight"].shape == (3, 5)
    loaded = load_drafter(tmp_path, dtype="float32")
    assert loaded.config == config
    np.testing.assert_array_equal(loaded.merge().draft_token_ids, [0, 3, 4])
    np.testing.assert_array_equal(
        loaded.merge().lm_head.kernel[...], drafter.merge().lm_head.kernel[...]
    )


@pytest.mark.parametrize(
    ("variant", "shapes"),
    [
        (
            {"cell": "gru", "head": "low_rank", "head_rank": 3},
            {
                "gru_w.weight": [3 * D, D],
                "gru_w.bias": [3 * D],
                "gru_u.weight": [3 * D, D],
                "gru_u.bias": [3 * D],
                "head_proj.weight": [3, 5],
                "lm_head.0.weight": [V, 3],
            },
        ),
        ({"cell": "sum", "head": "target", "draft_tokens": (1, 2)}, {"head_proj.weight": [D, 5]}),
        (
            {"context_layers": (0, 2)},
            RNN_SHAPES | {"context_proj.weight": [D, 3 * D], "lm_head.0.weight": [V, 5]},
        ),
    ],
    ids=["gated, in two factors", "the target's head", "three layers"],
)
def test_drafters_beyond_apples_layout_say_so_and_come_back(
    tmp_path: Path, variant: dict[str, Any], shapes: dict[str, list[int]]
) -> None:
    drafter = random_drafter(DrafterConfig(V, D, exit_dim=5, num_draft_layers=0, **variant))
    save_drafter(drafter, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    shapes |= {"input_proj.weight": [5, 2 * D], "input_proj.bias": [5]}
    assert {name: list(weight.shape) for name, weight in stored.items()} == shapes
    stated = json.loads((tmp_path / "config.json").read_text())
    for name, value in variant.items():
        if (name, value) != ("cell", "sum"):  # Apple's rnn=false
            assert stated[name] == (list(value) if isinstance(value, tuple) else value)
    assert stated["rnn"] is (variant.get("cell") != "sum")
    loaded = load_drafter(tmp_path, dtype="float32")
    assert loaded.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, drafter.params)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(InputError, match=r"model\.safetensors could not be written \("):
            save_drafter(init_drafter(DrafterConfig(100, 50, 40, 1), 0), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Folders that cannot be used


@pytest.mark.parametrize("load", [load_target, load_drafter])
def test_a_folder_without_config_json(tmp_path: Path, load: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"config\.json is missing; a model folder needs it\.$"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "int8", "fp32"])
def test_other_dtypes_are_refused(target_folder: Path, dtype: str) -> None:
    with pytest.raises(InputError, match=f"dtype '{dtype}' is not supported; use 'float32' or "):
        load_target(target_folder, dtype=dtype)


def test_a_folder_without_weights(target_folder: Path) -> None:
    (target_folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors is missing; .*\.$"):
        load_target(target_folder)


@pytest.mark.parametrize("kept", [0, 5, 100, -10])
def test_a_truncated_file(target_folder: Path, kept: int) -> None:
    path = target_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"model\.safetensors is truncated or no safetensors file"):
        load_target(target_folder)


def test_a_missing_weight(target_folder: Path) -> None:
    path = target_folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(InputError, match=r"no weight 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_target(target_folder)


def add_weights(folder: Path, *names: str) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | dict.fromkeys(names, np.zeros(3, np.float32)), path)


def test_weights_that_the_model_has_no_place_for(target_folder: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    add_weights(target_folder, bias)
    with pytest.raises(InputError, match=f"holds the weight '{bias}', for which the model"):
        load_target(target_folder)
    add_weights(target_folder, "visual.patch_embed.weight")
    with pytest.raises(InputError, match=f"holds the weight '{bias}' and 1 more, for which"):
        load_target(target_folder)


def test_rotary_frequencies_may_lie_in_the_file(target_folder: Path) -> None:
    add_weights(target_folder, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert_same(load_target(target_folder, dtype="float32"), random_target(CONFIG))


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


def test_a_weight_of_the_wrong_shape(target_folder: Path) -> None:
    path = target_folder / "model.safetensors"
    tensors = load_file(path)
    # Transposed, a [24, 8] matrix must not slip through either.
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((D, 24), np.float32)
    save_file(tensors, path)
    with pytest.raises(
        InputError,
        match=r"q_proj\.weight' has shape \(8, 24\), config\.json asks for \(24, 8\)\.$",
    ):
        load_target(target_folder)


def test_a_drafter_wider_than_its_config_says(apple_folder: Path) -> None:
    change_json(apple_folder / "config.json", exit_dim=6)
    with pytest.raises(InputError, match=r"has shape .*5.*, config\.json asks for .*6.*\.$"):
        load_drafter(apple_folder)


def test_a_missing_shard(target_folder: Path) -> None:
    shard(target_folder)
    (target_folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors is missing; .*\.$"):
        load_target(target_folder)


def test_a_truncated_shard(target_folder: Path) -> None:
    shard(target_folder)
    path = target_folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model-00001-of-00002\.safetensors is truncated"):
        load_target(target_folder)


def test_an_index_that_forgets_a_weight(target_folder: Path) -> None:
    shard(target_folder)
    path = target_folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"the weight 'model\.norm\.weight', which .*index"):
        load_target(target_folder)


def test_an_index_that_points_to_the_wrong_shard(target_folder: Path) -> None:
    shard(target_folder)
    path = target_folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (index["weight_map"]["model.norm.weight"],) = files - {index["weight_map"]["model.norm.weight"]}
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"holds no weight 'model\.norm\.weight', which the index"):
        load_target(target_folder)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({}, "does not state 'weight_map'"),
        ({"weight_map": [1]}, r"states weight_map=\[1\]; it must be an object"),
        ({"weight_map": {"lm_head.weight": 1}}, r"states lm_head\.weight=1; it must be a string"),
    ],
)
def test_an_index_without_a_map(target_folder: Path, index: dict[str, Any], sentence: str) -> None:
    shard(target_folder)
    (target_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=rf"model\.safetensors\.index\.json {sentence}"):
        load_target(target_folder)
