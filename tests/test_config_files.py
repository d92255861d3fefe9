"""What `config.json` states, and what is refused rather than guessed."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_config

from redrafter_jax import DrafterConfig, InputError
from redrafter_jax.config_files import (
    drafter_fields,
    read_drafter_config,
    read_target_config,
    target_fields,
)

CONFIG = tiny_config(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=32,
    rope_theta=5000.0,
    eos_token_ids=(2, 7),
)


DRAFTER_CONFIG = DrafterConfig(13, 8, exit_dim=5, num_draft_layers=1)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values))


def change_json(path: Path, **changes: Any) -> None:
    """Set fields; those set to `...` are removed."""
    values = json.loads(path.read_text()) | changes
    values = {name: value for name, value in values.items() if value is not ...}
    path.write_text(json.dumps(values))


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    write_json(folder / "config.json", target_fields(CONFIG))
    return folder


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    write_json(folder / "config.json", drafter_fields(DRAFTER_CONFIG))
    return folder


def test_what_is_written_is_read(target_folder: Path, drafter_folder: Path) -> None:
    assert read_target_config(target_folder) == CONFIG
    assert read_drafter_config(drafter_folder) == DRAFTER_CONFIG


@pytest.mark.parametrize("tokens", [(), (4,), (2, 7)])
def test_end_tokens_make_the_round_trip(tmp_path: Path, tokens: tuple[int, ...]) -> None:
    config = tiny_config(**(vars(CONFIG) | {"eos_token_ids": tokens}))
    write_json(tmp_path / "config.json", target_fields(config))
    assert read_target_config(tmp_path).eos_token_ids == tokens


@pytest.mark.parametrize(
    ("stated", "generation", "expected"),
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (None, None, ()),
        (5, {"eos_token_id": [5, 9]}, (5, 9)),
    ],
)
def test_end_tokens_are_read_where_hugging_face_keeps_them(
    target_folder: Path,
    stated: int | list[int] | None,
    generation: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    change_json(target_folder / "config.json", eos_token_id=stated)
    if generation is not None:
        (target_folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_target_config(target_folder).eos_token_ids == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
        {"rope_theta": 5000},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"attention_bias": ..., "mlp_bias": ..., "hidden_act": ...},
    ],
    ids=["transformers 5", "a whole number", "no scaling", "default scaling", "usual defaults"],
)
def test_config_json_may_be_spelt_in_several_ways(
    target_folder: Path, changes: dict[str, Any]
) -> None:
    change_json(target_folder / "config.json", **changes)
    assert read_target_config(target_folder) == CONFIG


def test_head_dimension_and_key_heads_follow_from_the_rest(tmp_path: Path) -> None:
    config = tiny_config(**(vars(CONFIG) | {"head_dim": 2, "num_key_value_heads": 4}))
    write_json(tmp_path / "config.json", target_fields(config))
    change_json(tmp_path / "config.json", head_dim=..., num_key_value_heads=...)
    assert read_target_config(tmp_path) == config


def test_config_json_that_is_no_json(target_folder: Path) -> None:
    (target_folder / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(InputError, match=r"config\.json is not valid JSON: "):
        read_target_config(target_folder)


def test_config_json_that_is_no_mapping(target_folder: Path) -> None:
    (target_folder / "config.json").write_text('["llama"]')
    with pytest.raises(InputError, match=r"config\.json "):
        read_target_config(target_folder)


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rope_theta",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_a_target_constant_that_is_not_stated_is_not_guessed(
    target_folder: Path, field: str
) -> None:
    change_json(target_folder / "config.json", **{field: ...})
    with pytest.raises(InputError, match=rf"config\.json does not state '{field}'"):
        read_target_config(target_folder)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn"]
)
def test_a_drafter_constant_that_is_not_stated_is_not_guessed(
    drafter_folder: Path, field: str
) -> None:
    change_json(drafter_folder / "config.json", **{field: ...})
    with pytest.raises(InputError, match=rf"config\.json does not state '{field}'"):
        read_drafter_config(drafter_folder)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [(7, r"draft_tokens=7; it must be a list"), ([0, True], "True in 'draft_tokens'")],
)
def test_draft_tokens_are_a_list_of_integers(
    drafter_folder: Path, tokens: object, sentence: str
) -> None:
    change_json(drafter_folder / "config.json", draft_tokens=tokens)
    with pytest.raises(InputError, match=sentence):
        read_drafter_config(drafter_folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'; .* 'llama'"),
        ({"model_type": ...}, "model_type None; .* 'llama'"),
        ({"attention_bias": True}, "attention_bias=True; .*False"),
        ({"mlp_bias": True}, "mlp_bias=True; .*False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; .*'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaling of type 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaling of type 'linear'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0}},
            "scaling of type 'yarn'",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"eos_token_id": 13}, "eos_token_ids holds 13"),
    ],
)
def test_targets_of_another_kind_are_refused(
    target_folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    change_json(target_folder / "config.json", **changes)
    with pytest.raises(InputError, match=sentence):
        read_target_config(target_folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": "16"}, r"hidden_size='16'; it must be a whole number\.$"),
        ({"vocab_size": [1]}, r"vocab_size=\[1\]; it must be a whole number\.$"),
        ({"num_hidden_layers": 1.0}, r"num_hidden_layers=1\.0; it must be a whole number\.$"),
        ({"num_hidden_layers": True}, r"num_hidden_layers=True; it must be a whole number\.$"),
        ({"rms_norm_eps": "a"}, r"rms_norm_eps='a'; it must be a number\.$"),
        ({"tie_word_embeddings": "false"}, r"'false'; it must be true or false\.$"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]; it must be an object\.$"),
        ({"rope_parameters": {"rope_theta": "a"}}, r"rope_theta='a'; it must be a number\.$"),
        ({"eos_token_id": "x"}, r"eos_token_id='x'; it must be a whole number or a list"),
        ({"eos_token_id": [2, None]}, r"eos_token_id=\[2, None\]; it must be a whole number"),
        ({"head_dim": 0}, "head_dim is 0; it must be greater than 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be greater than 0"),
        (
            {"num_attention_heads": 0, "head_dim": ...},
            "num_attention_heads is 0; it must be greater than 0",
        ),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_not_replaced(
    target_folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    change_json(target_folder / "config.json", **changes)
    with pytest.raises(InputError, match=sentence):
        read_target_config(target_folder)


def test_a_target_is_no_drafter_and_a_drafter_no_target(
    target_folder: Path, drafter_folder: Path
) -> None:
    with pytest.raises(InputError, match=r"'recurrent_drafting_drafter'; .* 'llama'"):
        read_target_config(drafter_folder)
    with pytest.raises(InputError, match=r"'llama'; .* 'recurrent_drafting_drafter'"):
        read_drafter_config(target_folder)
