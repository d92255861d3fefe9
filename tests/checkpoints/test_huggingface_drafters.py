"""Drafters in files: Apple's layout, and what goes beyond it."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_folders import change_json, stored_tensors
from tiny_models import assert_same, cast, random_drafter

from redrafter_jax import InputError, RecurrentConfig, load_drafter, save_drafter

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
        ({"model_type": "llama"}, "'llama'; .* states 'recurrent_drafting_drafter' or 'medusa'"),
        ({"exit_dim": 6}, r"has shape .*5.*, its configuration asks for .*6.*\.$"),
        # Refused before so many are made.
        ({"num_draft_layers": 10**9}, "states num_draft_layers=1000000000, but the files hold"),
        # A constant that is not stated is not guessed.
        *(({name: ...}, f"does not state '{name}'") for name in ("exit_dim", "rnn")),
        ({"cell": "lstm"}, r"cell is 'lstm'; it must be one of simple, gru, sum\.$"),
        ({"head": []}, r"head is \[\]; it must be one of own, target, low_rank\.$"),
        ({"rnn": False, "cell": "gru"}, r"rnn=False and cell='gru', which contradict each other"),
        ({"head": "low_rank", "head_rank": 2.5}, r"head_rank is 2\.5; it must be a whole number"),
        ({"draft_tokens": 7}, "draft_tokens is 7; it must be .*, in files a list"),
        (
            {"draft_tokens": [0, True]},
            r"draft_tokens is \[0, True\]; it must be a tuple of whole numbers",
        ),
        (
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            "of quant_method 'hqq'; supported is 'redrafter', wh",
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
