"""The fields of OpenAI's and vLLM's APIs that constrain the form of an answer."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from redrafter_jax.config import Grammar
from redrafter_jax.serving.openai_fields import Fields, Text


class NamedSchema(Fields):
    """The `json_schema` of a `response_format`; the schema's name and description are ignored.

    An answer always matches the schema, whatever the value of `strict`.
    """

    labels: ClassVar[frozenset[str]] = frozenset({"name", "description", "strict"})

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Fields):
    """The form that an answer must have, as OpenAI's API states it."""

    type: Literal["json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                'json_schema and type: "json_schema" belong together; give both, or neither'
            )
        return self

    @property
    def grammar(self) -> Grammar:
        """The grammar that constrains an answer to this form."""
        return Grammar(self.json_schema.schema_ if self.json_schema else {"type": "object"})


class StructuredOutputs(Fields):
    """The form that an answer must have, as vLLM's API states it; exactly one field is given."""

    # pydantic has a method "json", so this field has another name.
    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Text | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1:
            raise ValueError("give exactly one of json, regex and json_object")
        return self

    @property
    def grammar(self) -> Grammar:
        """The grammar that constrains an answer to this form."""
        if self.regex is not None:
            return Grammar(regex=self.regex)
        return Grammar(self.json_ if self.json_ is not None else {"type": "object"})
