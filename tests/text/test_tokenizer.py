"""The tokenizer beside a target."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_folders import byte_tokenizer

from redrafter_jax import InputError
from redrafter_jax.text.tokenizer import encode, load_tokenizer, split_stops


def test_a_tokenizer_never_truncates_or_pads(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("abcde").ids) == 5


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    # A server would answer nobody for as long.
    tokenizer, text = byte_tokenizer(), "word " * 50_000
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(encode, tokenizer, text)
        turns = 0
        while not encoding.done():
            time.sleep(0.001)
            turns += 1
    assert turns > 20
    assert encoding.result() == tokenizer.encode(text).ids


BPE = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": %s}}'


@pytest.mark.parametrize(
    "content",
    [
        "{",
        BPE % '[["a", "c"]]',
        # Its Rust code panics, which is no Exception.
        BPE % '[["a", "b"]], "continuing_subword_prefix": "###"',
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json is no tokenizer: .*\.$"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="neither a folder nor an id of the Hugging Face hub"):
        load_tokenizer(tmp_path / "none")


def test_stop_strings_that_are_special_tokens_become_tokens() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|end|>"])
    end = tokenizer.get_vocab()["<|end|>"]
    assert split_stops(tokenizer, ["ab", "<|end|>", "|>"]) == ((end,), ["ab", "|>"])
    assert "<|end|>" not in tokenizer.decode([97, end]), "no text holds it"
    with pytest.raises(InputError, match=r"'<\|end\|>user' holds the special token '<\|end\|>', "):
        split_stops(tokenizer, ["<|end|>user"])
    # A special token that holds another is one token still.
    tokenizer.add_special_tokens(["<|end|>user"])
    assert split_stops(tokenizer, ["<|end|>user"]) == ((end + 1,), [])
