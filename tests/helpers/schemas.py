"""Random JSON schemas whose texts are bounded, and grammars over a token for each byte."""

from functools import cache
from typing import Any

import numpy as np
from tiny_folders import byte_tokenizer
from tiny_models import forgetful_target, imitating_drafter, tiny_config
from tokenizers import Tokenizer

from redrafter_jax import Grammar
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.models.target import Target
from redrafter_jax.text.grammars import CompiledGrammar, GrammarCompiler

# A token for each byte; the last one ends a text.
BYTE_VOCABULARY = 257
END = 256
_NAMES = ["name", "größe", "年", "tags", "id", "e\N{COMBINING ACUTE ACCENT}", "📦", "is_new"]


@cache
def pair() -> tuple[Target, LoadedHead]:
    """A target of bytes, and a drafter that is often right."""
    target = forgetful_target(memory=0.15, config=tiny_config(vocab_size=BYTE_VOCABULARY))
    return target, imitating_drafter(target, 0.3)


@cache
def end_tokenizer() -> Tokenizer:
    """`byte_tokenizer` with a token that ends a text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END
    return tokenizer


@cache
def byte_grammars() -> GrammarCompiler:
    return GrammarCompiler(end_tokenizer(), BYTE_VOCABULARY, [END])


def compiled(grammar: Grammar) -> CompiledGrammar:
    return byte_grammars().compile(grammar)


def random_schema(random: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """An object of required and optional fields: nested, enums, arrays, unicode."""
    names = random.choice(_NAMES, size=random.integers(1, 4), replace=False).tolist()
    required = [name for name in names if random.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _random_value(random, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _random_value(random: np.random.Generator, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "enum", "const", "null"]
    kind = random.choice(kinds + (["object", "array", "any"] * 2 if depth else []))
    match kind:
        case "string":
            return {"type": "string", "maxLength": int(random.integers(0, 5))}
        case "integer":
            least = int(random.integers(-50, 50))
            return {"type": "integer", "minimum": least, "maximum": least + 120}
        case "enum":
            return {"enum": ["ja", "日本", 3, None, "\N{SNOWMAN}"][: random.integers(1, 6)]}
        case "const":
            return {"const": ["ü", 1.5, False][random.integers(3)]}
        case "object":
            return random_schema(random, depth)
        case "array":
            most = int(random.integers(1, 4))
            items = _random_value(random, depth - 1)
            return {"type": "array", "items": items, "minItems": most // 2, "maxItems": most}
        case "any":
            return {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}
        case _:
            return {"type": str(kind)}
