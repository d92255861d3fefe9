"""The part of `--help` that lists the settings of a command with defaults and documentation."""

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml

from redrafter_jax.config.limits import field_docs, main_type
from redrafter_jax.settings.files import Settings, annotations_of

_WIDTH = 80
_REQUIRED = object()


def describe_settings(model: type[Settings]) -> str:
    """Return the help text of all settings by section; sections that are equal are listed once."""
    return "\n\n".join(_sections(model, "settings", _defaults(model), []))


def _sections(
    kind: Any, path: str, defaults: dict[str, Any], listed: list[tuple[Any, dict[str, Any], str]]
) -> Iterator[str]:
    for other, values, place in listed:
        if (other, values) == (kind, defaults):
            yield f"{path}: as {place}"
            return
    listed.append((kind, defaults, path))
    prefix = "" if path == "settings" else f"{path}."
    texts, lines, below = field_docs(kind), [], list[tuple[str, Any, Any]]()
    for name, annotation in annotations_of(kind).items():
        default = defaults[name]
        inner, place = _inner(annotation)
        if _is_section(inner):
            below.append((f"{prefix}{name}{place}", inner, default if not place else _REQUIRED))
        text = ": ".join(filter(None, (_stated(name, inner, place, default), texts.get(name))))
        lines.append(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="      "))
    yield "\n".join([f"{path}:", *_prose(kind), *lines])
    for place, section, value in below:
        given = value if isinstance(value, section) else None
        yield from _sections(section, place, _defaults(section, given), listed)


def _stated(name: str, kind: Any, place: str, default: Any) -> str:
    """A setting with its choices, and its default in YAML or "(required)"."""
    choices = f" ({', '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
    if default is _REQUIRED:
        return f"{name}{choices} (required)"
    if _is_section(kind) and not place and default is not None:
        return f"{name}.*"
    written = yaml.safe_dump(_plain(default), default_flow_style=True, width=1000)
    return f"{name}={written.removesuffix('...\n').strip()}{choices}"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Settings):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value if value is None or isinstance(value, bool | int | float | dict) else str(value)


def _prose(kind: Any) -> Iterator[str]:
    """The paragraphs of a section's docstring before its list of attributes."""
    for one in reversed(inspect.getmro(kind)):
        text = inspect.cleandoc(one.__dict__.get("__doc__") or "")
        states = issubclass(one, Settings) and inspect.get_annotations(one)
        text, _, entries = text.partition("Attributes:\n")
        if states and (one is kind or not entries):
            for paragraph in text.strip().split("\n\n"):
                yield textwrap.fill(paragraph, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _inner(annotation: Any) -> tuple[Any, str]:
    """The type of a field, or of its list's or mapping's entries, and the path to them."""
    place = ""
    while True:
        annotation = main_type(annotation)
        if get_origin(annotation) not in (list, tuple, dict):
            return annotation, place
        place += ".NAME" if get_origin(annotation) is dict else ".0"
        annotation = [one for one in get_args(annotation) if one is not Ellipsis][-1]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, Settings) or dataclasses.is_dataclass(kind))


def _defaults(kind: Any, given: Any = None) -> dict[str, Any]:
    """Default values of a section; `given` has those of a section that may be left out."""
    names = annotations_of(kind)
    if given is not None:
        return {name: getattr(given, name) for name in names}
    if dataclasses.is_dataclass(kind):
        return {
            one.name: _REQUIRED if one.default is dataclasses.MISSING else one.default
            for one in dataclasses.fields(kind)
        }
    return {
        name: _REQUIRED if one.is_required() else one.get_default(call_default_factory=True)
        for name, one in kind.model_fields.items()
    }
