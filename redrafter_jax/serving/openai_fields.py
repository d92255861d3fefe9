"""The base of all objects in OpenAI's requests: strict types, and only known names."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from redrafter_jax.text.tokenizer import require_text

Values = Mapping[str, tuple[Any, ...]]


class Fields(BaseModel):
    """A JSON object with strict types and known names; null means that a field is not given.

    Attributes:
      labels: names of fields that are accepted and ignored.
      off: names of unsupported fields, each with the values that ask for nothing. These values are
        accepted and ignored.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    labels: ClassVar[frozenset[str]] = frozenset()
    off: ClassVar[Values] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in cls.labels and value not in cls.off.get(name, ())
        }


def whole_text(text: str) -> str:
    """Return the text; raise ValueError if it is not valid Unicode."""
    require_text(text, "the text")
    return text


Text = Annotated[str, AfterValidator(whole_text)]
