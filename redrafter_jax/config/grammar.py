"""What a text may be held to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redrafter_jax.errors import InputError


@dataclass(frozen=True)
class Grammar:
    """The form of an answer: JSON of a schema, or the matches of a regular expression.

    Attributes:
      json_schema: JSON Schema; `{"type": "object"}` is any object.
      regex: regular expression that the whole answer matches, in Rust's syntax.

    Raises:
      InputError: none of them is given, or both.
    """

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if (self.json_schema is None) == (self.regex is None):
            raise InputError("A Grammar is json_schema or regex; give one of them.")
        if not isinstance(self.json_schema, Mapping | None):
            raise InputError(f"json_schema is {self.json_schema!r:.80}; it must be a mapping.")
        if not isinstance(self.regex, str | None):
            raise InputError(f"regex is {self.regex!r:.80}; it must be a string.")
