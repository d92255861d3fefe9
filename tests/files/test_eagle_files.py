"""Published EAGLE heads: what each dialect's files mean, and which are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_folders import change_json
from tiny_models import assert_same, random_target, tiny_config

from redrafter_jax import (
    InputError,
    TargetConfig,
    TreeConfig,
    generate,
    load_drafter,
    load_target,
    save_drafter,
    save_target,
)
from redrafter_jax.config import Llama3Scaling
from redrafter_jax.drafters.base import check_pair
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.files.convert import convert
from redrafter_jax.files.drafter_files import find_drafter, find_kind_of_files
from redrafter_jax.files.target_files import open_target

GOLDENS = Path(__file__).parents[1] / "goldens/eagle"
HEADS = sorted(path.name for path in GOLDENS.iterdir() if (path / "answers.npz").exists())
V, D = 60, 16
DRAFTED = tuple(
    int(token)
    for token in np.flatnonzero(load_file(GOLDENS / "speculators_qwen3/model.safetensors")["t2d"])
)


def eagle3(**changes: Any) -> EagleConfig:
    plain: dict[str, Any] = {"rms_norm_eps": 1e-5, "draft_tokens": DRAFTED, **changes}
    return EagleConfig(V, D, "3", D, 24, 2, 1, plain.pop("head_dim", 8), **plain)


def first(**changes: Any) -> EagleConfig:
    return EagleConfig(V, D, "1", D, 24, 2, 1, 8, head="target", rms_norm_eps=1e-5, **changes)


# What each dialect's golden means; layers as the outputs of those that are named.
MEANT = {
    "safeailab_1": first(rope_theta=5e5),
    "safeailab_1_qkv_bias": first(fc_bias=True, attention_bias=True),
    "safeailab_3": eagle3(),
    "safeailab_3_width": replace(
        eagle3(), width=24, num_attention_heads=3, num_key_value_heads=3, own_embedding=True
    ),
    "specforge": eagle3(draft_tokens=None, head_dim=12, rope_theta=1e6),
    "specforge_fc_norm": eagle3(
        head_dim=12,
        rope_theta=1e6,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
        context_layers=(0, 2, 5),
        fc_norm=True,
    ),
    "speculators_qwen3": eagle3(qk_norm=True, norm_before_residual=True, norm_before_fc=True),
    "speculators_llama": eagle3(
        context_layers=(0, 2, 4, 5), attention_bias=True, attention_output_bias=True
    ),
    "speculators_norms": eagle3(qk_norm=True, fc_norm=True, norm_output=True),
    "deepspec": eagle3(
        draft_tokens=None,
        qk_norm=True,
        context_layers=(0, 1, 3, 4, 6),
        rope_theta=1e6,
        num_target_layers=8,
    ),
}


def copy(name: str, folder: Path) -> Path:
    shutil.copytree(GOLDENS / name, folder / name)
    (folder / name / "answers.npz").unlink()
    return folder / name


@pytest.mark.parametrize("name", HEADS)
def test_a_published_head_is_what_its_files_say(name: str) -> None:
    assert find_drafter(GOLDENS / name).config == MEANT[name]


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("specforge", "Eagle3LlamaForCausalLM"), ("safeailab_1", "EagleLlamaForCausalLM")],
)
def test_programs_that_name_a_head_otherwise_mean_the_same(
    tmp_path: Path, name: str, architecture: str
) -> None:
    folder = copy(name, tmp_path)
    change_json(folder / "config.json", architectures=[architecture])
    assert find_drafter(folder).config == MEANT[name]


def test_an_embedding_that_was_trained_is_the_heads_own(tmp_path: Path) -> None:
    folder = copy("specforge", tmp_path)
    change_json(folder / "config.json", embed_requires_grad=True)
    drafter = load_drafter(folder, "float32")
    assert drafter.config == replace(MEANT["specforge"], own_embedding=True)
    stored = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    np.testing.assert_array_equal(drafter.merge().embed_tokens[...], stored.astype(np.float32))
    save_drafter(drafter, tmp_path / "saved")
    assert_same(load_drafter(tmp_path / "saved", "float32"), drafter)


@pytest.mark.parametrize("name", HEADS)
def test_it_is_saved_in_one_layout_and_converted_in_its_own(tmp_path: Path, name: str) -> None:
    drafter = load_drafter(GOLDENS / name, "float32")
    save_drafter(drafter, tmp_path / "saved")
    assert_same(load_drafter(tmp_path / "saved", "float32"), drafter)
    saved = load_file(tmp_path / "saved/model.safetensors")
    version = drafter.config.version
    layer = {"1": "layers.0", "3": "midlayer"}[version]
    assert f"{layer}.post_attention_layernorm.weight" in saved
    if drafter.config.draft_tokens is not None:
        assert saved["d2t"].dtype == np.int64
        np.testing.assert_array_equal(saved["d2t"] + np.arange(len(saved["d2t"])), DRAFTED)
        np.testing.assert_array_equal(np.flatnonzero(saved["t2d"]), DRAFTED)
    convert(GOLDENS / name, tmp_path / "converted", "bfloat16")
    assert_same(
        load_drafter(tmp_path / "converted", "bfloat16"), load_drafter(GOLDENS / name, "bfloat16")
    )
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (GOLDENS / name, tmp_path / "converted")
    )
    changed = {field for field in before | after if before.get(field) != after.get(field)}
    assert changed <= {"torch_dtype", "dtype"}


def test_a_target_of_one_layer_is_no_head(tmp_path: Path) -> None:
    save_target(random_target(tiny_config(num_hidden_layers=1)), tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert find_kind_of_files(tmp_path, stated) is None
    assert isinstance(find_drafter(tmp_path).config, TargetConfig)


LAYER = "transformer_layer_config"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # A head of another kind, by the name that it has.
    ("specforge", {"architectures": ["PEagleDraftModel"]}, "names 'PEagleDraftModel'; the sup"),
    ("deepspec", {"architectures": ["Gemma4Eagle3Model"]}, "names 'Gemma4Eagle3Model'; the sup"),
    ("speculators_llama", {"speculators_model_type": "peagle"}, "is 'peagle'; .* only 'eagle3' is"),
    # Flags that are not known, and those whose absence programs take differently.
    ("specforge", {"use_gates": True}, "use_gates is True, which is not a known field of"),
    ("speculators_llama", {"norm_after_fc": 1}, "norm_after_fc is 1, which .* remove it if"),
    ("speculators_qwen3", {"norm_before_residual": ...}, "norm_before_residual is not stated"),
    (
        "specforge",
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        "state the outputs in eagle_config",
    ),
    (
        "specforge",
        {"eagle_config": {"parallel": 2}},
        "eagle_config states parallel=2, which is not",
    ),
    ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
    # Values that change what is computed.
    ("specforge", {"num_hidden_layers": 4}, "num_hidden_layers is 4; only 1 is supported"),
    ("specforge", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
    ("specforge", {"mlp_bias": True}, "mlp_bias is True; only False is supported"),
    ("specforge", {"layer_types": ["sliding_attention"]}, "layer_types .* only 'full_attention'"),
    ("specforge", {"use_sliding_window": True}, "use_sliding_window is True; heads with a window"),
    (
        "specforge",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "DynamicScaling; only",
    ),
    ("specforge", {"rope_scaling": {"rope_type": "mrope"}}, "rotary scaling of type 'mrope'"),
    ("specforge", {"num_aux_hidden_states": 5}, "is 5, but the head reads 3 layers"),
    ("deepspec", {"target_layer_ids": [3, 1]}, "context_layers holds 1 after 3"),
    ("deepspec", {"target_layer_ids": "1,3"}, "layers must be a list of whole numbers"),
    ("speculators_llama", {"eagle_aux_hidden_state_layer_ids": [0, 3]}, "holds 0, the embedding"),
    # What the weights do not bear out.
    ("specforge", {"fc_norm": True}, "no weight 'fc_norm.0.weight'; the model is incomplete"),
    ("specforge_fc_norm", {"fc_norm": False}, "'fc_norm.0.weight' and 2 more, which"),
    ("safeailab_1_qkv_bias", {"bias": False}, "'fc.bias', which the model .* does not have"),
    ("specforge", {"attention_bias": True}, "no weight 'midlayer.self_attn.q_proj.bias'"),
    ("specforge", {"intermediate_size": 32}, r"has shape \(16, 24\).* asks for \(16, 32\)"),
    ("deepspec", {"draft_vocab_size": 30}, "draft_vocab_size is 30, .* no table 'd2t'"),
    ("safeailab_3", {"draft_vocab_size": 30}, "is 30, but the table 'd2t' has 40 entries"),
    ("safeailab_3", {"vocab_size": 61}, "with 40 of 61 .* 't2d', with 40 of 60"),
    ("speculators_qwen3", {LAYER: None}, "transformer_layer_config is None; .* object of fields"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_files_that_do_not_say_what_a_head_computes_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    folder = copy(name, tmp_path)
    change_json(folder / "config.json", **changes)
    with pytest.raises(InputError, match=words):
        load_drafter(folder)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda weights: weights.pop(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("midlayer.mlp.up_proj.weight"), "no weight 'midlayer.mlp.up_proj.weight'"),
        (without("lm_head.weight"), "no weight 'lm_head.weight'; the model is incomplete"),
        (without("d2t"), "draft_vocab_size is 40, but the files hold no table"),
        (
            lambda weights: weights["t2d"].fill(True),
            "differ between the table 'd2t', with 40 of 60 tokens, .* with 60 of 60",
        ),
        (
            lambda weights: weights.update(d2t=weights["d2t"][::-1].copy()),
            "of the table 'd2t' hold .* sort the tokens of the table",
        ),
        (
            lambda weights: weights.update(d2t=weights["d2t"].astype(np.float32)),
            "'d2t' is stored as F32; a table of whole numbers",
        ),
        (
            lambda weights: weights.update(mask_hidden=np.zeros((1, D), np.float32)),
            "holds the weight 'mask_hidden', which the model",
        ),
    ],
)
def test_weights_that_a_head_lacks_or_does_not_know_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    folder = copy("specforge_fc_norm", tmp_path)
    save_drafter(load_drafter(folder, "float32"), folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(InputError, match=words):
        load_drafter(folder)


def test_a_first_head_whose_target_is_tied_scores_with_the_targets_projection(
    tmp_path: Path,
) -> None:
    folder = copy("safeailab_1", tmp_path)
    change_json(folder / "config.json", tie_word_embeddings=True)
    assert find_drafter(folder).config == MEANT["safeailab_1"]


def test_the_target_of_another_head_is_refused(tmp_path: Path) -> None:
    drafter = load_drafter(GOLDENS / "safeailab_3", "float32")
    target = load_target(GOLDENS / "target", "float32")
    check_pair(target.config, drafter.config, TreeConfig())
    for changes, words in (
        ({"hidden_size": 32}, "hidden_size is 16 and the target's is 32; use a drafter trained"),
        ({"vocab_size": 61}, "vocab_size is 60 and the target's is 61; use a drafter trained"),
        ({"num_hidden_layers": 6}, "The EAGLE-3 head names no target layers .* this one has 6"),
    ):
        with pytest.raises(InputError, match=words):
            check_pair(replace(target.config, **changes), drafter.config, TreeConfig())
    # Before the weights of either are read.
    folder = copy("safeailab_3", tmp_path)
    change_json(folder / "config.json", num_target_layers=7)
    with pytest.raises(InputError, match="for a target with 7 layers, and this target has 8; use"):
        find_drafter(folder, open_target(GOLDENS / "target"))
    named = load_drafter(GOLDENS / "deepspec", "float32")
    more = random_target(replace(target.config, num_hidden_layers=9))
    with pytest.raises(
        InputError, match="trained for a target with 8 layers, and this target has 9; use a drafter"
    ):
        generate(more, named, [[1, 2]], max_new_tokens=2)
    named = load_drafter(GOLDENS / "specforge_fc_norm", "float32")
    few = random_target(replace(target.config, num_hidden_layers=6))
    with pytest.raises(
        InputError, match="context_layers holds 5; the last layer of this target is 5"
    ):
        generate(few, named, [[1, 2]], max_new_tokens=2)
