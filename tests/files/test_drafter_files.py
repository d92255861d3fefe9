"""Drafters in files: Apple's layout and what goes beyond it, and Medusa heads."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from safetensors.numpy import load_file
from tiny_folders import change_json, stored_tensors
from tiny_models import assert_same, cast, random_drafter
from torch_archives import write_archive

from redrafter_jax import InputError, MedusaConfig, RecurrentConfig, load_drafter, save_drafter
from redrafter_jax.files.convert import convert
from redrafter_jax.files.drafter_files import find_drafter
from redrafter_jax.files.fields import read_json

D, V = 8, 13
CONFIG = RecurrentConfig(V, D, exit_dim=5, num_draft_layers=1)
RNN_SHAPES = {"rnn_u.weight": [D, D], "rnn_u.bias": [D], "rnn_w.weight": [D, D]}
INPUT_SHAPES = {"input_proj.weight": [5, 2 * D], "input_proj.bias": [5]}


@pytest.mark.parametrize(
    ("config", "dtype", "shapes", "stated"),
    [
        (
            RecurrentConfig(V, D, exit_dim=5, num_draft_layers=2),
            "float32",
            RNN_SHAPES
            | INPUT_SHAPES
            | {
                "lm_head.0.linear.weight": [5, 5],
                "lm_head.0.linear.bias": [5],
                "lm_head.1.linear.weight": [5, 5],
                "lm_head.1.linear.bias": [5],
                "lm_head.2.weight": [V, 5],
            },
            {"rnn": True},
        ),
        (
            RecurrentConfig(V, D, exit_dim=2 * D, num_draft_layers=0, cell="sum"),
            "bfloat16",
            {"lm_head.0.weight": [V, 2 * D]},
            {"rnn": False},
        ),
        # Apple's code does not know the following.
        (
            RecurrentConfig(V, D, 5, 0, cell="gru", head="low_rank", head_rank=3),
            "float32",
            INPUT_SHAPES
            | {
                "gru_w.weight": [3 * D, D],
                "gru_w.bias": [3 * D],
                "gru_u.weight": [3 * D, D],
                "gru_u.bias": [3 * D],
                "head_proj.weight": [3, 5],
                "lm_head.0.weight": [V, 3],
            },
            {"rnn": True, "cell": "gru", "head": "low_rank", "head_rank": 3},
        ),
        (
            RecurrentConfig(V, D, 5, 0, cell="sum", head="target", draft_tokens=(1, 2)),
            "float32",
            INPUT_SHAPES | {"head_proj.weight": [D, 5]},
            {"rnn": False, "head": "target", "draft_tokens": [1, 2]},
        ),
        (
            RecurrentConfig(V, D, 5, 0, context_layers=(0, 2), draft_tokens=(0, 3, 4)),
            "float32",
            RNN_SHAPES
            | INPUT_SHAPES
            | {"context_proj.weight": [D, 3 * D], "lm_head.0.weight": [3, 5]},
            {"rnn": True, "context_layers": [0, 2], "draft_tokens": [0, 3, 4]},
        ),
    ],
)
def test_drafters_are_stored_in_apples_layout_and_say_what_goes_beyond(
    tmp_path: Path,
    config: RecurrentConfig,
    dtype: str,
    shapes: dict[str, list[int]],
    stated: dict[str, Any],
) -> None:
    drafter = cast(random_drafter(config), dtype)
    save_drafter(drafter, str(tmp_path))
    code = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert stored_tensors(tmp_path / "model.safetensors") == {
        name: (code, shape) for name, shape in shapes.items()
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": V,
        "hidden_size": D,
        "num_lookback_tokens": -1,
        "exit_dim": config.exit_dim,
        "num_draft_layers": config.num_draft_layers,
        **stated,
        "torch_dtype": dtype,
    }
    assert_same(load_drafter(tmp_path, dtype=dtype), drafter)


def test_to_fields_beyond_apples_layout_null_is_as_good_as_nothing(tmp_path: Path) -> None:
    save_drafter(random_drafter(CONFIG), tmp_path)
    ours = ("cell", "head", "head_rank", "context_layers", "draft_tokens")
    change_json(tmp_path / "config.json", **dict.fromkeys(ours))
    assert load_drafter(tmp_path).config == CONFIG


def test_arrays_of_numpy_are_written_as_those_of_jax(tmp_path: Path) -> None:
    drafter = random_drafter(CONFIG)
    save_drafter(replace(drafter, params=jax.tree.map(np.asarray, drafter.params)), tmp_path)
    assert_same(load_drafter(tmp_path, dtype="float32"), drafter)


def test_a_folder_that_was_half_replaced_holds_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter(CONFIG)
    save_drafter(drafter, tmp_path)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(drafter, tmp_path)
    with pytest.raises(InputError, match=r"config\.json"):
        load_drafter(tmp_path)


def test_a_full_disk_is_one_sentence_and_keeps_what_was_there(tmp_path: Path) -> None:
    earlier = random_drafter(CONFIG)
    save_drafter(earlier, tmp_path)
    files = sorted(tmp_path.iterdir())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(InputError, match=r"model\.safetensors could not be written \("):
            save_drafter(random_drafter(RecurrentConfig(100, 50, 40, 1)), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(tmp_path.iterdir()) == files
    assert_same(load_drafter(tmp_path, "float32"), earlier)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"exit_dim": 6}, r"has shape .*5.*, but the configuration asks for .*6.*\.$"),
        ({"exit_dim": ...}, "does not state 'exit_dim'"),
        ({"cell": "lstm"}, r"cell is 'lstm'; it must be one of simple, gru, sum\.$"),
        ({"head": []}, r"head is \[\]; it must be one of own, target, low_rank\.$"),
        ({"rnn": False, "cell": "gru"}, r"cell is 'gru', but rnn is False; .* must be True"),
        ({"head": "low_rank", "head_rank": 2.5}, r"head_rank is 2\.5; it must be a whole number"),
        ({"draft_tokens": 7}, "draft_tokens is 7; it must be .*, in files a list"),
        (
            {"draft_tokens": [0, True]},
            r"draft_tokens is \[0, True\]; it must be a tuple of whole numbers",
        ),
        (
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            "of quant_method 'hqq'; supported: 'redrafter'",
        ),
    ],
)
def test_a_drafter_that_is_not_what_its_config_says(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    save_drafter(random_drafter(CONFIG), tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(InputError, match=sentence):
        load_drafter(tmp_path)


MEDUSA = MedusaConfig(V, D, num_heads=2, num_draft_layers=1)
SIZES = {"vocab_size": V, "hidden_size": D}


def test_heads_are_stored_under_the_names_of_their_authors(tmp_path: Path) -> None:
    heads = cast(random_drafter(MEDUSA), "bfloat16")
    save_drafter(heads, tmp_path)
    shapes = {"0.linear.weight": [D, D], "0.linear.bias": [D], "1.weight": [V, D]}
    assert stored_tensors(tmp_path / "model.safetensors") == {
        f"{head}.{name}": ("BF16", shape) for head in (0, 1) for name, shape in shapes.items()
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["Medusa"],
        "model_type": "medusa",
        **SIZES,
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "torch_dtype": "bfloat16",
    }
    assert_same(load_drafter(tmp_path, dtype="bfloat16"), heads)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Three heads of two blocks as the authors' trainer saves them; two are stated, and no size."""
    random = np.random.default_rng(4)
    weights = {}
    for head in range(3):
        for block in range(2):
            weights[f"{head}.{block}.linear.weight"] = random.normal(size=(D, D))
            weights[f"{head}.{block}.linear.bias"] = random.normal(size=D)
        weights[f"{head}.2.weight"] = random.normal(size=(V, D))
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    folder = tmp_path / "published"
    folder.mkdir()
    stated = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "some/base"}
    (folder / "config.json").write_text(json.dumps(stated))
    write_archive(folder / "medusa_lm_head.pt", weights)
    np.savez(tmp_path / "weights.npz", **weights)
    return folder


def test_published_heads_compute_what_their_matrices_say(published: Path, tmp_path: Path) -> None:
    heads = load_drafter(published, dtype="float32")
    assert heads.config == MedusaConfig(V, D, num_heads=3, num_draft_layers=2)
    weights = np.load(tmp_path / "weights.npz")
    hidden = np.random.default_rng(1).normal(size=D).astype(np.float32)
    expected = []
    for head in range(3):
        x = hidden
        for block in range(2):
            layer = f"{head}.{block}.linear"
            x = x + oracles.silu(weights[f"{layer}.weight"] @ x + weights[f"{layer}.bias"])
        expected.append(weights[f"{head}.2.weight"] @ x)
    logits = heads.merge().logits(jnp.asarray(hidden), 3)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_published_heads_become_safetensors_as_they_are(published: Path, tmp_path: Path) -> None:
    told = convert(published, tmp_path / "new")
    weights = load_file(tmp_path / "new" / "model.safetensors")
    for name, value in np.load(tmp_path / "weights.npz").items():
        np.testing.assert_array_equal(weights[name], value)
    assert_same(load_drafter(tmp_path / "new"), load_drafter(published))
    assert told[-1].endswith("because that code does not support Medusa heads.")
    with pytest.raises(InputError, match="a drafter with Medusa heads, which Apple's layout does"):
        convert(published, tmp_path / "other", for_apple=True)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"medusa_num_heads": 4}, r"holds no weight '3\.0\.linear\.\w+'; the model is incomplete"),
        ({"medusa_num_heads": "2"}, r"states medusa_num_heads='2'; it must be a whole number"),
        ({"medusa_num_heads": 10**9}, r"num_heads=1000000000 and .* hold only 15 weights"),
        ({"medusa_num_layers": 1}, r"no matrix '0\.1\.weight', which would be the vocabulary"),
        ({"medusa_num_layers": ...}, r"does not state 'medusa_num_layers', which has no default"),
        ({"model_type": "medusa"}, r"does not state 'vocab_size', which has no default"),
        (SIZES | {"model_type": "medusa"}, r"holds the weight '2\.0\.linear\.bias' and 4 more, "),
        (SIZES | {"model_type": "medusa", "medusa_num_heads": 0}, r"num_heads is 0; it must be gr"),
        (
            SIZES | {"model_type": "medusa", "medusa_num_heads": 3, "head": "low_rank"},
            r"json: head is 'low_rank'; it must be one of own, target\.$",
        ),
        (
            {"model_type": "medusa", "medusa_num_heads": 3, "vocab_size": V, "hidden_size": 9},
            r"has shape \(8,.*\), but the configuration asks for \(9,.*\);",
        ),
    ],
)
def test_heads_that_are_not_what_their_config_says(
    published: Path, fields: dict[str, Any], sentence: str
) -> None:
    change_json(published / "config.json", **fields)
    with pytest.raises(InputError, match=sentence):
        load_drafter(published)


def test_a_drafters_description_is_read_once(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafter(random_drafter(CONFIG), tmp_path / "saved")
    read: list[Path] = []

    def counted(path: Path) -> dict[str, Any]:
        read.append(path)
        return read_json(path)

    monkeypatch.setattr("redrafter_jax.files.drafter_files.read_json", counted)
    for folder in (published, tmp_path / "saved"):
        find_drafter(folder)
    assert read == [published / "config.json", tmp_path / "saved" / "config.json"]
