"""The output: JSON lines that are only ever added to, and read again when a run goes on."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from redrafter_jax.errors import InputError

from ..data.files import find_files
from ..data.folders import find_texts
from ..data.settings import DataSettings


class StoredRow(NamedTuple):
    """A line of the output.

    Attributes:
      number: of the line, from 1 on.
      start: the byte that it starts at.
      value: what it holds; None where that is no JSON object.
    """

    number: int
    start: int
    value: dict[str, Any] | None


def read_rows(path: Path) -> tuple[list[StoredRow], int]:
    """The whole lines of the output, and the byte that they end at; a kill leaves a cut one."""
    rows, end = [], 0
    if path.is_file():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                rows.append(StoredRow(number, end, _object(line)))
                end += len(line)
    return rows, end


def check_is_no_source(path: Path, data: DataSettings) -> None:
    """Refuse an output that the run itself reads.

    Raises:
      InputError: it is a file of a source, or a source has none.
    """
    if not path.exists():
        return
    for index, source in enumerate(data.sources):
        if source.folder is not None:
            files = [file for _, file in find_texts(source)]
        else:
            files = find_files(source.files or [])
        if any(path.samefile(file) for file in files):
            raise InputError(f"output {path} is a file of {data.name(index)}; use another output.")


def check_tail(path: Path, end: int, beginnings: Iterable[str]) -> None:
    """Refuse to cut what is no row of ours.

    Args:
      path: of the output.
      end: the byte that its whole lines end at.
      beginnings: of the rows that a kill could have cut there.

    Raises:
      InputError: what follows begins as none of them.
    """
    if not path.is_file():
        return
    with path.open("rb") as output:
        output.seek(end)
        tail = output.read()
    known = (beginning.encode() for beginning in beginnings)
    if tail and not any(tail.startswith(row) or row.startswith(tail) for row in known):
        shown = tail[:40].decode(errors="replace")
        raise InputError(
            f"{path} ends with {shown!r}, which is no beginning of a row of this run; use another "
            "output or remove that one."
        )


def cut_at(path: Path, end: int) -> None:
    """Remove what follows byte `end`."""
    if path.is_file():
        with path.open("r+b") as output:
            output.truncate(end)


def format_beginning(values: dict[str, Any]) -> str:
    """What a row begins with that has these values first."""
    return json.dumps(values, separators=(",", ":")).removesuffix("}") + ","


def format_rows(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as lines."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
