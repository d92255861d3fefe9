"""Fields that state their limits, and the one check of them.

Limits are metadata of a field's annotation, which pydantic reads too. So a setting is declared once
for the library, for YAML files and for the command line.
"""

import inspect
import math
import re
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le

from redrafter_jax.errors import InputError

Count = Annotated[int, Gt(0)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]

# How a limit is checked, and what a sentence says of it.
_LIMITS = {
    Gt: (lambda value, limit: value > limit.gt, "greater than {0.gt}"),
    Ge: (lambda value, limit: value >= limit.ge, "{0.ge} or more"),
    Le: (lambda value, limit: value <= limit.le, "at most {0.le}"),
}


class FieldError(InputError):
    """A value that a field cannot have.

    Attributes:
      field: the field's name.
      problem: the sentence about it without its beginning: "is 0; it must be greater than 0."
    """

    def __init__(self, config: object, field: str, problem: str) -> None:
        kind = config if isinstance(config, type) else type(config)
        super().__init__(f"{kind.__name__}.{field} {problem}")
        self.field = field
        self.problem = problem


def require(holds: bool, config: object, field: str, problem: str) -> None:
    """Refuse, as a `FieldError`, a value that does not go with the other fields'."""
    if not holds:
        raise FieldError(config, field, problem)


def check_fields(config: Any) -> None:
    """Refuse, as a `FieldError`, values that are not of their field's type or limits."""
    for field in fields(config):
        value = getattr(config, field.name)
        if needed := unmet(value, *parse_annotation(field.type)):
            raise FieldError(config, field.name, f"is {value!r:.200}; it must be {needed}.")


def out_of_order(entries: str, number: int, before: int) -> str:
    """Of a list that must rise: what it holds after which number; -1 stands for its beginning."""
    place = "" if before < 0 else f" after {before}"
    return f"holds {number}{place}; list {entries} in increasing order"


def field_docs(kind: type) -> dict[str, str]:
    """What the `Attributes` of a class and of its bases say of each field, in one line."""
    texts: dict[str, str] = {}
    for one in reversed(inspect.getmro(kind)):
        _, _, entries = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")
        found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", entries, re.MULTILINE)
        texts |= {name: " ".join(text.split()).removesuffix(".") for name, text in found}
    return texts


def parse_annotation(annotation: Any) -> tuple[list[Any], list[Any]]:
    """The types that an annotation allows, and the limits it states."""
    if get_origin(annotation) is Annotated:
        kind, *limits = get_args(annotation)
        return [kind], limits
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation], []
    parts = [parse_annotation(part) for part in get_args(annotation)]
    return [kind for kinds, _ in parts for kind in kinds], [one for _, own in parts for one in own]


def main_type(annotation: Any) -> Any:
    """The first type that an annotation allows beside None."""
    return next((kind for kind in parse_annotation(annotation)[0] if kind is not NoneType), None)


def unmet(value: Any, kinds: list[Any], limits: list[Any]) -> str | None:
    """What the value must be, None if it is; for numbers, bools, choices and tuples of these."""
    if value is None and NoneType in kinds:
        return None
    if get_origin(kinds[0]) is Literal:
        choices = get_args(kinds[0])
        return None if value in choices else f"one of {', '.join(choices)}"
    if kinds == [bool]:
        return None if isinstance(value, bool) else "true or false, a bool"
    if get_origin(kinds[0]) is tuple:
        kind, *_ = get_args(kinds[0])
        fits = isinstance(value, tuple) and all(type(one) in (int, kind) for one in value)
        return None if fits else "a tuple of " + ("ints" if kind is int else "floats")
    if kinds[0] not in (int, float):
        return None
    if isinstance(value, bool) or not isinstance(value, int | kinds[0]):
        return "a whole number, an int" if kinds[0] is int else "a number, a float"
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    checks = [(_LIMITS[type(limit)], limit) for limit in limits]
    if all(holds(value, limit) for (holds, _), limit in checks):
        return None
    return " and ".join(words.format(limit) for (_, words), limit in checks)
