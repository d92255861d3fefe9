"""What `--help` says of the settings of a command: their sections, defaults and documentation."""

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from redrafter_jax.config.limits import field_texts, unfold
from redrafter_jax.settings.files import Settings, annotations_of

_WIDTH = 80


def describe_settings(model: type[Settings]) -> str:
    """Every setting under the path of its section; a section that occurs twice is listed once."""
    title = "Settings, in the file or as key.path=value; those without a value here must be given."
    return "\n\n".join([title, *_sections(model, "settings", {})])


def _sections(kind: Any, path: str, listed: dict[Any, str]) -> Iterator[str]:
    if kind in listed:
        yield f"{path}: as {listed[kind]}"
        return
    listed[kind] = path
    prefix = "" if path == "settings" else f"{path}."
    texts, defaults = field_texts(kind), _defaults(kind)
    lines, below = [], list[tuple[Any, str]]()
    for name, annotation in annotations_of(kind).items():
        shown = f"{name}={defaults[name]}" if name in defaults else name
        section, place = _section_of(annotation)
        if section is not None:
            below.append((section, f"{prefix}{name}{place}"))
            shown = f"{name}.*"
        text = ": ".join(filter(None, (shown, texts.get(name))))
        lines.append(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="      "))
    yield "\n".join([f"{path}:", *_prose(kind), *lines])
    for section, place in below:
        yield from _sections(section, place, listed)


def _prose(kind: Any) -> Iterator[str]:
    """What classes without a list of attributes say of their fields, by paragraphs."""
    for one in reversed(inspect.getmro(kind)):
        text = inspect.cleandoc(one.__dict__.get("__doc__") or "")
        states = issubclass(one, Settings) and inspect.get_annotations(one)
        if states and "Attributes:\n" not in text:
            for paragraph in text.split("\n\n"):
                yield textwrap.fill(paragraph, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _section_of(annotation: Any) -> tuple[Any, str]:
    """The section that a field holds, if it does, and what leads into its lists and mappings."""
    place = ""
    while True:
        annotation = next((one for one in unfold(annotation)[0] if one is not NoneType), None)
        if get_origin(annotation) not in (list, tuple, dict):
            break
        place += ".NAME" if get_origin(annotation) is dict else ".0"
        annotation = [one for one in get_args(annotation) if one is not Ellipsis][-1]
    is_section = isinstance(annotation, type) and (
        issubclass(annotation, Settings) or dataclasses.is_dataclass(annotation)
    )
    return (annotation, place) if is_section else (None, "")


def _defaults(kind: Any) -> dict[str, str]:
    """As a file of settings would have them."""
    if dataclasses.is_dataclass(kind):
        values = {
            one.name: one.default
            for one in dataclasses.fields(kind)
            if one.default is not dataclasses.MISSING
        }
    else:
        fields = kind.model_fields.items()
        values = {
            name: one.get_default(call_default_factory=True)
            for name, one in fields
            if not one.is_required()
        }
    return {name: _as_yaml(value) for name, value in values.items()}


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return str(value) if isinstance(value, str | int | float | Path) else "{}"
