"""Raw records from JSON lines, JSON lists, Parquet files and datasets of the hub, one by one."""

import gzip
import json
import zlib
from collections.abc import Iterator
from importlib import import_module
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NoReturn

from redrafter_jax.errors import InputError

from .settings import SourceSettings
from .types import Raw, Skip

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_raw(source: SourceSettings) -> Iterator[Raw | Skip]:
    """The records of `files` or `hub`, in their order, unreadable ones as skips.

    Raises:
      InputError: a file is missing, damaged as a whole or of another kind, the dataset cannot be
        loaded, or the package that reads it is missing.
    """
    if source.files is None:
        yield from _hub_rows(source)
        return
    for path in find_files(source.files):
        name = path.name.lower()
        plain = name.removesuffix(".gz")
        if plain.endswith(".jsonl"):
            yield from _json_lines(path)
        elif plain.endswith(".json"):
            yield from _json_list(path)
        elif name.endswith(".parquet"):
            yield from _parquet_rows(path)
        else:
            raise InputError(
                f"{path} is of no kind that is read here: .jsonl or .json, each also as .gz, or "
                ".parquet; text files are read by a source with a folder."
            )


def find_files(patterns: list[str]) -> list[Path]:
    """The files that paths and globs name, in the order of the list, a glob's sorted.

    Raises:
      InputError: one names no file, a folder, or a file that is named already.
    """
    found: list[Path] = []
    for pattern in patterns:
        try:
            is_folder, matches = Path(pattern).is_dir(), _matches(Path(pattern))
        except (OSError, ValueError) as error:  # a name too long, ** beside letters
            _cannot_read(pattern, error)
        if is_folder:
            raise InputError(
                f"{pattern!r} is a folder; write files: [{pattern}/*.jsonl], or folder: for text."
            )
        if not matches:
            raise InputError(f"There is no file {pattern!r}; mend the source's files.")
        for match in matches:
            if match in found:
                raise InputError(f"{match} is named twice by a source's files; name it once.")
            found.append(match)
    return found


def _matches(path: Path) -> list[Path]:
    # Of a name that exists, brackets are letters.
    if path.is_file():
        return [path]
    found = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
    return sorted(match for match in found if match.is_file())


def _json_lines(path: Path) -> Iterator[Raw | Skip]:
    with _open(path) as stream:
        number = 0
        while True:
            try:
                line = stream.readline()
            except (OSError, EOFError, zlib.error) as error:
                _cannot_read(path, error)
            if not line:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            place = f"{path}, line {number}"
            if not line.strip():
                yield Skip(place, "an empty line")
                continue
            try:
                yield Raw(place, _parse(line.rstrip(b"\r\n")))
            except UnicodeDecodeError as error:
                yield Skip(place, "not UTF-8", f"at byte {error.start} of the line")
            except ValueError as error:
                yield Skip(place, "not valid JSON", str(error))


def _json_list(path: Path) -> Iterator[Raw]:
    with _open(path) as stream:
        try:
            content = stream.read().removeprefix(_BYTE_ORDER_MARK)
        except (OSError, EOFError, zlib.error) as error:
            _cannot_read(path, error)
    try:
        records = _parse(content)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text at byte {error.start}.") from None
    except ValueError as error:
        raise InputError(
            f"{path} is not valid JSON: {error}; if it holds a record a line, name it .jsonl."
        ) from None
    if not isinstance(records, list):
        raise InputError(f"{path} holds no list of records; make it one, or name it .jsonl.")
    for number, record in enumerate(records, 1):
        yield Raw(f"{path}, record {number}", record)


def _parse(content: bytes) -> Any:
    """The JSON value; ValueError for anything that is none, which UnicodeDecodeError is too."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("too deeply nested") from None


def _open(path: Path) -> BufferedIOBase:
    try:
        return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")
    except OSError as error:
        _cannot_read(path, error)


def _cannot_read(path: Path | str, error: Exception) -> NoReturn:
    reason = getattr(error, "strerror", None) or str(error)
    raise InputError(f"Cannot read {path}: {reason.rstrip('.')}.") from None


def _parquet_rows(path: Path) -> Iterator[Raw]:
    parquet = _require("pyarrow.parquet", f"{path}, a Parquet file,")
    number = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield Raw(f"{path}, row {number}", row)
    except Exception as error:  # a damaged file raises pyarrow's errors and many of Python's
        _cannot_read(path, error)


def _hub_rows(source: SourceSettings) -> Iterator[Raw]:
    datasets = _require("datasets", source.title)
    try:
        rows = datasets.load_dataset(
            source.hub, source.subset, split=source.split, revision=source.revision
        )
        for number, row in enumerate(rows, 1):
            yield Raw(f"{source.title}, row {number}", row)
    except Exception as error:  # datasets passes on whatever hub, network and files raise
        raise InputError(
            f"Cannot load {source.title}, subset {source.subset}, split {source.split}: "
            f"{' '.join(str(error).split())}"
        ) from None


def _require(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"{purpose} needs the package {module.partition('.')[0]}, which is not installed; in a "
            "checkout of redrafter-jax, pip install '.[hub]' brings it."
        ) from None
