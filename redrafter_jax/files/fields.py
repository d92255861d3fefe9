"""Files that describe a model: text and JSON, read whole or refused, and the fields in them."""

import json
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redrafter_jax.config.limits import INT_LIMIT, FieldError
from redrafter_jax.errors import InputError

_EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}
# How the file begins that Git LFS leaves where it has not downloaded what it stands for.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def write_atomically(path: Path, text: str) -> None:
    """Write a small file whole; if that fails, one that is there stays as it is."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError:  # a full disk, for example
        fresh.unlink(missing_ok=True)
        raise


@contextmanager
def errors_naming(place: Path | str) -> Generator[None]:
    """Within it, the error of a configuration's field begins with the place that states it."""
    try:
        yield
    except FieldError as error:
        raise InputError(f"{place}: {error.field} {error.problem}") from None


@contextmanager
def reading(path: Path, otherwise: str) -> Generator[None]:
    """A block within which a missing or unreadable file raises `InputError`.

    `otherwise` follows "is missing; " in the sentence.
    """
    try:
        refuse_pointer(path)
        yield
    except FileNotFoundError:
        raise InputError(f"{path} is missing; {otherwise}.") from None
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from None


def refuse_pointer(path: Path) -> None:
    """Refuse a file of Git LFS that stands for another, which was not downloaded."""
    try:
        kind = path.stat().st_mode
    except ValueError:  # of names that a file may state; NUL and lone surrogates can be in none
        raise InputError(f"{str(path)!r} is no name of a file.") from None
    if not stat.S_ISREG(kind):  # of a pipe nothing may be read twice
        return
    with path.open("rb") as file:
        begin = file.read(len(_LFS_POINTER))
    if begin == _LFS_POINTER:
        raise InputError(
            f"{path} is a Git LFS pointer, not the file that it stands for; run `git lfs pull` in "
            "its folder, or download the model again by `hf download`."
        )


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
      InputError: it cannot be read, is no UTF-8, or stands for another (Git LFS).
    """
    try:
        refuse_pointer(path)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text at byte {error.start}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object of fields that a JSON file holds.

    Raises:
      InputError: the file is missing or cannot be read, is no JSON, or no object.
    """
    with reading(path, "a model folder needs it"):
        content = path.read_bytes()  # UTF-8, whatever the locale
    try:
        values = json.loads(content)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply for a model's description.") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a {type(values).__name__}, not an object of fields.")
    return values


def field(
    values: Mapping[str, Any], name: str, path: Path, expected: type, default: Any = None
) -> Any:
    """What a file states, or the default; a whole number will do where a float is expected.

    Raises:
      InputError: the field is missing and has no default, is of another type or too large.
    """
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise InputError(f"{path} does not state {name!r}, and it has no default.")
    if type(value) is int and not -INT_LIMIT < value < INT_LIMIT:
        raise InputError(
            f"{path} states {name}={str(value)[:8]}..., a number of {len(str(abs(value)))} digits; "
            "it must be less than 2 to the 63rd."
        )
    if expected is float and type(value) is int:
        return float(value)
    # Not isinstance: to Python, true is a whole number.
    if type(value) is not expected:
        raise InputError(f"{path} states {name}={value!r:.80}; it must be {_EXPECTED[expected]}.")
    return value
