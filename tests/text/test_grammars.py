"""Masks of a grammar, against regular expressions that are tried byte by byte."""

import json
import re
from typing import Any

import numpy as np
import pytest
from schemas import BYTE_VOCABULARY, END, byte_grammars, compiled, end_tokenizer
from tiny_folders import byte_tokenizer

from redrafter_jax import Grammar, InputError
from redrafter_jax.text.grammars import GrammarCompiler

pytest.importorskip("llguidance", reason="needs the extra structured")

WORDS = ["cab", "cabs", "dad", "dot"]


def encode(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


def allowed(mask: np.ndarray[Any, Any]) -> set[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return {int(token) for token in np.nonzero(bits)[0] if token < BYTE_VOCABULARY}


def may_follow(beginning: str) -> set[int]:
    """By the list of words alone."""
    letters = {
        word[len(beginning)] for word in WORDS if word.startswith(beginning) if word != beginning
    }
    return {encode(letter)[0] for letter in letters} | ({END} if beginning in WORDS else set())


def test_a_mask_allows_what_some_match_goes_on_with() -> None:
    matcher = compiled(Grammar(regex="|".join(WORDS))).begin()
    for place, letter in enumerate("cabs"):
        assert allowed(matcher.mask) == may_follow("cabs"[:place])
        matcher.advance(encode(letter))
    assert allowed(matcher.mask) == {END}
    matcher.advance([END])
    assert matcher.failed is None


def test_masks_of_a_tree_follow_its_paths() -> None:
    """Nodes that may not come, and end tokens, have nothing below them that could be chosen."""
    matcher = compiled(Grammar(regex="|".join(WORDS))).begin()
    matcher.advance(encode("d"))
    texts = ["d", "da", "do", "dad", "dot", "dx", "dxa", "", "dad"]
    parents = [0, 0, 0, 1, 2, 0, 5, 0, 3]
    tokens = [encode(text)[-1] if text else -1 for text in texts[:-1]] + [END]
    before = allowed(matcher.mask)
    masks = matcher.masks(tokens, parents)
    everything = set(range(BYTE_VOCABULARY))
    for node, text in enumerate(texts):
        free = node in (5, 6, 7, 8)
        assert allowed(masks[node]) == (everything if free else may_follow(text)), text
    assert allowed(matcher.mask) == before, "the state is that of the text"


def test_tokens_without_a_choice_are_forced() -> None:
    matcher = compiled(Grammar(regex="(hello world|hi)!")).begin()
    assert matcher.forced(4) == encode("h")
    matcher.advance(encode("he"))
    assert matcher.forced(20) == encode("llo world!")
    assert matcher.forced(3) == encode("llo")


def test_json_is_written_on_one_line() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [2]}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    matcher = compiled(Grammar(json_schema=schema)).begin()
    assert matcher.forced(99) == encode(json.dumps({"a": 1, "b": [2]}))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (Grammar({"not": {"type": "null"}}), 'Unimplemented keys: ["not"]'),
        (Grammar({"type": "text"}), "json_schema cannot be used"),
        (Grammar(regex="a(?=b)"), "regex cannot be used"),
        (Grammar(regex="("), "regex cannot be used"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(grammar: Grammar, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        compiled(grammar)


def test_the_latest_grammars_are_kept() -> None:
    grammars = byte_grammars()
    first = grammars.compile(Grammar({"const": 1}))
    assert grammars.compile(Grammar({"const": 1})) is first
    for number in range(2, 30):
        grammars.compile(Grammar({"const": number}))
    assert grammars.compile(Grammar({"const": 1})) is not first


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InputError, match="nested too deeply"):
        compiled(Grammar(schema))


def test_a_grammar_is_one_of_two() -> None:
    wrong: list[dict[str, Any]] = [{}, {"json_schema": {}, "regex": "a"}]
    for arguments in wrong:
        with pytest.raises(InputError, match="json_schema or a regex; give exactly one"):
            Grammar(**arguments)


def test_a_text_without_an_end_cannot_be_held() -> None:
    with pytest.raises(InputError, match="needs an end token"):
        GrammarCompiler(byte_tokenizer(), BYTE_VOCABULARY, []).compile(Grammar(regex="a"))
    assert byte_grammars().compile(Grammar(regex="a")).end_tokens == {END}


def test_a_schema_that_is_no_json_is_refused() -> None:
    with pytest.raises(InputError, match="json_schema is not JSON"):
        compiled(Grammar({"enum": {1, 2}}))


def test_a_grammar_is_told_before_it_is_compiled_and_only_then() -> None:
    told: list[tuple[str, str]] = []
    grammars = GrammarCompiler(
        end_tokenizer(), BYTE_VOCABULARY, [END], lambda name, stated: told.append((name, stated))
    )
    for regex in ("a", "b", "a"):
        grammars.compile(Grammar(regex=regex))
    assert told == [("regex", "a"), ("regex", "b")]
