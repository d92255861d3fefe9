"""The tokenizer of the small target: no byte is lost, and transformers reads it too."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from redrafter_jax.text.tokenizer import load_tokenizer
from tools.tokenizer import save_tokenizer, train_tokenizer

END = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["def f(x):\n    return x + 1\n" * 20], 300)


def test_the_tokenizer_gives_every_text_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded = load_tokenizer(tmp_path)
    for text in ("def f(x):\n\n\treturn  {'é': 12345}\n", "日本 \r\n  ", ""):
        assert loaded.decode(loaded.encode(text).ids) == text


def test_transformers_reads_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "def g(y):\n    return y - 12\n"
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    assert theirs.eos_token_id == END
