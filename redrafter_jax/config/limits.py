"""Field types with limits, the check of values against these limits, and the errors of the check.

Limits are metadata of a field's annotation. `Checked` applies them to the library's configurations,
whether the values come from Python, an option, a JSON file or a `draft.yaml` (`read_config`). In
settings and requests, pydantic reads the same metadata, and errors use the same words.
"""

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le

from redrafter_jax.errors import InputError

Count = Annotated[int, Gt(0)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
# Marks fields whose options accept units, such as 40GB.
BYTES = "bytes"
Bytes = Annotated[int, Gt(0), BYTES]

# Larger whole numbers fit in no integer array, and much larger ones overflow a float.
INT_LIMIT = 2**63
# Each limit's check, and the words for the limit in errors.
_LIMITS = {
    Gt: (lambda value, limit: value > limit.gt, "greater than {0.gt}"),
    Ge: (lambda value, limit: value >= limit.ge, "{0.ge} or more"),
    Le: (lambda value, limit: value <= limit.le, "at most {0.le}"),
}


class FieldError(InputError):
    """The error for a configuration field whose value is not allowed.

    Attributes:
      field: the field's name.
      problem: the rest of the sentence after the field's name, such as "is 0; it must be greater
        than 0."
    """

    def __init__(self, config: object, field: str, problem: str) -> None:
        kind = config if isinstance(config, type) else type(config)
        super().__init__(f"{kind.__name__}.{field} {problem}")
        self.field = field
        self.problem = problem


def require(holds: bool, config: object, field: str, problem: str) -> None:
    """Raise a `FieldError` for `field` if `holds` is False; `holds` may involve several fields."""
    if not holds:
        raise FieldError(config, field, problem)


@dataclass(frozen=True)
class Checked:
    """Base of configurations that raise `FieldError` for a value of the wrong type or size.

    A subclass with further checks overrides `__post_init__` and first calls that of this class.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if needed := unmet(value, *parse_annotation(field.type)):
                raise FieldError(self, field.name, f"{is_not(value, needed)}.")


def is_not(value: object, needed: str) -> str:
    """The end of an error about a wrong value, such as "is 0; it must be greater than 0"."""
    return f"is {value!r:.200}; it must be {needed}"


def read_config[T](
    kind: type[T], stated: Any, file: Path, *, within: str = "", foreign: bool = False, **given: Any
) -> T:
    """Build a configuration from a mapping of field names to values, which a file states.

    Lists become tuples, and mappings become nested configurations.

    Args:
      kind: the configuration's type, a dataclass.
      stated: the mapping; any other value is refused.
      file: the path of the file, with which every error begins.
      within: place of the mapping inside the file, such as "trees.0."; empty for the whole file.
      foreign: whether other programs write such files. If so, unknown keys are ignored, and a null
        counts as a missing field.
      given: values of fields that are not read from the file.

    Raises:
      InputError: a field without a default is missing, a name is unknown, or a value is invalid.
    """
    known = {one.name: one for one in fields(cast(Any, kind))}
    names = ", ".join(known)
    if not isinstance(stated, Mapping):
        problem = is_not(stated, f"a mapping of {names}")
        raise InputError(f"{file}: {within.rstrip('.') or 'the file'} {problem}.")
    if not foreign and (unknown := next((name for name in stated if name not in known), None)):
        raise InputError(f"{file}: {within}{unknown} is an unknown key; known keys: {names}.")
    for name, one in known.items():
        if name in given:
            continue
        if name not in stated or (foreign and stated[name] is None):
            if one.default is MISSING:
                raise InputError(
                    f"{file} does not state {within + name!r}, which has no default; add it."
                )
            continue
        value, needed = stated[name], "less than 2 to the 63rd"
        if type(value) is not int or abs(value) < INT_LIMIT:
            given[name] = _as_field(value, main_type(one.type), file, f"{within}{name}")
            needed = unmet(given[name], *parse_annotation(one.type))
        if needed:
            raise InputError(f"{file}: {within}{name} {is_not(value, needed)}.")
    try:
        return kind(**given)
    except FieldError as error:
        raise InputError(f"{file}: {within}{error.field} {error.problem}") from None


def _as_field(value: Any, kind: Any, file: Path, place: str) -> Any:
    """Convert a file's value to the type of a field; a wrong value is kept for the check."""
    if isinstance(value, list):
        entry = get_args(kind)[0] if get_origin(kind) is tuple else None
        return tuple(_as_field(one, entry, file, f"{place}.{i}") for i, one in enumerate(value))
    if is_dataclass(kind) and value is not None:
        return read_config(cast(type, kind), value, file, within=f"{place}.")
    return float(value) if type(value) is int and kind is float else value


def out_of_order(entries: str, number: int, before: int) -> str:
    """The end of an error about a number that is not above the previous one.

    `before` is the previous number, or -1 if there is none.
    """
    place = "" if before < 0 else f" after {before}"
    return f"holds {number}{place}; list {entries} in increasing order"


def field_docs(kind: type) -> dict[str, str]:
    """The documentation of each field of a class and its bases, each text on one line."""
    texts: dict[str, str] = {}
    for one in reversed(inspect.getmro(kind)):
        _, _, entries = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")
        found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", entries, re.MULTILINE)
        texts |= {name: " ".join(text.split()).removesuffix(".") for name, text in found}
    return texts


def parse_annotation(annotation: Any) -> tuple[list[Any], list[Any]]:
    """The types and the limits that an annotation states."""
    if get_origin(annotation) is Annotated:
        kind, *limits = get_args(annotation)
        return [kind], limits
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation], []
    parts = [parse_annotation(part) for part in get_args(annotation)]
    return [kind for kinds, _ in parts for kind in kinds], [one for _, own in parts for one in own]


def main_type(annotation: Any) -> Any:
    """The first type that an annotation allows, other than None."""
    return next((kind for kind in parse_annotation(annotation)[0] if kind is not NoneType), None)


def unmet(value: Any, kinds: list[Any], limits: list[Any]) -> str | None:
    """Words for what a value must be, such as "a whole number, an int"; None for an allowed value.

    The value is checked against the first of `kinds` and against `limits`. The check covers
    numbers, bools, strings, literals, tuples and mappings; for other types every value is allowed.
    """
    if value is None and NoneType in kinds:
        return None
    if get_origin(kinds[0]) is Literal:
        choices = get_args(kinds[0])
        return None if value in choices else f"one of {', '.join(choices)}"
    if kinds == [bool]:
        return None if isinstance(value, bool) else "true or false, a bool"
    if get_origin(kinds[0]) is tuple:
        kind, *_ = get_args(kinds[0])
        allowed = (int, float) if kind is float else (kind,)
        fits = isinstance(value, tuple) and all(type(one) in allowed for one in value)
        words = {int: "whole numbers", float: "numbers"}.get(kind, "mappings")
        return None if fits else f"a tuple of {words}, in files a list"
    if get_origin(kinds[0]) is dict:
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        fits = all(type(key) is int and type(one) in (int, float) for key, one in pairs)
        return None if fits else "a mapping of whole numbers to numbers"
    if kinds[0] is str:
        return None if isinstance(value, str) else "a string"
    if kinds[0] not in (int, float):
        return None
    if isinstance(value, bool) or not isinstance(value, int | kinds[0]):
        return "a whole number, an int" if kinds[0] is int else "a number, a float"
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    checks = [(_LIMITS[type(limit)], limit) for limit in limits if limit != BYTES]
    if all(holds(value, limit) for (holds, _), limit in checks):
        return None
    return " and ".join(words.format(limit) for (_, words), limit in checks)
