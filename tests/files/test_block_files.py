"""Published DFlash and DSpark heads: what each dialect's files mean, and which are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_heads import GOLDENS, heads_in
from safetensors.numpy import load_file, save_file
from tiny_folders import change_json
from tiny_models import assert_same

from redrafter_jax import InputError, TreeConfig, load_drafter, load_target, save_drafter
from redrafter_jax.config import Llama3Scaling
from redrafter_jax.drafters.base import check_pair
from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.files.convert import convert
from redrafter_jax.files.drafter_files import find_drafter

HEADS = heads_in("block")
V, D = 60, 16


def block(*, layers: int = 2, size: int, **changes: Any) -> BlockConfig:
    fields: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **changes}
    return BlockConfig(V, D, layers, 24, 2, 1, 8, size, 7, **fields)


def deepspec(**changes: Any) -> BlockConfig:
    fixed: dict[str, Any] = {"sample_from_anchor": True, "context_layers": (0, 3, 6)}
    return block(size=5, num_target_layers=8, **fixed, **changes)


def speculators(**changes: Any) -> BlockConfig:
    weights = load_file(GOLDENS / "block/speculators_dflash/model.safetensors")
    drafted = tuple(int(token) for token in np.flatnonzero(weights["t2d"]))
    # Their numbers are those of inputs.
    return block(draft_tokens=drafted, context_layers=(0, 3, 4), **changes)


SEQUENTIAL: dict[str, Any] = {"markov_rank": 4, "confidence": True}
WITH_MARKOV = {**SEQUENTIAL, "confidence_with_markov": True}
MEANT = {
    "zlab": block(
        size=6,
        context_layers=(1, 5),
        num_target_layers=8,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
    ),
    "deepspec_dflash": deepspec(),
    "deepspec_dspark": deepspec(**WITH_MARKOV),
    "deepspec_gated": deepspec(markov_head_type="gated", attention_bias=True, **SEQUENTIAL),
    "deepspec_rnn": deepspec(layers=1, markov_head_type="rnn", **WITH_MARKOV),
    "speculators_dflash": speculators(size=6),
    "speculators_dspark": speculators(
        size=5, sample_from_anchor=True, markov_head_type="rnn", **WITH_MARKOV
    ),
    "speculators_bonus": speculators(size=6, markov_head_type="gated", **SEQUENTIAL),
}


def copy(name: str, folder: Path) -> Path:
    shutil.copytree(GOLDENS / "block" / name, folder / name)
    (folder / name / "answers.npz").unlink()
    return folder / name


@pytest.mark.parametrize("name", HEADS)
def test_a_published_head_is_what_its_files_say(name: str) -> None:
    assert find_drafter(GOLDENS / "block" / name).config == MEANT[name]


@pytest.mark.parametrize("name", HEADS)
def test_it_is_saved_in_one_layout_and_converted_in_its_own(tmp_path: Path, name: str) -> None:
    folder = GOLDENS / "block" / name
    drafter = load_drafter(folder, "float32")
    save_drafter(drafter, tmp_path / "saved")
    assert_same(load_drafter(tmp_path / "saved", "float32"), drafter)
    # The authors' names, and no copies of what is the target's.
    names = load_file(folder / "model.safetensors").keys()
    saved = load_file(tmp_path / "saved/model.safetensors").keys()
    assert saved == names - {"embed_tokens.weight", "lm_head.weight"}
    convert(folder, tmp_path / "converted", "bfloat16")
    assert_same(load_drafter(tmp_path / "converted", "bfloat16"), load_drafter(folder, "bfloat16"))


def test_layers_that_a_file_does_not_name_are_those_of_the_authors_code(tmp_path: Path) -> None:
    folder = copy("zlab", tmp_path)
    change_json(folder / "config.json", dflash_config={"mask_token_id": 7})
    assert find_drafter(folder).config == MEANT["zlab"]
    change_json(folder / "config.json", num_target_layers=...)
    with pytest.raises(InputError, match="target_layer_ids and num_target_layers are both missing"):
        load_drafter(folder)


def test_the_blocks_size_may_stand_within(tmp_path: Path) -> None:
    folder = copy("zlab", tmp_path)
    within = {"mask_token_id": 7, "target_layer_ids": [1, 5], "block_size": 6}
    change_json(folder / "config.json", dflash_config=within, block_size=...)
    assert find_drafter(folder).config == MEANT["zlab"]


def test_flags_that_a_dialect_lacks_are_those_of_its_code(tmp_path: Path) -> None:
    folder = copy("speculators_dflash", tmp_path)
    change_json(folder / "config.json", sample_from_anchor=...)
    assert find_drafter(folder).config == MEANT["speculators_dflash"]


def within_layers(**changes: Any) -> dict[str, Any]:
    path = GOLDENS / "block/speculators_dspark/config.json"
    return {"transformer_layer_config": json.loads(path.read_text())[LAYER] | changes}


LAYER = "transformer_layer_config"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Heads of other kinds, by the names that they have.
    ("zlab", {"architectures": ["DominoDraftModel"]}, "names 'DominoDraftModel'; DFlashDraftModel"),
    ("zlab", {"architectures": ["DSparkDraftModel"]}, "names 'DSparkDraftModel'; DFlashDraftModel"),
    ("deepspec_dspark", {"architectures": ["Gemma4DSparkModel"]}, "names 'Gemma4DSparkModel'; "),
    ("speculators_dspark", {"speculators_model_type": "dflash2"}, "is 'dflash2'; 'dflash' and 'ds"),
    (
        "zlab",
        {"dflash_config": {"projector_type": "dspark", "mask_token_id": 7}},
        "dflash_config states projector_type='dspark', which is not supported",
    ),
    # Flags that are not known, and those whose absence programs take differently.
    ("deepspec_dspark", {"use_gates": True}, "use_gates is True, which is not a known field"),
    (
        "speculators_dspark",
        {"sample_from_anchor": ...},
        "sample_from_anchor is not stated, and pro",
    ),
    ("speculators_bonus", {"markov_head_type": "rnn"}, "is 'rnn' and sample_from_anchor is False"),
    # Values that change what is computed.
    ("zlab", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
    ("zlab", {"target_hidden_size": 32}, "target_hidden_size is 32; only 16 is supported"),
    ("zlab", {"use_sliding_window": True}, "use_sliding_window is True; heads with a window"),
    ("zlab", {"layer_types": ["sliding_attention"] * 2}, "layer_types .* only 'full_attention'"),
    (
        "speculators_dspark",
        within_layers(layer_types=["full_attention", "sliding_attention"]),
        "layer_types .* only 'full_attention'",
    ),
    (
        "zlab",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "is YarnScaling; only",
    ),
    ("zlab", {"mask_token_id": 60}, "mask_token is 60; it must be below vocab_size, 60"),
    ("deepspec_dspark", {"target_layer_ids": [-1, 3]}, "target_layer_ids holds -1, the embedding"),
    ("deepspec_dspark", {"target_layer_ids": [3, 1]}, "context_layers holds 3; |holds 1 after 3"),
    ("deepspec_dspark", {"target_layer_ids": 3}, "layers must be a list of whole numbers"),
    ("speculators_dspark", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is N"),
    # What the weights do not bear out.
    ("deepspec_gated", {"markov_rank": 0, "markov_head_type": "vanilla"}, "does not have"),
    ("deepspec_dspark", {"markov_head_type": "gated"}, "no weight 'markov_head.gate_proj"),
    ("deepspec_gated", {"markov_head_type": "vanilla"}, "'markov_head.gate_proj.bias' and 1 more"),
    ("deepspec_dspark", {"confidence_head_with_markov": False}, r"has shape \(1, 20\).* \(1, 16\)"),
    ("deepspec_dspark", {"enable_confidence_head": False}, "which needs a confidence head"),
    ("deepspec_gated", {"attention_bias": False}, "k_proj.bias' and 7 more, which the model"),
    ("zlab", {"intermediate_size": 32}, r"has shape \(16, 24\).* asks for \(16, 32\)"),
    ("deepspec_dspark", {"target_layer_ids": [0, 3]}, r"has shape \(16, 48\).* \(16, 32\)"),
    ("speculators_dflash", {"draft_vocab_size": 30}, "is 30, but the table 'd2t' has 40 entries"),
    ("speculators_dflash", {LAYER: None}, "transformer_layer_config is None; .* object of fields"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_files_that_do_not_say_what_a_head_computes_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    folder = copy(name, tmp_path)
    if "mask_token_id" in changes and name == "zlab":
        changes = {"dflash_config": {"mask_token_id": changes["mask_token_id"]}}
    change_json(folder / "config.json", **changes)
    with pytest.raises(InputError, match=words):
        load_drafter(folder)


@pytest.mark.parametrize(
    "missing", ["fc.weight", "hidden_norm.weight", "layers.1.self_attn.q_norm.weight", "d2t"]
)
def test_a_missing_weight_is_refused(tmp_path: Path, missing: str) -> None:
    folder = copy("speculators_dflash", tmp_path)
    save_drafter(load_drafter(folder, "float32"), folder)
    weights = load_file(folder / "model.safetensors")
    del weights[missing]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"'{missing}'"):
        load_drafter(folder)


def test_the_target_of_another_head_is_refused() -> None:
    head = find_drafter(GOLDENS / "block/deepspec_dspark").config
    target = load_target(GOLDENS / "eagle/target", "float32").config
    tree = TreeConfig(beam_width=1, draft_rounds=5)
    check_pair(target, head, tree)
    for changes, words in (
        ({"hidden_size": 32}, "hidden_size is 16 and the target's is 32; use a drafter trained"),
        ({"vocab_size": 61}, "vocab_size is 60 and the target's is 61; use a drafter trained"),
        ({"num_hidden_layers": 9}, "trained for a target with 8 layers, and this target has 9"),
        ({"scaled_embeddings": True}, "The target scales its embeddings, and programs disagree"),
    ):
        with pytest.raises(InputError, match=words):
            check_pair(replace(target, **changes), head, tree)
    with pytest.raises(InputError, match="draft_rounds is 6, but the head's block predicts 5"):
        check_pair(target, head, TreeConfig(beam_width=1, draft_rounds=6))
