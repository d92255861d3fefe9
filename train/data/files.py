"""Raw records of JSON lines, JSON lists, Parquet files and hub datasets."""

import gzip
import json
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NoReturn

from redrafter_jax.errors import InputError

from .settings import SourceSettings
from .types import Raw, Skip

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_raw(source: SourceSettings) -> Iterator[Raw | Skip]:
    """Read the records of a source's `files` or `hub` in order; unreadable records become skips.

    Raises:
      InputError: a file is missing, damaged or of an unsupported type, the dataset cannot be
        loaded, or a package for the file or the dataset is missing.
    """
    if source.files is None:
        yield from _hub_rows(source)
        return
    readers = {".jsonl": _json_lines, ".json": _json_list, ".parquet": _parquet_rows}
    for path in find_files(source.files):
        plain = Path(path.name.lower().removesuffix(".gz"))
        is_packed = path.name.lower() != plain.name
        if plain.suffix not in readers or (is_packed and plain.suffix == ".parquet"):
            raise InputError(
                f"{path} has an unsupported type; use .jsonl, .json (either may be .gz) or "
                ".parquet. For text files, set folder instead of files."
            )
        yield from readers[plain.suffix](path)


def find_files(patterns: list[str]) -> list[Path]:
    """Find the files of paths and globs, in the order of `patterns`; a glob's files are sorted.

    Raises:
      InputError: a pattern matches no file, names a folder, or matches a file twice.
    """
    found: list[Path] = []
    for pattern in patterns:
        with _reading(pattern):  # the name may be too long, or have ** within it
            matches = _matches(Path(pattern))
        if not matches:
            raise InputError(f"There is no file {pattern!r}; correct the source's files.")
        for match in matches:
            if match in found:
                raise InputError(f"{match} is listed twice in a source's files; list it once.")
            found.append(match)
    return found


def _matches(path: Path) -> list[Path]:
    if path.is_dir():
        raise InputError(
            f"'{path}' is a folder; use files: [{path}/*.jsonl], or for a folder of text files set "
            "folder instead of files."
        )
    # Brackets in the name of an existing file are literal.
    if path.is_file():
        return [path]
    found = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
    return sorted(match for match in found if match.is_file())


def _json_lines(path: Path) -> Iterator[Raw | Skip]:
    with _reading(path), _open(path) as stream:
        for number, line in enumerate(stream, 1):
            place = f"{path}, line {number}"
            content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            try:
                record = _parse(content.rstrip(b"\r\n")) if content.strip() else None
            except UnicodeDecodeError as error:
                yield Skip(place, "not UTF-8", f"at byte {error.start} of the line")
            except ValueError as error:
                yield Skip(place, "not valid JSON", str(error))
            else:
                yield Raw(place, record) if content.strip() else Skip(place, "an empty line")


def _json_list(path: Path) -> Iterator[Raw]:
    with _reading(path), _open(path) as stream:
        content = stream.read().removeprefix(_BYTE_ORDER_MARK)
    try:
        records = _parse(content)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text at byte {error.start}; convert it to UTF-8."
        ) from None
    except ValueError as error:
        raise InputError(
            f"{path} is not valid JSON: {error}; if each line is a record, rename it to .jsonl."
        ) from None
    if not isinstance(records, list):
        raise InputError(f"{path} is not a list of records; make it a list, or use .jsonl.")
    for number, record in enumerate(records, 1):
        yield Raw(f"{path}, record {number}", record)


def _parse(content: bytes) -> Any:
    """Parse a JSON value; a fault raises ValueError or its subclass UnicodeDecodeError."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("too deeply nested") from None


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


@contextmanager
def _reading(path: Path | str) -> Generator[None]:
    """Open a block in which errors of reading `path` become `InputError`s."""
    try:
        yield
    except InputError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        _cannot_read(path, error)


def _cannot_read(path: Path | str, error: Exception) -> NoReturn:
    reason = getattr(error, "strerror", None) or str(error)
    raise InputError(
        f"Cannot read {path}: {reason.rstrip('.')}; replace the file, or correct the source's "
        "files."
    ) from None


def _parquet_rows(path: Path) -> Iterator[Raw]:
    parquet = _require("pyarrow.parquet", f"{path}, a Parquet file,")
    number = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield Raw(f"{path}, row {number}", row)
    except Exception as error:  # damaged files raise many types of errors
        _cannot_read(path, error)


def _hub_rows(source: SourceSettings) -> Iterator[Raw]:
    datasets = _require("datasets", source.title)
    try:
        rows = datasets.load_dataset(
            source.hub, source.subset, split=source.split, revision=source.revision
        )
        for number, row in enumerate(rows, 1):
            yield Raw(f"{source.title}, row {number}", row)
    except Exception as error:  # from the hub, the network or files
        raise InputError(
            f"Cannot load {source.title}, subset {source.subset}, split {source.split}: "
            f"{' '.join(str(error).split()).rstrip('.')}; correct the source's hub, subset, split "
            "or revision."
        ) from None


def _require(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"{purpose} needs the package {module.partition('.')[0]}, which is not installed; "
            "install it with pip install '.[hub]' in a checkout of redrafter-jax."
        ) from None
