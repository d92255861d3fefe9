"""Models as drafters by their names: which files are models, and which tokens they must have."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import CHARACTERS, PairFolders, change_json, character_tokenizer
from tiny_gguf import write_random
from tiny_models import assert_same, tiny_config

from redrafter_jax import (
    InputError,
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
    load_drafter,
    load_target,
)
from redrafter_jax.drafters.model_drafter import ModelDrafter
from redrafter_jax.files.drafter_files import find_drafter, find_head
from redrafter_jax.files.target_files import open_target
from redrafter_jax.files.tree_table import find_tree_table
from redrafter_jax.models.target import Target

V = tiny_config().vocab_size
# Rows of Q4_0 are blocks of 32.
BLOCKS = tiny_config(intermediate_size=64, max_position_embeddings=64)


def test_a_folder_or_a_file_of_a_model_is_loaded_as_a_target_is(
    folders: PairFolders, tmp_path: Path
) -> None:
    assert_same(load_drafter(folders.target, "float32"), load_target(folders.target, "float32"))
    path = tmp_path / "small.gguf"
    write_random(path, "Q4_0", BLOCKS)
    assert_same(load_drafter(path, "float32"), load_target(path, "float32"))
    assert find_tree_table(path) is None


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("keep", [False, True])
def test_a_gguf_file_drafts_for_another(tmp_path: Path, keep: bool) -> None:
    """With blocks dequantized, and kept as they are."""
    write_random(tmp_path / "large.gguf", "Q8_0", replace(BLOCKS, num_hidden_layers=3))
    write_random(tmp_path / "small.gguf", "Q4_0", BLOCKS)
    target = load_target(tmp_path / "large.gguf", "float32", keep_quantized=keep)
    small = load_drafter(tmp_path / "small.gguf", "float32", target=target)
    batch: dict[str, Any] = {"prompts": [[1, 2, 3], [4]], "max_new_tokens": 12}
    batch["sampling"] = [SamplingConfig(), SamplingConfig(1.0)]
    expected = generate_autoregressive(target, **batch).tokens
    drafted = generate(target, small, tree=TreeConfig(beam_width=2, draft_rounds=2), **batch)
    assert drafted.tokens == expected


def test_a_part_of_the_target_needs_the_target(folders: PairFolders, target: Target) -> None:
    part = load_drafter("self:layers=1", target=target)
    assert isinstance(part, ModelDrafter)
    assert part.shares_cache
    with pytest.raises(InputError, match=r"'self:int8', .* call load_drafter\(.*target=target\)"):
        load_drafter("self:int8")
    found = find_drafter("self:layers=1", open_target(folders.target))
    assert found.config == tiny_config(num_hidden_layers=1)
    assert found.digest() == "self:layers=1"
    assert find_tree_table("self:layers=1") is None


def test_a_model_is_no_head_to_start_training_from(folders: PairFolders) -> None:
    with pytest.raises(InputError, match="is a model, not a trained head; give a head's folder"):
        find_head(folders.target)


def copy_of(folders: PairFolders, folder: Path, characters: str | None = CHARACTERS) -> Path:
    """The target's folder, its tokens in another order; None takes the tokenizer out."""
    shutil.copytree(folders.target, folder)
    path = folder / "tokenizer.json"
    if characters is None:
        path.unlink()
        return folder
    values = json.loads(character_tokenizer().to_str())
    values["model"]["vocab"] = {character: at for at, character in enumerate(characters)}
    path.write_text(json.dumps(values))
    return folder


SWAPPED = "ba" + CHARACTERS[2:]


@pytest.mark.parametrize("characters", [CHARACTERS, SWAPPED, None])
def test_a_few_other_tokens_are_let_pass(
    folders: PairFolders, tmp_path: Path, characters: str | None
) -> None:
    small = copy_of(folders, tmp_path / "small", characters)
    assert find_drafter(small, open_target(folders.target)).config == tiny_config()


def test_other_tokens_are_refused_before_weights_are_looked_for(
    folders: PairFolders, tmp_path: Path
) -> None:
    small = copy_of(folders, tmp_path / "small", CHARACTERS[1:] + "a")
    (small / "model.safetensors").unlink()
    with pytest.raises(InputError) as refused:
        find_drafter(small, open_target(folders.target))
    words = [
        "24 of 24",
        "which is 'b' in the first and 'a' in the second",
        "the target's tokenizer",
    ]
    assert all(word in str(refused.value) for word in words), refused.value
    change_json(small / "config.json", vocab_size=30)
    with pytest.raises(
        InputError, match="vocabulary has 30 tokens, but the target's has 24; use a mod"
    ):
        find_drafter(small, open_target(folders.target))


@pytest.mark.parametrize("tokens", [list(CHARACTERS), list(reversed(CHARACTERS)), None])
def test_the_tokens_of_a_gguf_file_are_compared_too(
    folders: PairFolders, tmp_path: Path, tokens: list[str] | None
) -> None:
    path = tmp_path / "small.gguf"
    fields: dict[str, Any] = {} if tokens is None else {"tokenizer.ggml.tokens": tokens}
    write_random(path, "Q4_0", BLOCKS, **fields)
    target = open_target(folders.target)
    if tokens is None or tokens[0] == "a":
        assert find_drafter(path, target).config.vocab_size == V
    else:
        with pytest.raises(InputError, match=r"small\.gguf has other tokens than .*: 24 of 24"):
            find_drafter(path, target)
