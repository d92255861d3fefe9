"""Grammars over a tokenizer: which tokens may come next, by llguidance."""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from redrafter_jax.config import Grammar
from redrafter_jax.errors import InputError

# JSON as `json.dumps` writes it, on one line: where any white space may come, a small model may
# write nothing else any more.
_JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Compiled grammars that are kept: a large schema takes a second, and applications send the same
# few with all of their requests.
_KEPT = 16


class GrammarCompiler:
    """Makes grammars over one tokenizer, which is prepared once; the latest ones are kept.

    Args:
      tokenizer: the target's.
      vocab_size: V of the target.
      end_tokens: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = tuple(end_tokens)
        self._kept = lru_cache(_KEPT)(self._compile)

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """The grammar over the tokenizer's tokens.

        Raises:
          InputError: a keyword of the schema is not supported, or the grammar cannot be read; or
            llguidance is not installed, or does not know the tokenizer.
        """
        if grammar.json_schema is None:
            return self.compile_stated("regex", grammar.regex or "")
        try:
            return self.compile_stated("json_schema", json.dumps(grammar.json_schema))
        except RecursionError:
            raise InputError("json_schema is nested too deeply; give a flatter one.") from None
        except TypeError as error:
            raise InputError(f"json_schema is no JSON: {_in_short(str(error))}") from None

    def compile_stated(self, name: str, stated: str) -> "CompiledGrammar":
        """As `compile`, of what `CompiledGrammar.stated` has, of this compiler or another's."""
        return self._kept(name, stated)

    def _compile(self, name: str, stated: str) -> "CompiledGrammar":
        """The grammar of a JSON Schema or a regular expression, as its text."""
        tokenizer = self._prepared
        from llguidance import LLMatcher

        if name == "json_schema":
            source = LLMatcher.grammar_from_json_schema(stated, overrides=_JSON_STYLE)
        else:
            source = LLMatcher.grammar_from_regex(stated)
        # It logs to stderr unless it is told not to.
        matcher = LLMatcher(tokenizer, source, log_level=0)
        if matcher.is_error():
            raise InputError(f"{name} cannot be used: {_in_short(matcher.get_error())}")
        return CompiledGrammar(matcher, self._end_tokens, self._vocab_size, (name, stated))

    @cached_property
    def _prepared(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise InputError(
                "Grammars need the package llguidance, which is not installed; in a checkout of "
                "redrafter-jax, pip install '.[structured]' installs it."
            ) from None
        if not self._end_tokens:
            raise InputError(
                "A grammar needs a token that ends the text, and there is none; give eos_token_ids."
            )
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.no_padding()
        plain.no_truncation()
        try:
            return LLTokenizer(
                plain.to_str(), n_vocab=self._vocab_size, eos_token=list(self._end_tokens)
            )
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"llguidance cannot read the target's tokenizer: {_in_short(str(error))}"
            ) from None


class CompiledGrammar:
    """A grammar, and the state before a text; from `GrammarCompiler.compile`.

    Attributes:
      end_tokens: tokens that end a text.
      vocab_size: V of the target.
      stated: "json_schema" or "regex", and its text.
    """

    def __init__(
        self, matcher: Any, end_tokens: Sequence[int], vocab_size: int, stated: tuple[str, str]
    ) -> None:
        self.end_tokens = frozenset(end_tokens)
        self.vocab_size = vocab_size
        self.stated = stated
        self._matcher = matcher

    def begin(self) -> "Matcher":
        """The state before a text's first token."""
        words = -(-self.vocab_size // 32)
        return Matcher(self._matcher.deep_copy(), self.end_tokens, words)


class Matcher:
    """The state of a grammar after the new tokens of a text.

    A mask is words of 32 tokens each, the lowest bit first; a set bit allows its token.
    """

    def __init__(self, matcher: Any, end_tokens: frozenset[int], words: int) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._words = words
        self._mask: Int[np.ndarray, " words"] | None = None

    @property
    def failed(self) -> str | None:
        """Why nothing more can be told; None while all is well."""
        return _in_short(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def mask(self) -> Int[np.ndarray, " words"]:
        """The tokens that may come next."""
        if self._mask is None:
            self._mask = self._mask_after(self._matcher)
        return self._mask

    def forced(self, most: int) -> list[int]:
        """The next tokens as far as there is no choice, `most` at most."""
        return self._matcher.compute_ff_tokens()[:most]

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Int[np.ndarray, "N words"]:
        """The tokens that may come after each node of a tree whose root is the text's last token.

        After a token that may not come, one that ends the text, and a padding node, which is -1,
        anything may.
        """
        out = np.full((len(tokens), self._words), -1, np.int32)
        out[0] = self.mask
        # A state for each node that may come: where one fails, the text's own goes on.
        states = {0: self._matcher}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if not node or token < 0 or token in self._end_tokens or parent not in states:
                continue
            word, bit = divmod(token, 32)
            state = states[parent].deep_copy()
            if out[parent, word] >> bit & 1 and state.consume_token(token):
                states[node], out[node] = state, self._mask_after(state)
        return out

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in tokens that are decided."""
        for token in tokens:
            if token in self._end_tokens:
                return
            self._mask = None
            self._matcher.consume_token(token)

    def _mask_after(self, matcher: Any) -> Int[np.ndarray, " words"]:
        from llguidance.numpy import fill_next_token_bitmask

        out = np.zeros((1, self._words), np.int32)
        fill_next_token_bitmask(matcher, out, 0)
        return out[0]


def _in_short(message: str) -> str:
    """The first line of an error, as the end of a sentence."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "unknown error")
    return first.rstrip(".")[:300] + "."
