"""Drafters in files: Apple's layout, and what goes beyond it."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_folders import change_json, stored_tensors
from tiny_models import assert_same, cast, random_drafter

from redrafter_jax import DrafterConfig, InputError, load_drafter, save_drafter

D, V = 8, 13
CONFIG = DrafterConfig(V, D, exit_dim=5, num_draft_layers=1)
RNN_SHAPES = {"rnn_u.weight": [D, D], "rnn_u.bias": [D], "rnn_w.weight": [D, D]}


def stated(**fields: Any) -> dict[str, Any]:
    """What Apple's code writes into `config.json`."""
    sizes = {"vocab_size": V, "hidden_size": D, "num_lookback_tokens": -1}
    return {"model_type": "recurrent_drafting_drafter", **sizes, **fields}


@pytest.mark.parametrize(
    ("exit_dim", "layers", "rnn", "dtype", "expected"),
    [
        (
            5,
            2,
            True,
            "float32",
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
        (2 * D, 0, False, "bfloat16", {"lm_head.0.weight": [V, 2 * D]}),
    ],
)
def test_drafters_are_stored_in_apples_layout(
    tmp_path: Path,
    exit_dim: int,
    layers: int,
    rnn: bool,
    dtype: str,
    expected: dict[str, list[int]],
) -> None:
    config = DrafterConfig(
        V, D, exit_dim=exit_dim, num_draft_layers=layers, cell="simple" if rnn else "sum"
    )
    drafter = cast(random_drafter(config), dtype)
    save_drafter(drafter, str(tmp_path))
    code = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert stored_tensors(tmp_path / "model.safetensors") == {
        name: (code, shape) for name, shape in expected.items()
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["Drafter"],
        **stated(exit_dim=exit_dim, num_draft_layers=layers, rnn=rnn),
        "torch_dtype": dtype,
    }
    assert_same(load_drafter(tmp_path, dtype=dtype), drafter)
    # To fields of ours null is as good as nothing.
    ours = ("cell", "head", "head_rank", "context_layers", "draft_tokens")
    change_json(tmp_path / "config.json", **dict.fromkeys(ours))
    assert_same(load_drafter(tmp_path, dtype=dtype), drafter)


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
            {"context_layers": (0, 2), "draft_tokens": (0, 3, 4)},
            RNN_SHAPES | {"context_proj.weight": [D, 3 * D], "lm_head.0.weight": [3, 5]},
        ),
    ],
    ids=["gated, in two factors", "the target's head", "three layers, three tokens"],
)
def test_drafters_beyond_apples_layout_say_so_and_come_back(
    tmp_path: Path, variant: dict[str, Any], shapes: dict[str, list[int]]
) -> None:
    drafter = random_drafter(DrafterConfig(V, D, exit_dim=5, num_draft_layers=0, **variant))
    save_drafter(drafter, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    shapes |= {"input_proj.weight": [5, 2 * D], "input_proj.bias": [5]}
    assert {name: list(weight.shape) for name, weight in stored.items()} == shapes
    written = json.loads((tmp_path / "config.json").read_text())
    for name, value in variant.items():
        if (name, value) != ("cell", "sum"):  # Apple's rnn=false
            assert written[name] == (list(value) if isinstance(value, tuple) else value)
    assert written["rnn"] is (variant.get("cell") != "sum")
    loaded = load_drafter(tmp_path, dtype="float32")
    assert loaded.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, drafter.params)


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
            save_drafter(random_drafter(DrafterConfig(100, 50, 40, 1)), tmp_path)
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
        ({"head": []}, r"states head=\[\]; it must be a string\.$"),
        ({"rnn": False, "cell": "gru"}, r"rnn=False and cell='gru', which contradict each other"),
        ({"head": "low_rank", "head_rank": 2.5}, r"head_rank=2\.5; it must be a whole number"),
        ({"draft_tokens": 7}, "draft_tokens=7; it must be a list"),
        ({"draft_tokens": [0, True]}, r"states True in 'draft_tokens'; they must be integers"),
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
