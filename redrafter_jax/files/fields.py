"""Reading and writing of text and JSON files, and checked access to their fields."""

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
# The first bytes of a Git LFS pointer, which stands for a file that was not downloaded.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def write_atomically(path: Path, text: str) -> None:
    """Write a small file atomically: if writing fails, an existing file stays unchanged."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError:  # a full disk, for example
        fresh.unlink(missing_ok=True)
        raise


@contextmanager
def errors_naming(place: Path | str) -> Generator[None]:
    """Return a context in which a `FieldError` becomes an `InputError` that begins with `place`."""
    try:
        yield
    except FieldError as error:
        raise InputError(f"{place}: {error.field} {error.problem}") from None


@contextmanager
def reading(path: Path, otherwise: str) -> Generator[None]:
    """Return a context in which a missing or unreadable file raises `InputError`.

    The error for a missing file ends with "is missing; " and the words `otherwise`.
    """
    try:
        refuse_pointer(path)
        yield
    except FileNotFoundError:
        raise InputError(f"{path} is missing; {otherwise}.") from None
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from None


def refuse_pointer(path: Path) -> None:
    """Refuse a Git LFS pointer, which stands for a file that was not downloaded."""
    try:
        kind = path.stat().st_mode
    except ValueError:  # names from an index may hold NUL or lone surrogates
        raise InputError(f"{str(path)!r} is not a valid file name.") from None
    if not stat.S_ISREG(kind):  # a pipe cannot be read twice
        return
    with path.open("rb") as file:
        begin = file.read(len(_LFS_POINTER))
    if begin == _LFS_POINTER:
        raise InputError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, "
            "or download the model again with `hf download`."
        )


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
      InputError: the file cannot be read, is not UTF-8, or is a Git LFS pointer.
    """
    try:
        refuse_pointer(path)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text at byte {error.start}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the fields of the JSON object in a file.

    Raises:
      InputError: the file is missing, cannot be read, is not JSON, or does not hold an object.
    """
    with reading(path, "a model folder needs it"):
        content = path.read_bytes()  # not read_text, which depends on the locale
    try:
        values = json.loads(content)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply to be read; use another file.") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number with thousands of digits
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a {type(values).__name__}, not an object of fields.")
    return values


def field(
    values: Mapping[str, Any], name: str, path: Path, expected: type, default: Any = None
) -> Any:
    """The value of a field, or the default if the field is missing or null.

    If `expected` is float, a whole number is converted.

    Raises:
      InputError: the field is missing and has no default, has another type, or is too large.
    """
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise InputError(
            f"{path} does not state {name!r}, which has no default; add it or use another file."
        )
    if type(value) is int and not -INT_LIMIT < value < INT_LIMIT:
        raise InputError(
            f"{path} states {name}={str(value)[:8]}..., a number of {len(str(abs(value)))} digits; "
            "it must be less than 2 to the 63rd."
        )
    if expected is float and type(value) is int:
        return float(value)
    # Not isinstance, which takes True for an int.
    if type(value) is not expected:
        raise InputError(f"{path} states {name}={value!r:.80}; it must be {_EXPECTED[expected]}.")
    return value
