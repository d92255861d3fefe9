"""Settings from a YAML file and overrides; one error lists all problems.

A section of the settings is a pydantic model, or one of the library's dataclasses, which do not
need pydantic.
"""

import dataclasses
import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import pydantic
import yaml

from redrafter_jax.config.limits import FieldError, is_not, main_type
from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import read_text
from redrafter_jax.files.yaml_text import NotYamlError, parse_yaml

_UNKNOWN_KEYS = ("extra_forbidden", "unexpected_keyword_argument")


class Settings(pydantic.BaseModel):
    """Base class of all settings: they are frozen, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(model: type[SettingsT], path: Path, overrides: Sequence[str] = ()) -> SettingsT:
    """Load settings from a YAML file, with overrides such as `optimizer.learning_rate=3e-4`.

    A number in the path of an override is an index of a list: `data.sources.0.weight=0.8`.

    Raises:
      InputError: the file cannot be read, or values are not valid; the error lists all problems.
    """
    values = _read_yaml(path)
    for override in overrides:
        _apply(values, override)
    try:
        # In strict mode pydantic still takes JSON's lists as tuples and strings as paths, but does
        # not take true as 1.
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except pydantic.ValidationError as error:
        stated = f"{path} with {shlex.join(overrides)}" if overrides else path
        title = f"{stated} is not a valid configuration:"
        raise InputError("\n  ".join([title, *_describe(error, model)])) from None


def dump_settings(settings: Settings) -> str:
    """The settings as YAML, with every value resolved."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        values = parse_yaml(text)
    except NotYamlError as error:
        raise InputError(f"{path} is not valid YAML: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold settings of the form `key: value`.")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise InputError(f"Override {override!r} must have the form key.path=value.")
    try:
        value = parse_yaml(text)
    except NotYamlError as error:
        raise InputError(
            f"Override {override!r}: {text!r} is not a YAML value: {error}; correct it, or quote "
            "it."
        ) from None
    *parents, leaf = path.split(".")
    holder: Any = values
    try:
        for key in parents:
            holder = holder.setdefault(key, {}) if isinstance(holder, dict) else holder[_index(key)]
        holder[leaf if isinstance(holder, dict) else _index(leaf)] = value
    except (IndexError, TypeError, ValueError):
        raise InputError(
            f"Override {override!r} names a key within a value that has no keys, or a list entry "
            "that does not exist; give an existing path, in which entries count from 0."
        ) from None


def _index(index: str) -> int:
    if not index.isdecimal():  # -1 would count from the end
        raise IndexError(index)
    return int(index)


def _describe(error: pydantic.ValidationError, model: Any) -> list[str]:
    """One line for each problem; the last unknown key of a section lists all its keys."""
    lines, lists = [], {}
    for problem in error.errors():
        location = problem["loc"]
        path = ".".join(map(str, location))
        if problem["type"] not in _UNKNOWN_KEYS:
            lines.append(_line(path, problem))
            continue
        known = _known_keys(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        if not near:
            lists[location[:-1]] = len(lines), f"; known keys: {', '.join(known)}."
        hint = f"; did you mean {near[0]!r}?" if near else ""
        lines.append(f"{path}: unknown key{hint}")
    for index, known in lists.values():
        lines[index] += known
    return lines


def _line(path: str, problem: Mapping[str, Any]) -> str:
    value, error = problem["input"], problem.get("ctx", {}).get("error")
    if isinstance(error, FieldError):
        return f"{path}.{error.field} {error.problem}".removeprefix(".")
    if (needed := problem["msg"].removeprefix("Input should be ")) != problem["msg"]:
        of_yaml = "; YAML reads yes, no, on and off as true or false" * isinstance(value, bool)
        return f"{path} {is_not(value, needed)}{of_yaml}"
    if problem["type"] == "missing":
        return f"{path} is missing; give it"
    # For an inconsistent section the input is the whole section, which is too long to show.
    got = "" if isinstance(value, dict) else f" (got {value!r})"
    message = str(error) if error else problem["msg"]  # without pydantic's "Value error, "
    return (f"{path}: {message}" if path else message) + got


def _known_keys(section: Any, location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        # An index of a list or a key of a mapping leads to the type of the entries.
        if get_origin(section) in (list, tuple, dict):
            section = [one for one in get_args(section) if one is not Ellipsis][-1]
        else:
            section = annotations_of(section).get(str(part))
        section = main_type(section)
    return list(annotations_of(section))


def annotations_of(section: Any) -> dict[str, Any]:
    """Return the annotation of each key of a section."""
    if dataclasses.is_dataclass(section):
        return {field.name: field.type for field in dataclasses.fields(section)}
    return {name: one.annotation for name, one in getattr(section, "model_fields", {}).items()}
