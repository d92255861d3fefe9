"""Settings from a YAML file with dotted overrides, validated; every problem told at once.

The library itself needs neither pydantic nor YAML: only the commands import this.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import pydantic
import yaml
from pydantic_core import PydanticCustomError

from redrafter_jax.errors import InputError


class Settings(pydantic.BaseModel):
    """Base of all configuration models: unknown keys are errors, values never change."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="wrap")
    @classmethod
    def _keep_bools(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        validated = validate(value)
        # pydantic would read true as 1.
        if _holds_bool(value) and not _holds_bool(validated):
            raise PydanticCustomError(
                "bool", "Input should be a number; YAML reads yes, no, on and off as true or false"
            )
        return validated


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(model: type[SettingsT], path: Path, overrides: Sequence[str] = ()) -> SettingsT:
    """Validate a YAML file with overrides such as `optimizer.learning_rate=3e-4` applied.

    A number leads into a list: `data.sources.0.weight=0.8`.

    Raises:
      InputError: the file cannot be read, or any value is not valid; all problems are listed.
    """
    values = _read_yaml(path)
    for override in overrides:
        _apply(values, override)
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        listed = "\n  ".join(_describe(error.errors(), model))
        raise InputError(f"{path} is not a valid configuration:\n  {listed}") from None


def dump_settings(settings: Settings) -> str:
    """The settings as YAML, every value resolved."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text at byte {error.start}.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number such as 0x_
        raise InputError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no mapping of settings.")
    return values


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number and 2024-01-31 as a string, as YAML 1.2 does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and the place are YAML's
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _apply(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise InputError(f"Override {override!r} is not of the form key.path=value.")
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        raise InputError(f"Override {override!r}: {text!r} is not a YAML value.") from None
    holder: Any = values
    *parents, leaf = path.split(".")
    for above, key in pairwise(["", *parents]):
        place = _place(holder, key, above, override)
        holder = holder.setdefault(key, {}) if isinstance(holder, dict) else holder[place]
    holder[_place(holder, leaf, parents[-1] if parents else "", override)] = value


def _place(holder: Any, key: str, name: str, override: str) -> str | int:
    """Where `key` leads in the section or list called `name`."""
    if isinstance(holder, dict):
        return key
    if not isinstance(holder, list):
        raise InputError(f"Override {override!r}: {name!r} is a value, not a section.")
    if not key.isdecimal() or int(key) >= len(holder):
        raise InputError(
            f"Override {override!r}: {name!r} is a list of {len(holder)} and has no {key!r}; count "
            "from 0, or give the whole list."
        )
    return int(key)


def _holds_bool(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_bool, value))
    return isinstance(value, bool)


def _describe(problems: Sequence[Any], model: type[pydantic.BaseModel]) -> list[str]:
    """A line for each; a section's keys are listed once, where the last has none like it."""
    lines, lists = [], {}
    for problem in problems:
        location = problem["loc"]
        path = ".".join(map(str, location))
        if problem["type"] != "extra_forbidden":
            # Of a missing key or an inconsistent section the input is the whole section.
            got = "" if isinstance(problem["input"], dict) else f" (got {problem['input']!r})"
            lines.append(f"{path}: {problem['msg']}{got}")
            continue
        known = _known_keys(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        if not near:
            lists[location[:-1]] = len(lines), f"; known keys: {', '.join(known)}."
        lines.append(f"{path}: unknown key" + (f"; did you mean {near[0]!r}?" if near else ""))
    for line, known in lists.values():
        lines[line] += known
    return lines


def _known_keys(model: Any, location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        # A part of a list or a mapping: its index or key leads to what it holds.
        if get_origin(model) in (list, dict):
            model = _section_of(get_args(model)[-1])
        elif field := getattr(model, "model_fields", {}).get(part):
            model = _section_of(field.annotation)
    return list(getattr(model, "model_fields", []))


def _section_of(annotation: Any) -> Any:
    """Of a section that may be left out, `Section | None`, the section."""
    if get_origin(annotation) is not UnionType:
        return annotation
    return next(one for one in get_args(annotation) if one is not NoneType)
