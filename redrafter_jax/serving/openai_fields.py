"""What all objects of OpenAI's requests share: JSON's own types, and names that are known."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from redrafter_jax.text.tokenizer import require_text

Values = Mapping[str, tuple[Any, ...]]


class Fields(BaseModel):
    """JSON's own types, known names; null is as if the field was not given.

    Attributes:
      labels: fields that change nothing, whatever their value.
      off: fields that are not supported, with the values that ask for nothing.
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
    """The text, if it is valid Unicode; else a ValueError."""
    require_text(text, "the text")
    return text


Text = Annotated[str, AfterValidator(whole_text)]
