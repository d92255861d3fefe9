"""A real model's file: SmolLM2-135M-Instruct, quantized, against PyTorch and slow tokenizers."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from mixed_lines import digests, mixed_lines
from needs import fetched
from places import GOLDENS

from redrafter_jax import generate, generate_autoregressive, load_target
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.files.gguf_header import read_header
from redrafter_jax.files.gguf_tokenizer import gguf_tokenizer
from redrafter_jax.files.real_models import SMOLLM2
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.target import Target
from redrafter_jax.text.chat_template import encode_turns, end_tokens, find_template

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def path() -> Path:
    return fetched(SMOLLM2)


@pytest.fixture(scope="module")
def target(path: Path) -> Target:
    return load_target(path, "float32")


@pytest.fixture(scope="module")
def answers() -> list[dict[str, np.ndarray]]:
    """A question, its prompt, 64 greedy tokens, and some of the logits along the text."""
    with np.load(GOLDENS / "gguf" / "smollm2.npz") as arrays:
        names = ("question", "prompt", "greedy", "logits")
        return [{name: arrays[f"{name}_{number}"] for name in names} for number in range(10)]


@jax.jit
def read(target: Target, tokens: Any) -> jax.Array:
    """Logits of every token."""
    decoder = target.merge()
    return decoder.logits(decoder.forward(tokens)[0])


def test_prompts_are_written_by_the_files_template(
    path: Path, target: Target, answers: list[dict[str, np.ndarray]]
) -> None:
    files = open_target(path)
    tokenizer = files.tokenizer
    template = find_template("tokenizer", files, "--chat-template ")
    turns = [[{"role": "user", "content": str(answer["question"])}] for answer in answers]
    for conversation, answer in zip(turns, answers, strict=True):
        assert encode_turns(template, tokenizer, conversation) == answer["prompt"].tolist()
    ends = end_tokens(template, tokenizer, target.config.eos_token_ids, turns)
    assert [tokenizer.id_to_token(end) for end in ends] == ["<|im_end|>"]


def test_float32_logits_are_pytorchs(target: Target, answers: list[dict[str, np.ndarray]]) -> None:
    texts = [np.concatenate([answer["prompt"], answer["greedy"]]) for answer in answers]
    longest = max(map(len, texts))
    for text, answer in zip(texts, answers, strict=True):
        padded = np.pad(text, (0, longest - len(text)))
        logits = np.asarray(read(target, padded[None])[0, : len(text) : 8, ::61])
        difference = np.abs(logits - answer["logits"]).max()
        assert difference < 1e-4 * np.abs(answer["logits"]).max()


def test_greedy_texts_are_pytorchs(target: Target, answers: list[dict[str, np.ndarray]]) -> None:
    prompts = [answer["prompt"].tolist() for answer in answers]
    expected = [answer["greedy"].tolist() for answer in answers]
    settings: dict[str, Any] = {"max_new_tokens": 64, "eos_token_ids": ()}
    assert generate_autoregressive(target, prompts, **settings).tokens == expected
    assert generate(target, PromptLookup(), prompts, **settings).tokens == expected


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_ids_are_those_of_the_reference(path: Path, pre: str) -> None:
    """With the pre-tokenizer of others, too: their names are all that a header holds of them."""
    header = read_header(path)
    fields = header.values | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    tokenizer = gguf_tokenizer(header._replace(values=fields))
    expected = json.loads((GOLDENS / "gguf" / "smollm2_tokens.json").read_text())[pre]
    assert digests(line.ids for line in tokenizer.encode_batch(mixed_lines())) == expected
