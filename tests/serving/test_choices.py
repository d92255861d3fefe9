"""From the engine's tokens to the text of an answer, and to the bytes of each token."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixed_lines import mixed_lines
from tiny_folders import byte_tokenizer
from tiny_gguf import tokenizer_fields
from tokenizers import AddedToken, Tokenizer

from redrafter_jax.files.gguf_header import Header
from redrafter_jax.files.gguf_tokenizer import gguf_tokenizer
from redrafter_jax.serving.choices import Choice, token_spellings
from redrafter_jax.serving.messages import Event, Token
from redrafter_jax.text.tokenizer import special_tokens


def build(kind: str) -> Tokenizer:
    fields = tokenizer_fields(kind) | {"tokenizer.ggml.add_bos_token": False}
    return gguf_tokenizer(Header(Path("model.gguf"), fields, {}))


# Byte-level BPE, and SentencePiece's with bytes for what it does not know.
KINDS = {kind: build(kind) for kind in ("smollm", "llama-bpe", "llama", "gemma")}
LINES = [line for line in mixed_lines()[::200] if line]


def answer(tokenizer: Tokenizer, prompt: list[int], ids: list[int], gap: str = "") -> list[Token]:
    tokens = [Token(id, -1.0, [], 0, None) for id in ids]
    choice = Choice(tokenizer, prompt, [], gap)
    events = [Event(0, [token]) for token in tokens[:-1]] + [Event(0, tokens[-1:], "length")]
    return [token for event in events for token in choice.take(event).tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_an_answer_are_those_of_its_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    for prompt in (list(special_tokens(tokenizer))[:1], tokenizer.encode("An answer:").ids):
        for line in LINES:
            tokens = answer(tokenizer, prompt, tokenizer.encode(line, add_special_tokens=False).ids)
            text = "".join(token.text for token in tokens)
            assert b"".join(token.raw for token in tokens) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(min_size=1, max_size=12))
def test_parts_of_characters_have_their_own_bytes(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(f"a{text}", add_special_tokens=False).ids
    spell = token_spellings(tokenizer)
    raw = b"".join(spell(id).raw for id in ids).lstrip(b" ")
    assert raw.decode() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_spells_nothing_has_no_bytes(kind: str) -> None:
    tokenizer = KINDS[kind]
    (ending,) = tokenizer.encode("b", add_special_tokens=False).ids[-1:]
    assert token_spellings(tokenizer, [ending])(ending).raw == b""
    for id, added in tokenizer.get_added_tokens_decoder().items():
        spelling = token_spellings(tokenizer)(id)
        assert spelling.text == added.content
        assert spelling.raw == (b"" if added.special else added.content.encode())


def test_bytes_read_as_openai_writes_them() -> None:
    snowman = "\N{SNOWMAN}"
    spell = token_spellings(KINDS["llama"])
    parts = KINDS["llama"].encode(snowman, add_special_tokens=False).ids[-3:]
    assert [spell(id) for id in parts] == [("\ufffd", bytes([byte])) for byte in snowman.encode()]
    assert [spell(id).escaped for id in parts] == ["bytes:\\xe2", "bytes:\\x98", "bytes:\\x83"]


def test_every_byte_of_a_byte_level_tokenizer_is_that_of_gpt_2() -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # slow

    spell = token_spellings(KINDS["smollm"])
    vocabulary = KINDS["smollm"].get_vocab()
    for byte, character in bytes_to_unicode().items():
        assert spell(vocabulary[character]).raw == bytes([byte])


def test_what_a_template_writes_before_an_answer_has_no_bytes_either() -> None:
    tokenizer = KINDS["smollm"]
    first, second = answer(tokenizer, [0], tokenizer.encode(" a b").ids, gap=" ")
    assert (first.raw, second.raw) == (b"a", b" b")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("stop", [[], ["c"]])
def test_what_ends_an_answer_is_no_part_of_it(special: bool, stop: list[str]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=special)])
    ids = tokenizer.encode("ab<|im_end|>").ids
    choice = Choice(tokenizer, [0], stop)
    decided = [Token(id, -0.5, [], call, None) for call, id in enumerate(ids)]
    piece = choice.take(Event(0, decided, "stop"))
    assert (piece.text, piece.finish) == ("ab", "stop")
    assert [token.text for token in piece.tokens] == ["a", "b", ""]
    assert [token.raw for token in piece.tokens] == [b"a", b"b", b""]
