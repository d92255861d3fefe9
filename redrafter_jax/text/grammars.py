"""Grammars over a tokenizer, with llguidance: they decide which tokens may come next."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from redrafter_jax.config import Grammar
from redrafter_jax.errors import InputError

# JSON on one line, as `json.dumps` writes it: if white space is allowed anywhere, a small model may
# write white space forever.
_JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Number of compiled grammars to keep: compiling a large schema takes a second, and applications
# send the same few schemas with all requests.
_KEPT = 16


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the most recently used ones.

    Args:
      tokenizer: the target's tokenizer.
      vocab_size: V, the target's vocabulary size.
      end_tokens: ids of the tokens that end a text.
      on_compile: function that is called before a grammar is compiled, with the two strings of its
        `CompiledGrammar.stated`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_tokens: Sequence[int],
        on_compile: Callable[[str, str], object] = lambda name, stated: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._on_compile = on_compile
        self._vocab_size = vocab_size
        self._end_tokens = tuple(end_tokens)
        self._kept = lru_cache(_KEPT)(self._compile)

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Compile a grammar for the tokenizer.

        Raises:
          InputError: a keyword of the schema is not supported, the grammar cannot be read,
            llguidance is not installed, or llguidance cannot read the tokenizer.
        """
        if grammar.json_schema is None:
            return self.compile_stated("regex", grammar.regex or "")
        try:
            return self.compile_stated("json_schema", json.dumps(grammar.json_schema))
        except RecursionError:
            raise InputError("json_schema is nested too deeply; give a flatter schema.") from None
        except TypeError as error:
            raise InputError(f"json_schema is not JSON: {_in_short(str(error))}") from None

    def prepare(self) -> None:
        """Build the index of the tokenizer now; otherwise the first `compile` builds it.

        Raises:
          InputError: llguidance is not installed, or cannot read the tokenizer.
        """
        _ = self._prepared

    def compile_stated(self, name: str, stated: str) -> "CompiledGrammar":
        """Compile a grammar from the two strings of `CompiledGrammar.stated`.

        The strings may come from another compiler, for example from another process. Errors are
        those of `compile`.
        """
        return self._kept(name, stated)

    def _compile(self, name: str, stated: str) -> "CompiledGrammar":
        """The compiled grammar; `stated` is the text of a JSON Schema or a regular expression."""
        tokenizer = self._prepared
        self._on_compile(name, stated)
        from llguidance import LLMatcher

        if name == "json_schema":
            source = LLMatcher.grammar_from_json_schema(stated, overrides=_JSON_STYLE)
        else:
            source = LLMatcher.grammar_from_regex(stated)
        # By default llguidance logs to stderr.
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
                "Grammars need the package llguidance, which is not installed; run pip install "
                "'.[structured]' in a checkout of redrafter-jax."
            ) from None
        if not self._end_tokens:
            raise InputError(
                "A grammar needs an end token, but the target has none; give eos_token_ids."
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
    """A grammar for one tokenizer, from `GrammarCompiler.compile`.

    Attributes:
      end_tokens: ids of the tokens that end a text.
      vocab_size: V, the target's vocabulary size.
      stated: the kind of the grammar, "json_schema" or "regex", and its text.
    """

    def __init__(
        self, matcher: Any, end_tokens: Sequence[int], vocab_size: int, stated: tuple[str, str]
    ) -> None:
        self.end_tokens = frozenset(end_tokens)
        self.vocab_size = vocab_size
        self.stated = stated
        self._matcher = matcher

    def begin(self) -> "Matcher":
        """Return the state of the grammar before the first token of a text."""
        words = -(-self.vocab_size // 32)
        return Matcher(self._matcher.deep_copy(), self.end_tokens, words)


class Matcher:
    """The state of a grammar after the tokens of a text.

    A mask is an int32 array with one bit per token. Each word holds the bits of 32 tokens, that of
    the first token lowest. A set bit allows the token.
    """

    def __init__(self, matcher: Any, end_tokens: frozenset[int], words: int) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._words = words
        self._mask: Int[np.ndarray, " words"] | None = None

    @property
    def failed(self) -> str | None:
        """The error that has ended matching; None if there is none."""
        return _in_short(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def mask(self) -> Int[np.ndarray, " words"]:
        """The mask of the tokens that may come next."""
        if self._mask is None:
            self._mask = self._mask_after(self._matcher)
        return self._mask

    def forced(self, most: int) -> list[int]:
        """The next tokens as long as only one token is allowed at each position, at most `most`."""
        return self._matcher.compute_ff_tokens()[:most]

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Int[np.ndarray, "N words"]:
        """The masks after each node of a tree whose root is the last token of the text.

        All tokens are allowed after a node that the grammar forbids, after an end token, and after
        a padding node.

        Args:
          tokens: the token of each node; -1 for padding nodes.
          parents: the index of each node's parent, smaller than the node's own index.
        """
        out = np.full((len(tokens), self._words), -1, np.int32)
        out[0] = self.mask
        # Each allowed node has its own copy of the state, so that an error does not change the
        # state of the text.
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
        """Advance the state by tokens that the target has chosen, up to the first end token."""
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
    """The first line of an error message, as the end of a sentence."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "unknown error")
    return first.rstrip(".")[:300] + "."
