"""The output: JSON lines that are only ever added to, and read again when a run goes on."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


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


def cut_at(path: Path, end: int) -> None:
    """Remove what follows byte `end`."""
    if path.is_file():
        with path.open("r+b") as output:
            output.truncate(end)


def format_rows(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as lines."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
