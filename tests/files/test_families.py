"""What a target's `config.json` states, and what is refused rather than guessed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from places import GOLDENS
from tiny_folders import change_json
from tiny_models import tiny_config

from redrafter_jax import InputError
from redrafter_jax.config import LinearScaling, TargetConfig
from redrafter_jax.files.families import target_fields
from redrafter_jax.files.target_files import open_target

FAMILY_GOLDENS = GOLDENS / "families"
CONFIG = tiny_config(head_dim=6, rope_theta=5000.0, eos_token_ids=(2, 7))


def read_config(folder: Path) -> TargetConfig:
    return open_target(folder).config


def restate(folder: Path, **changes: Any) -> None:
    """Write `config.json` of that target with changes."""
    fields = target_fields(dataclasses.replace(CONFIG, **changes))
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    restate(tmp_path)
    return tmp_path


GEMMA3: dict[str, Any] = {
    "qk_norm": True,
    "hidden_act": "gelu_pytorch_tanh",
    "output_norms": True,
    "zero_centered_norms": True,
    "scaled_embeddings": True,
    "rope_local_base_freq": 700.0,
    "query_pre_attn_scalar": 5.0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_output_bias": True},
        {"qk_norm": True, "attention_bias": True},
        {"output_norms": True},
        {**GEMMA3, "query_pre_attn_scalar": None},
    ],
)
def test_a_target_of_no_family_cannot_be_written(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"No family of transformers has all of attention_bias=.*"):
        target_fields(tiny_config(**changes))


@pytest.mark.parametrize("name", sorted(path.name for path in FAMILY_GOLDENS.iterdir()))
def test_transformers_4_and_5_are_read_alike(tmp_path: Path, name: str) -> None:
    """Files that they wrote themselves."""
    newer = read_config(FAMILY_GOLDENS / name)
    old = (FAMILY_GOLDENS / name / "config.transformers4.json").read_text()
    (tmp_path / "config.json").write_text(old)
    assert "rope_parameters" not in old
    assert read_config(tmp_path) == newer


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
    folder: Path,
    stated: int | list[int] | None,
    generation: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    change_json(folder / "config.json", eos_token_id=stated)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(folder).eos_token_ids == expected


def test_what_follows_from_the_rest_or_is_null_may_be_left_out(folder: Path) -> None:
    restate(folder, head_dim=8, num_key_value_heads=4)
    change_json(folder / "config.json", head_dim=None, num_key_value_heads=None)
    config = read_config(folder)
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    restate(folder)
    change_json(folder / "config.json", attention_bias=..., mlp_bias=..., hidden_act=...)
    assert read_config(folder) == CONFIG
    restate(folder, sliding_window=8, windowed_layers=(0, 1))
    change_json(folder / "config.json", sliding_window=None)
    assert read_config(folder) == CONFIG
    change_json(folder / "config.json", sliding_window=...)
    with pytest.raises(
        InputError, match=r"does not state 'sliding_window', .* or null for no window\.$"
    ):
        read_config(folder)
    restate(folder, qk_norm=True)
    change_json(folder / "config.json", head_dim=...)
    with pytest.raises(InputError, match="does not state 'head_dim'"):
        read_config(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"is_llama_config": True, "rope_interleaved": False},  # SmolLM2
        {"rope_scaling": None, "pretraining_tp": 1, "max_sequence_length": 64},  # Llama 2, Vicuna
        {"original_max_position_embeddings": 32, "unsloth_version": "2025.12.5"},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "finetuned": True}},
    ],
)
def test_fields_of_published_files_that_change_nothing_are_no_obstacle(
    folder: Path, fields: dict[str, Any]
) -> None:
    change_json(folder / "config.json", **fields)
    assert read_config(folder) == CONFIG


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": "gpt2"},
            r"model_type 'gpt2'; this version reads 'llama', 'mistral', 'q",
        ),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]; "),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; at most 10000"),
        ({"architectures": ["LlamaForTokenClassification"]}, "for model_type 'llama' only 'Llama"),
        ({"mlp_bias": True}, "mlp_bias=True; .*False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; .*'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config of quant_method None; supp"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; only 1.0"),
        ({"sliding_window": 8}, "sliding_window=8, but LlamaForCausalLM of transformers has no"),
        ({"layer_types": ["sliding_attention"] * 2}, "all 2 layers of Llama.* 'full_attention'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        # A constant that is not stated is not guessed.
        *(({name: ...}, f"does not state '{name}'") for name in ("vocab_size", "rms_norm_eps")),
        ({"eos_token_id": 24}, r"config\.json: eos_token_ids holds 24"),
        # Fields of the wrong kind, which are not replaced.
        ({"hidden_size": "16"}, r"hidden_size='16'; it must be a whole number\.$"),
        ({"num_hidden_layers": True}, r"num_hidden_layers=True; it must be a whole number\.$"),
        ({"rms_norm_eps": "a"}, r"rms_norm_eps='a'; it must be a number\.$"),
        ({"tie_word_embeddings": "false"}, r"'false'; it must be true or false\.$"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]; it must be an object\.$"),
        ({"eos_token_id": [2, None]}, r"eos_token_id=\[2, None\]; it must be a whole number"),
        ({"head_dim": 0}, "head_dim is 0; it must be greater than 0"),
        (
            {"num_attention_heads": 0, "head_dim": ...},
            "num_attention_heads is 0; it must be greater than 0",
        ),
    ],
)
def test_targets_of_another_kind_are_refused(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    change_json(folder / "config.json", **changes)
    with pytest.raises(InputError, match=sentence):
        read_config(folder)


@pytest.fixture
def qwen_folder(folder: Path) -> Path:
    """The first layer sees everything, the second a window of eight."""
    restate(folder, attention_bias=True, sliding_window=8, windowed_layers=(1,))
    return folder


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, (1,)),
        ({"layer_types": ["sliding_attention", "full_attention"]}, (0,)),
        ({"layer_types": ..., "max_window_layers": 1}, (1,)),
        ({"layer_types": ..., "max_window_layers": 28}, ()),
        ({"layer_types": ..., "use_sliding_window": False}, ()),
        ({"layer_types": ..., "sliding_window": None}, ()),
    ],
)
def test_qwen_has_windows_in_some_layers(
    qwen_folder: Path, changes: dict[str, Any], windowed: tuple[int, ...]
) -> None:
    change_json(qwen_folder / "config.json", **changes)
    config = read_config(qwen_folder)
    assert config.windowed_layers == windowed
    assert config.sliding_window == (8 if windowed else None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_types": ["full_attention"]}, "for each of 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "must hold 'full_attention' or"),
        ({"layer_types": ...}, "does not state 'max_window_layers'"),
        ({"use_sliding_window": False}, "with sliding_window=None all 2 layers of Qwen2"),
        (
            {"attention_bias": False},
            "attention_bias=False, but transformers always uses True for Qwen2ForCausalLM",
        ),
        ({"num_key_value_heads": ...}, "does not state 'num_key_value_heads'"),
    ],
)
def test_what_qwen_leaves_open_is_refused(
    qwen_folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    change_json(qwen_folder / "config.json", **changes)
    with pytest.raises(InputError, match=sentence):
        read_config(qwen_folder)


# `text_config` as Google's Gemma 3 4B states it; the rest is transformers' defaults.
GEMMA3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def test_gemma_3_is_read_from_within_a_model_for_images(tmp_path: Path) -> None:
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": GEMMA3_4B,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_config(tmp_path)
    assert (config.vocab_size, config.num_attention_heads, config.num_key_value_heads) == (
        262_208,
        8,
        4,
    )
    assert (config.head_dim, config.query_pre_attn_scalar, config.rms_norm_eps) == (256, 256, 1e-6)
    assert (config.rope_theta, config.rope_local_base_freq) == (1e6, 1e4)
    assert config.rope_scaling == LinearScaling(8.0)
    assert config.position_limit == 131_072
    assert set(range(34)) - set(config.windowed_layers) == {5, 11, 17, 23, 29}
    assert config.sliding_window == 1024
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1, 106)


LOCAL = {"rope_type": "default", "rope_theta": 700.0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu'; only 'gelu_pytorch_tanh'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0; only None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True; only False"),
        (
            {"layer_types": ..., "sliding_window_pattern": 0},
            "sliding_window_pattern=0; it must be 1 or more",
        ),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0; it must be greater than 0"),
        (
            {"rope_parameters": {"sliding_attention": {**LOCAL, "rope_theta": 800.0}}},
            "rope_theta=700.0 and rope_parameters.rope_theta=800.0",
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {**LOCAL, "rope_type": "linear", "factor": 2.0}
                }
            },
            "'linear' in windowed layers; only layers without a window can be scaled",
        ),
        ({"model_type": "gemma3"}, r"only 'Gemma3ForConditionalGeneration' is supported"),
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
            "does not state 'text_config'",
        ),
    ],
)
def test_what_gemma_leaves_open_is_refused(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    restate(folder, **GEMMA3, sliding_window=8, windowed_layers=(0,))
    change_json(folder / "config.json", **changes)
    with pytest.raises(InputError, match=sentence):
        read_config(folder)
