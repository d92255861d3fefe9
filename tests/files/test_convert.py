"""Model folders written once more: what is in them, and what is refused."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from places import GOLDENS
from safetensors.flax import load_file as load_arrays
from safetensors.flax import save_file as save_arrays
from safetensors.numpy import load_file, save_file
from tiny_folders import change_json, write_index
from tiny_gguf import write_random
from tiny_models import assert_same, random_drafter, random_target, tiny_config
from torch_archives import write_archive

from redrafter_jax import InputError, RecurrentConfig, load_target, save_drafter, save_target
from redrafter_jax.files.convert import convert as convert_folder
from redrafter_jax.files.weight_files import write_shard

assert_identical = partial(chex.assert_trees_all_equal, strict=True)
CONFIG = RecurrentConfig(vocab_size=13, hidden_size=8, exit_dim=5, num_draft_layers=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter and a target."""
    folder = tmp_path_factory.mktemp("saved")
    save_drafter(random_drafter(CONFIG), folder / "drafter")
    config = tiny_config(num_hidden_layers=1, tie_word_embeddings=True)
    save_target(random_target(config), folder / "target")
    return folder


def torch_folder(folder: Path, source: Path, weights: Mapping[str, np.ndarray]) -> Path:
    """The folder with its weights in a file of torch's."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    write_archive(folder / "pytorch_model.bin", weights)
    return folder


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_torchs_weights_become_safetensors_as_they_are(
    tmp_path: Path, saved: Path, dtype: str
) -> None:
    weights = load_file(saved / "drafter" / "model.safetensors")
    weights = {name: value.astype(dtype) for name, value in weights.items()}
    source = torch_folder(tmp_path / "apple", saved / "drafter", weights)
    told, files = convert_folder(source, tmp_path / "new", for_apple=True)
    assert_identical(load_file(tmp_path / "new" / "model.safetensors"), weights)
    assert (tmp_path / "new" / "config.json").read_text() == (source / "config.json").read_text()
    size = sum(value.nbytes for value in weights.values())
    assert f"a drafter of 8 weights, {size:,} bytes" in told
    assert files == "Written: model.safetensors, config.json"
    assert not (tmp_path / "new.partial").exists()


@pytest.mark.parametrize(
    ("stored", "stated"), [("Q8_0", "float32"), ("F16", "float16"), ("BF16", "bfloat16")]
)
def test_the_folder_of_a_gguf_file_states_the_dtype_of_its_weights(
    tmp_path: Path, stored: str, stated: str
) -> None:
    write_random(tmp_path / "model.gguf", stored)
    convert_folder(tmp_path / "model.gguf", tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["torch_dtype"] == stated


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype"])
def test_another_dtype_is_rounded_and_stated(tmp_path: Path, saved: Path, spelling: str) -> None:
    source = shutil.copytree(saved / "drafter", tmp_path / "ours")
    change_json(source / "config.json", **{"torch_dtype": ..., spelling: "float32"})
    fields = json.loads((source / "config.json").read_text())
    told, _ = convert_folder(source, tmp_path / "new", "bfloat16")
    weights = load_file(source / "model.safetensors")
    expected = {name: jnp.asarray(value, jnp.bfloat16) for name, value in weights.items()}
    assert_identical(load_arrays(tmp_path / "new" / "model.safetensors"), expected)
    described = json.loads((tmp_path / "new" / "config.json").read_text())
    assert described == fields | {spelling: "bfloat16"}
    assert " bytes, BF16; it loads" in told


def test_shards_stay_shards_and_what_belongs_to_a_target_comes_along(
    tmp_path: Path, saved: Path
) -> None:
    weights = load_file(saved / "target" / "model.safetensors")
    # Torch's files of a tied target hold the head too.
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    source = tmp_path / "apple"
    source.mkdir()
    shutil.copy(saved / "target" / "config.json", source)
    (source / "tokenizer.json").write_text('{"a": 1}')
    names, placed = sorted(both), {}
    for file, part in (("a.bin", names[::2]), ("b.bin", names[1::2])):
        write_archive(source / file, {name: both[name] for name in part})
        placed |= dict.fromkeys(part, file)
    write_index(source / "pytorch_model.bin.index.json", placed)

    told, files, left_out = convert_folder(source, tmp_path / "new")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index_name = "model.safetensors.index.json"
    written = {*shards, index_name, "config.json", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "new").iterdir()} == written
    assert set(files.removeprefix("Written: ").split(", ")) == written
    assert_identical(
        load_file(tmp_path / "new" / shards[0]) | load_file(tmp_path / "new" / shards[1]), weights
    )
    index = json.loads((tmp_path / "new" / index_name).read_text())
    assert f"a target of {len(weights)} weights, {index['metadata']['total_size']:,} bytes" in told
    assert left_out == "Left out, because loading ignores them: lm_head.weight"
    assert (tmp_path / "new" / "tokenizer.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize("within", ["language_model.model.", "model.language_model."])
def test_a_model_for_images_becomes_its_text_model(tmp_path: Path, within: str) -> None:
    golden, source = GOLDENS / "families" / "gemma3", tmp_path / "whole"
    source.mkdir()
    text = json.loads((golden / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**text, "architectures": None},
    }
    (source / "config.json").write_text(json.dumps(whole))
    weights = load_arrays(golden / "model.safetensors")
    named = {within + name.removeprefix("model."): value for name, value in weights.items()}
    image = {f"vision_tower.{layer}.weight": jnp.ones(4) for layer in range(6)}
    save_arrays(named | image, source / "model.safetensors")
    assert_same(load_target(source), load_target(golden))

    told = convert_folder(source, tmp_path / "new")
    assert told[-1].endswith(": vision_tower.0.weight, vision_tower.1.weight and 4 more")
    assert_identical(load_arrays(tmp_path / "new" / "model.safetensors"), weights)
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == text


def test_ours_come_out_byte_for_byte_and_nothing_is_overwritten(
    tmp_path: Path, saved: Path
) -> None:
    (tmp_path / "new").mkdir()
    source = shutil.copytree(saved / "drafter", tmp_path / "drafter")
    (source / "draft.yaml").write_text("device: a\n")
    convert_folder(source, tmp_path / "new")
    for file in ("model.safetensors", "config.json", "draft.yaml"):
        assert (tmp_path / "new" / file).read_bytes() == (source / file).read_bytes()
    with pytest.raises(InputError, match="dtype 'int8' is not supported; use float32 or bfloat16"):
        convert_folder(saved / "drafter", tmp_path / "other", "int8")
    with pytest.raises(InputError, match="new exists already; name a new folder, or"):
        convert_folder(saved / "target", tmp_path / "new")
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(InputError, match=r"other\.partial exists: another conversion is running"):
        convert_folder(saved / "target", tmp_path / "other")
    assert (tmp_path / "other.partial").exists()


def test_a_folder_appears_whole_or_not_at_all(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(saved / "drafter" / "model.safetensors")
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    weights["rnn_u.bias"][3] = 1e300
    source = torch_folder(tmp_path / "apple", saved / "drafter", weights)
    with pytest.raises(
        InputError, match=r"'rnn_u\.bias' holds numbers beyond the range of float32"
    ):
        convert_folder(source, tmp_path / "new", "float32")

    def write_to_a_faulty_disk(path: Path, *weights: Any) -> Any:
        told = write_shard(path, *weights)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")
        return told

    monkeypatch.setattr("redrafter_jax.files.convert.write_shard", write_to_a_faulty_disk)
    with pytest.raises(InputError, match=r"differs after it was written; .* faulty"):
        convert_folder(saved / "drafter", tmp_path / "new")
    monkeypatch.undo()

    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "apple" / "model.safetensors")
    with pytest.raises(InputError, match="holds no weight"):
        convert_folder(source, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["apple"]


def test_the_command_says_what_was_written_and_what_apples_code_does_not_know(
    tmp_path: Path, saved: Path, run_redrafter: Any
) -> None:
    config = dataclasses.replace(CONFIG, draft_tokens=(0, 3, 4))
    source = tmp_path / "fewer"
    save_drafter(random_drafter(config), source)
    _, out, _ = run_redrafter("convert", str(source), str(tmp_path / "new"), "--dtype", "bfloat16")
    size = sum(value.nbytes for value in load_file(source / "model.safetensors").values()) // 2
    assert out.splitlines() == [
        f"{tmp_path}/new: a drafter of 8 weights, {size} bytes, BF16; it loads the same as "
        f"{tmp_path}/fewer, in bfloat16.",
        "Written: model.safetensors, config.json",
        "Apple's code cannot load it, because that code does not support draft_tokens.",
    ]
    with pytest.raises(InputError, match=r"draft_tokens, which Apple's layout does not support"):
        convert_folder(source, tmp_path / "other", for_apple=True)
    with pytest.raises(InputError, match="is a target, but Apple's code loads"):
        convert_folder(saved / "target", tmp_path / "other", for_apple=True)
    assert not (tmp_path / "other").exists()
