"""Published Hydra heads: what their files mean, and which are refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_heads import GOLDENS, heads_in
from safetensors.numpy import load_file, save_file
from tiny_folders import change_json
from tiny_models import assert_same, random_drafter

from redrafter_jax import InputError, TreeConfig, load_drafter, load_target, save_drafter
from redrafter_jax.config import LinearScaling
from redrafter_jax.drafters.base import check_pair
from redrafter_jax.drafters.hydra_head import HydraConfig, PrefixLayer
from redrafter_jax.files.convert import convert
from redrafter_jax.files.drafter_files import find_drafter

HYDRA = GOLDENS / "hydra"
V, D = 60, 16
LAYER = PrefixLayer(24, 2, 1, 8, rms_norm_eps=1e-5)
MEANT = {
    "mlp": HydraConfig(V, D, 5, 1),
    "mlp_deep": HydraConfig(V, D, 5, 3, hidden_state_offset=2),
    "mlp_ungrounded": HydraConfig(V, D, 5, 2, grounded=False),
    "prefix": HydraConfig(V, D, 5, 4, prefix=LAYER),
    "prefix_ungrounded": HydraConfig(
        V, D, 5, 1, grounded=False, hidden_state_offset=1, prefix=LAYER
    ),
}


def copy(name: str, folder: Path) -> Path:
    shutil.copytree(HYDRA / name, folder / name)
    (folder / name / "answers.npz").unlink()
    return folder / name


@pytest.mark.parametrize("name", heads_in("hydra"))
def test_a_published_head_is_what_its_files_say(name: str) -> None:
    assert find_drafter(HYDRA / name).config == MEANT[name]


@pytest.mark.parametrize("name", heads_in("hydra"))
def test_it_is_saved_and_converted_in_its_own_layout(tmp_path: Path, name: str) -> None:
    drafter = load_drafter(HYDRA / name, "float32")
    save_drafter(drafter, tmp_path / "saved")
    assert_same(load_drafter(tmp_path / "saved", "float32"), drafter)
    source = copy(name, tmp_path)
    # The rotary frequencies, which tell it, are left out.
    change_json(source / "config.json", num_attention_heads=2)
    convert(source, tmp_path / "converted", "bfloat16")
    assert_same(load_drafter(tmp_path / "converted"), load_drafter(HYDRA / name))


def test_a_conversion_that_would_lose_the_width_of_a_head_is_refused(tmp_path: Path) -> None:
    layer = PrefixLayer(24, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    drafter = random_drafter(HydraConfig(V, 128, 1, 1, prefix=layer))
    save_drafter(drafter, tmp_path / "published")
    weights = tmp_path / "published/model.safetensors"
    told = {"prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32)}
    save_file(load_file(weights) | told, weights)
    published = tmp_path / "published/config.json"
    # As the authors' files, which state no sizes.
    change_json(published, model_type=..., prefix=..., vocab_size=..., hidden_size=...)
    assert find_drafter(tmp_path / "published").config == drafter.config
    with pytest.raises(
        InputError, match=r"leaves out weights that imply .*'head_dim': 64.*; state"
    ):
        convert(tmp_path / "published", tmp_path / "converted")
    change_json(published, head_dim=64)
    convert(tmp_path / "published", tmp_path / "converted")
    assert_same(load_drafter(tmp_path / "converted", "float32"), drafter)


def test_of_blocks_that_are_one_the_last_is_kept(tmp_path: Path) -> None:
    """As the authors' code does, which writes all of them into the same block."""
    head = load_drafter(HYDRA / "prefix", "float32")
    save_drafter(head, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "hydra_mlp.2.1.res_connection.weight" in saved
    blocks = {name.split(".")[2] for name in saved if name.startswith("hydra_mlp.")}
    assert blocks == {"1", "7"}
    other = {
        name.replace(".7.", ".3."): weight + 1 for name, weight in saved.items() if ".7." in name
    }
    save_file(saved | other, tmp_path / "model.safetensors")
    assert_same(load_drafter(tmp_path, "float32"), head)


def test_what_a_file_states_of_the_layer_counts(tmp_path: Path) -> None:
    folder = copy("prefix", tmp_path)
    stated = {"rms_norm_eps": ..., "rope_scaling": {"type": "linear", "factor": 4.0}}
    change_json(folder / "config.json", **stated)
    layer = replace(LAYER, rms_norm_eps=1e-6, rope_scaling=LinearScaling(4.0))
    assert find_drafter(folder).config == replace(MEANT["prefix"], prefix=layer)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mlp", {"hydra_head_arch": "eagle-attn"}, "is 'eagle-attn'; 'mlp' and 'prefix-mlp' are"),
        ("mlp", {"hydra_head_arch": "prefix-mlp"}, "hydra_num_layers is 1, but the files hold 0 b"),
        ("mlp", {"use_gates": True}, "use_gates is True, which is not a known field of"),
        ("mlp", {"hydra_num_layers": 2}, "hydra_num_layers is 2, but the files hold 1 blocks"),
        ("mlp_deep", {"hydra_num_layers": 2}, "hydra_num_layers is 2, but the files hold 3 blocks"),
        ("mlp", {"hydra_num_heads": 6}, "no weight 'hydra_mlp.5.0.linear.bias'"),
        ("mlp", {"hydra_num_heads": 4}, "'hydra_lm_head.4.bias' and 5 more, which the model"),
        ("mlp", {"grounded_heads": False}, r"has shape \(16, 32\).* asks for \(16, 16\)"),
        ("mlp_ungrounded", {"grounded_heads": True}, "no weight 'hydra_mlp.0.0.linear.bias'"),
        ("mlp", {"hydra_num_heads": ...}, "does not state 'hydra_head_arch'|model_type"),
        ("mlp", {"hydra_num_layers": ...}, "does not state 'hydra_num_layers'"),
        ("prefix", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "only linear scaling is"),
        ("prefix", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None"),
        ("prefix", {"head_dim": 4}, "head_dim is 4, but the rotary frequencies .* imply 8"),
    ],
)
def test_files_that_do_not_say_what_heads_compute_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    folder = copy(name, tmp_path)
    change_json(folder / "config.json", **changes)
    with pytest.raises(InputError, match=words):
        load_drafter(folder)


def test_the_heads_of_attention_are_told_by_the_rotary_frequencies_or_stated(
    tmp_path: Path,
) -> None:
    folder = copy("prefix", tmp_path)
    save_drafter(load_drafter(folder, "float32"), tmp_path / "saved")
    # Without them.
    shutil.copy(tmp_path / "saved/model.safetensors", folder)
    with pytest.raises(
        InputError, match="num_attention_heads is not stated, and cannot be derived"
    ):
        load_drafter(folder)
    change_json(folder / "config.json", num_attention_heads=2)
    assert find_drafter(folder).config == MEANT["prefix"]


def test_the_target_of_other_heads_is_refused() -> None:
    head = find_drafter(HYDRA / "prefix").config
    target = load_target(GOLDENS / "eagle/target", "float32").config
    check_pair(target, head, TreeConfig())
    for changes, words in (
        ({"hidden_size": 32}, "hidden_size is 16 and the target's is 32; use a drafter trained"),
        ({"vocab_size": 61}, "vocab_size is 60 and the target's is 61; use a drafter trained"),
        ({"rms_norm_eps": 1e-6}, "The rms_norm_eps of the Hydra.. layer is 1e-05, but the"),
        (
            {"num_key_value_heads": 2},
            "The num_key_value_heads of .* is 1, but the target's num_key_value_heads is 2",
        ),
        ({"rope_scaling": LinearScaling(2.0)}, "state rope_scaling in the head's config.json"),
    ):
        with pytest.raises(InputError, match=words):
            check_pair(replace(target, **changes), head, TreeConfig())
    with pytest.raises(InputError, match="hidden_state_offset is 8, but the target has 8 layers"):
        check_pair(target, replace(MEANT["mlp"], hidden_state_offset=8), TreeConfig())


def test_the_layer_that_an_offset_means_is_counted_from_the_end() -> None:
    target = load_target(GOLDENS / "eagle/target", "float32").config
    assert MEANT["mlp"].layers_of(target) == ()
    # Of eight layers, 0 to 7, the output of the last but two.
    assert MEANT["mlp_deep"].layers_of(target) == (5,)
    np.testing.assert_equal(MEANT["prefix_ungrounded"].layers_of(target), (6,))
