"""Medusa heads in files: as they are saved, and as their authors publish them."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from safetensors.numpy import load_file
from tiny_folders import change_json, stored_tensors
from tiny_models import assert_same, cast, random_drafter
from torch_archives import write_archive

from redrafter_jax import InputError, MedusaConfig, load_drafter, save_drafter
from redrafter_jax.files.convert import convert

D, V = 8, 13
CONFIG = MedusaConfig(V, D, num_heads=2, num_draft_layers=1)
SIZES = {"vocab_size": V, "hidden_size": D}


def test_heads_are_stored_under_the_names_of_their_authors(tmp_path: Path) -> None:
    heads = cast(random_drafter(CONFIG), "bfloat16")
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


@pytest.mark.parametrize(
    "config",
    [
        MedusaConfig(V, D, 3, 0, draft_tokens=(0, 5, 12)),
        MedusaConfig(V, D, 1, 2, draft_tokens=(1, 2), head="target"),
    ],
    ids=str,
)
def test_what_is_saved_comes_back(tmp_path: Path, config: MedusaConfig) -> None:
    save_drafter(random_drafter(config), tmp_path)
    assert_same(load_drafter(tmp_path, dtype="float32"), random_drafter(config))


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
    assert told[-1] == "Apple's code cannot load it: it does not know Medusa heads."
    with pytest.raises(InputError, match="a drafter with Medusa heads, which Apple's layout does"):
        convert(published, tmp_path / "other", for_apple=True)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"medusa_num_heads": 4}, r"holds no weight '3\.0\.linear\.\w+'; the model is incomplete"),
        ({"medusa_num_heads": "2"}, r"states medusa_num_heads='2'; it must be a whole number"),
        ({"medusa_num_heads": 10**9}, r"medusa_num_heads=1000000000 and .* hold 15 weights"),
        ({"medusa_num_layers": 1}, r"no matrix '0\.1\.weight', the vocabulary projection that"),
        ({"medusa_num_layers": ...}, r"does not state 'medusa_num_layers', and it has no default"),
        ({"model_type": "medusa"}, r"does not state 'vocab_size', and it has no default"),
        (SIZES | {"model_type": "medusa"}, r"holds the weight '2\.0\.linear\.bias' and 4 more, "),
        (SIZES | {"model_type": "medusa", "medusa_num_heads": 0}, r"num_heads is 0; it must be gr"),
        (
            SIZES | {"model_type": "medusa", "medusa_num_heads": 3, "head": "low_rank"},
            r"json: head is 'low_rank'; it must be one of own, target\.$",
        ),
        (
            {"model_type": "medusa", "medusa_num_heads": 3, "vocab_size": V, "hidden_size": 9},
            r"has shape \(8,.*\), its configuration asks for \(9,.*\)\.$",
        ),
    ],
)
def test_heads_that_are_not_what_their_config_says(
    published: Path, fields: dict[str, Any], sentence: str
) -> None:
    change_json(published / "config.json", **fields)
    with pytest.raises(InputError, match=sentence):
        load_drafter(published)
