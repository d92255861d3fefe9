"""Tokenizers of GGUF headers against those of transformers, OpenAI and SentencePiece."""

import json
from pathlib import Path
from typing import Any

import pytest
from mixed_lines import LINES_PER_DIGEST, digests, mixed_lines
from places import GOLDENS
from tiny_gguf import tokenizer_fields
from tokenizers import Tokenizer

from redrafter_jax import InputError
from redrafter_jax.files.gguf_header import Header
from redrafter_jax.files.gguf_tokenizer import gguf_tokenizer

DIGESTS = json.loads((GOLDENS / "gguf" / "tokenizers.json").read_text())["digests"]
LINES = mixed_lines()


def build(kind: str, **changes: Any) -> Tokenizer:
    """From the golden's small vocabulary, which adds no tokens unless asked to; `...` is none."""
    fields = tokenizer_fields(kind) | {"tokenizer.ggml.add_bos_token": False}
    fields |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    values = {name: value for name, value in fields.items() if value is not ...}
    return gguf_tokenizer(Header(Path("model.gguf"), values, {}))


@pytest.mark.parametrize("kind", DIGESTS)
def test_ids_are_those_of_the_reference_over_10_000_lines(kind: str) -> None:
    found = digests(line.ids for line in build(kind).encode_batch(LINES))
    pairs = zip(found, DIGESTS[kind], strict=True)
    differing = [number for number, (ours, theirs) in enumerate(pairs) if ours != theirs]
    assert not differing, LINES[LINES_PER_DIGEST * differing[0] :][:LINES_PER_DIGEST]


# What llama.cpp reads as the pattern of another name, with the model whose files state it.
ALIASES = [
    ("deepseek-r1-qwen", "qwen2"),  # DeepSeek-R1-Distill-Qwen
    ("megrez", "qwen2"),
    ("llama3", "llama-bpe"),  # Llama 3, converted early
    ("llama-v3", "llama-bpe"),
    ("falcon3", "llama-bpe"),
    ("mellum", "gpt-2"),
    ("phi-2", "gpt-2"),
    ("olmo", "gpt-2"),
    ("refact", "smollm"),  # Granite's code models
    ("minerva-7b", "smollm"),
]


@pytest.mark.parametrize(("alias", "kind"), ALIASES)
def test_other_names_of_a_pattern_are_that_pattern(alias: str, kind: str) -> None:
    found = digests(line.ids for line in build(kind, pre=alias).encode_batch(LINES))
    assert found == DIGESTS[kind]
    bos = {"bos_token_id": 0, "add_bos_token": ...}
    adds = kind == "llama-bpe"  # in llama.cpp's table too, where the header is silent
    assert (build(kind, pre=alias, **bos).encode("the").ids[0] == 0) is adds


def test_llama_3s_pattern_without_its_exceptions() -> None:
    """`smaug-bpe`: Llama 3's pattern, but merges are followed and no token opens a text."""
    plain, llama = (build("llama-bpe", pre=pre) for pre in ("smaug-bpe", "llama-bpe"))
    assert json.loads(plain.to_str())["model"]["ignore_merges"] is False
    assert json.loads(llama.to_str())["model"]["ignore_merges"] is True
    assert plain.pre_tokenizer.pre_tokenize_str("It's 12345 now\n\n  x") == (
        llama.pre_tokenizer.pre_tokenize_str("It's 12345 now\n\n  x")
    )
    opened = build("llama-bpe", pre="smaug-bpe", bos_token_id=0, add_bos_token=...)
    assert opened.encode("the").ids[0] != 0


@pytest.mark.parametrize("kind", ["smollm", "gpt-2", "llama-bpe", "llama", "gemma"])
def test_text_comes_back(kind: str) -> None:
    """But for special tokens, which decoded text leaves out."""
    tokenizer = build(kind)
    special = [
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    ]
    lines = [line for line in LINES[::5] if not any(token in line for token in special)]
    assert len(lines) > 1600
    encoded = [line.ids for line in tokenizer.encode_batch(lines)]
    for line, text in zip(lines, tokenizer.decode_batch(encoded), strict=True):
        assert text == line


@pytest.mark.parametrize(
    ("kind", "changes", "added"),
    [
        ("smollm", {"add_bos_token": ...}, []),
        ("smollm", {"add_bos_token": True}, [0]),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [0, 1]),
        # What llama.cpp does where the header is silent.
        ("llama-bpe", {"add_bos_token": ...}, [0]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("llama", {"add_bos_token": ...}, [0]),
    ],
)
def test_the_header_says_whether_tokens_are_added(
    kind: str, changes: dict[str, Any], added: list[int]
) -> None:
    tokenizer = build(kind, bos_token_id=0, eos_token_id=1, **changes)
    ids = tokenizer.encode("the").ids
    plain = tokenizer.encode("the", add_special_tokens=False).ids
    assert ids == [*added[:1], *plain, *added[1:]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pre": "tekken"}, "names the pre-tokenizer 'tekken'; supported are 'gpt-2', 'smollm', "),
        ({"pre": ...}, r"does not state 'tokenizer\.ggml\.pre', which has no default"),
        ({"model": "bert"}, "a tokenizer of the kind 'bert'; supported are 'gpt2' and 'llama'"),
        ({"tokens": ["a", "b", "a"], "token_type": [1] * 3}, "states 3 tokens, 2 of them di"),
        ({"token_type": [1]}, "states 900 tokens, 900 of them distinct, and 1 types"),
        ({"tokens": [1, 2]}, r"entries in tokenizer\.ggml\.tokens that are not of type str"),
        ({"tokens": "abc"}, r"states tokenizer\.ggml\.tokens='abc'; it must be a list"),
        ({"merges": ["a zzz"]}, "holds a damaged tokenizer: "),
        ({"merges": ["ab"]}, "holds a damaged tokenizer: "),
        ({"bos_token_id": 900}, r"states tokenizer\.ggml\.bos_token_id=900, outside its 900 tok"),
        (
            {"model": "llama", "scores": [0.0]},
            "states 900 tokens, but 1 scores; the file is",
        ),
        (
            {"add_bos_token": True},
            r"asks for bos tokens, but does not state tokenizer\.ggml\.",
        ),
    ],
)
def test_headers_without_a_whole_tokenizer(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build("smollm", **changes)


def test_what_no_piece_spells_is_the_unknown_token_where_there_are_no_bytes() -> None:
    tokens, unknown, normal = ["<unk>", "\N{LOWER ONE EIGHTH BLOCK}", "a", "<"], 2, 1
    vocabulary = {"tokens": tokens, "scores": [0.0] * 4, "token_type": [unknown, *[normal] * 3]}
    tokenizer = build("llama", **vocabulary)
    assert tokenizer.encode("a\N{EURO SIGN}").ids == [1, 2, 0]
