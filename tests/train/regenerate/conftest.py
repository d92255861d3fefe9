"""A chat model to regenerate with: letters, and now and then the end of a turn."""

from pathlib import Path

import jax
import numpy as np
import pytest
from chat_folders import CONFIG, IM_END, chat_tokenizer, write_lines, write_tokenizer
from regenerated import CHATS, LENGTH, LIMIT, Regeneration
from tiny_models import random_drafter, random_target, tiny_config

from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.files.drafter_files import save_drafter
from redrafter_jax.files.target_weights import save_target
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.model import Model


def talkative_target() -> Target:
    config = tiny_config(
        vocab_size=CONFIG.vocab_size,
        num_hidden_layers=1,
        eos_token_ids=CONFIG.eos_token_ids,
    )
    target = random_target(config, seed=3)
    decoder = target.merge()
    head = np.array(decoder.lm_head[...])
    tokenizer = chat_tokenizer()
    said = {IM_END, *(tokenizer.token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz")}
    head[:, [token for token in range(config.vocab_size) if token not in said]] = 0
    head[:, IM_END] *= 3
    decoder.lm_head[...] = jax.numpy.asarray(4 * head)
    return Model.split(config, decoder)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `target` that chats and a `drafter` that knows nothing of it."""
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder / "target")
    target = talkative_target()
    save_target(target, folder / "target")
    shape = RecurrentConfig(target.config.vocab_size, target.config.hidden_size, 24, 1)
    save_drafter(random_drafter(shape), folder / "drafter")
    return folder


@pytest.fixture(scope="session")
def continuing(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Regeneration:
    """Texts go on: the untrained target's own files."""
    data = {"sources": [{"folder": str(target_folder)}], "sequence_length": 16}
    finished = tmp_path_factory.mktemp("continued")
    return Regeneration(target_folder, finished, data=data, prompt_tokens=6, count=5)


@pytest.fixture(scope="session")
def rewriting(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Regeneration:
    """Recorded conversations get other answers."""
    finished = tmp_path_factory.mktemp("rewritten")
    chats = write_lines(finished / "chats.jsonl", *CHATS)
    data = {"sources": [{"files": [chats]}], "sequence_length": LENGTH}
    return Regeneration(chat_folder / "target", finished, data=data, max_new_tokens=LIMIT)


@pytest.fixture(scope="session")
def inventing(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Regeneration:
    """Conversations of which the target writes both sides."""
    return Regeneration(
        chat_folder / "target",
        tmp_path_factory.mktemp("invented"),
        prompts="self",
        data={"sequence_length": 160},
        turns=2,
        max_user_tokens=12,
        max_new_tokens=6,
        count=9,
        batch_size=3,
    )
