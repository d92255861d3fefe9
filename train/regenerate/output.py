"""The output: JSON lines that are only ever added to, and read again when a run goes on."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from redrafter_jax.errors import InputError

from ..data.files import find_files
from ..data.folders import find_texts
from ..data.settings import DataSettings


class Item(NamedTuple):
    """A text or a conversation of the run; its number is its seed.

    Attributes:
      identity: what each of its rows begins with: all that they depend on but the models.
      opening: the tokens of its first row that the target continues.
    """

    identity: dict[str, Any]
    opening: list[int]


class StoredRow(NamedTuple):
    """A line of the output.

    Attributes:
      number: of the line, from 1 on.
      start: the byte that it starts at.
      value: what it holds; empty where that is no JSON object.
    """

    number: int
    start: int
    value: dict[str, Any]


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


def find_done(path: Path, items: Sequence[Item], way_out: str = "") -> Bool[np.ndarray, " M"]:
    """Which items the output holds already; what a kill cut short is removed.

    Args:
      path: of the output.
      items: of this run.
      way_out: added to the message, beside another output.

    Raises:
      InputError: it holds something that this run does not write.
    """
    rows, whole = read_rows(path)
    end, done, position = whole, np.zeros(len(items), bool), 0
    while position < len(rows):
        first = rows[position]
        count = _count_rows(first.value, items)
        held = rows[position : position + count]
        numbers = [(row.value.get("seed"), row.value.get("row", 0)) for row in held]
        seed = first.value.get("seed")
        if not count or done[seed] or numbers != [(seed, number) for number in range(len(held))]:
            raise InputError(
                f"{path}, line {first.number} is no row of this run's {len(items)} prompts with "
                f"their seeds, temperatures and limits; use another output{way_out} or remove "
                "that one."
            )
        if len(held) < count:
            end = first.start
            break
        done[seed] = True
        position += count
    _cut(path, whole, end, items)
    return done


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


def format_rows(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as lines."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def _count_rows(value: dict[str, Any], items: Sequence[Item]) -> int:
    """How many rows the item has that starts with this one; 0 if none of this run does."""
    try:
        identity, opening = items[value["seed"]]
        length = len(opening)
        starts = (
            value.get("row", 0) == 0
            and value["input_ids"][:length] == opening
            and value["loss_mask"][: length + 1] == [0] * length + [1]
            and identity.items() <= value.items()
        )
        return int(value.get("rows", 1)) if starts else 0
    except (IndexError, KeyError, TypeError):
        return 0


def _cut(path: Path, whole: int, end: int, items: Sequence[Item]) -> None:
    """Remove what follows byte `end`; what follows `whole` must be the beginning of a row."""
    if not path.is_file():
        return
    with path.open("r+b") as output:
        output.seek(whole)
        tail = output.read()
        beginnings = (format_rows([item.identity]).removesuffix("}\n") + "," for item in items)
        known = (beginning.encode() for beginning in beginnings)
        if tail and not any(tail.startswith(row) or row.startswith(tail) for row in known):
            shown = tail[:40].decode(errors="replace")
            raise InputError(
                f"{path} ends with {shown!r}, which is no beginning of a row of this run; use "
                "another output or remove that one."
            )
        output.truncate(end)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
