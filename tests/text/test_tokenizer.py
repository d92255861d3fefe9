"""The tokenizer beside a target."""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chat_folders import CHATML, auto_tokenizer, write_sentencepiece, write_tokenizer
from mixed_lines import mixed_lines
from tiny_folders import byte_tokenizer
from tiny_gguf import CONFIG, tokenizer_fields, write_random
from tiny_models import random_target
from tokenizers import Tokenizer

from redrafter_jax import InputError, load_target
from redrafter_jax.files.target_files import load_tokenizer, open_target
from redrafter_jax.text.tokenizer import encode, split_stops


def read_tokenizer(folder: Path) -> Tokenizer:
    return open_target(folder).tokenizer


def test_a_tokenizer_never_truncates_or_pads(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(read_tokenizer(tmp_path).encode("abcde").ids) == 5


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
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer: .*\.$"):
        read_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer.json is missing"):
        read_tokenizer(tmp_path)
    with pytest.raises(InputError, match="does not exist, and is not an id on the Hugging Face"):
        read_tokenizer(tmp_path / "none")


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


ROW = "<|im_start|>user\nHi<|im_end|>\n"


def write_settings(folder: Path, **settings: object) -> Path:
    """A byte per token in `tokenizer.json`, and what stands beside it."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    given = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder


def test_tokens_that_other_files_add_are_added(tmp_path: Path) -> None:
    marks = {"256": "<|im_start|>", "257": "<|im_end|>"}
    added = {id: {"content": mark, "special": False} for id, mark in marks.items()}
    folder = write_settings(tmp_path, added_tokens_decoder=added, eos_token="<|im_end|>")
    ids = read_tokenizer(folder).encode(ROW).ids
    hi = byte_tokenizer().encode("user\nHi").ids
    assert ids == [256, *hi, 257, *byte_tokenizer().encode("\n").ids]
    assert ids == auto_tokenizer(folder)(ROW)["input_ids"]
    # As older versions of transformers wrote them.
    write_settings(folder, eos_token="<|im_end|>")
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 256, "<|im_end|>": 257}))
    assert read_tokenizer(folder).encode(ROW).ids == ids
    # And one that is only a special token by its role.
    (folder / "added_tokens.json").unlink()
    read = read_tokenizer(folder)
    assert read.encode(ROW).ids.count(256) == 1
    assert read.encode(ROW).ids == auto_tokenizer(folder)(ROW)["input_ids"]


def test_a_sentencepiece_model_alone_is_read(tmp_path: Path) -> None:
    theirs = write_sentencepiece(tmp_path / "vicuna")
    ours = read_tokenizer(tmp_path / "vicuna")
    # Before a space transformers puts no further one.
    lines = [line for line in mixed_lines()[3000:4000] if line[:1].strip() and "<" not in line]
    assert len(lines) > 500
    for line in lines:
        ids = ours.encode(line).ids
        assert ids == [1, *theirs.encode(line)], line
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_tokenizer_of_transformers_is_loaded_from_a_folder_or_a_gguf_file(
    tmp_path: Path,
) -> None:
    folder = write_tokenizer(tmp_path / "folder")
    loaded, turns = load_tokenizer(folder), [{"role": "user", "content": "Hi"}]
    own = auto_tokenizer(folder).apply_chat_template(turns, add_generation_prompt=True)
    assert loaded.apply_chat_template(turns, add_generation_prompt=True) == own
    path = tmp_path / "model.gguf"
    fields = tokenizer_fields("smollm") | {"tokenizer.chat_template": CHATML}
    config = dataclasses.replace(CONFIG, vocab_size=900)
    write_random(path, "F32", config, **fields)
    loaded, read = load_tokenizer(path), read_tokenizer(path)
    written = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == written
    for line in mixed_lines()[:200]:
        assert loaded.encode(line) == read.encode(line).ids
    # And from a loaded target, but not from one that was made otherwise.
    target = load_target(path, "float32")
    assert load_tokenizer(target).encode("the house") == loaded.encode("the house")
    with pytest.raises(
        InputError, match="was not loaded from files, so it has no tokenizer; give load_tokenizer"
    ):
        load_tokenizer(random_target(config))
