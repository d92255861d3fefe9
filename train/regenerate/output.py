"""The output file of `train regenerate`: JSON lines, which a resumed run reads and appends to."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from redrafter_jax.acceptance import repeats_itself
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.processes import is_first, read_lines

from ..config import RegenerateSettings
from ..data.files import find_files
from ..data.folders import find_texts
from ..data.settings import DataSettings
from ..data.types import Skip, describe_skips
from .session import JsonRows


class Item(NamedTuple):
    """A text or a conversation of the output.

    Attributes:
      seed: seed of the sampling, which is also the item's number.
      identity: first fields of every row of the item. Apart from the models, the rows depend only
        on these fields.
      opening: first tokens of the item's first row; empty if unknown. These tokens carry no loss,
        and the next token carries loss.
    """

    seed: int
    identity: dict[str, Any]
    opening: list[int]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of an output; a line that is not a JSON object becomes {}."""
    return [_object(line) for line in read_lines(path)[0]]


def find_done(path: Path, items: Sequence[Item], way_out: str = "") -> dict[int, list[Any]]:
    """Find the finished items of the output; remove an unfinished item at the end of the file.

    Args:
      path: path of the output.
      items: the items that the run may write.
      way_out: words for the error message, inserted after "use another output".

    Returns:
      The rows of each finished item, by seed.

    Raises:
      InputError: the output holds something that this run does not write.
    """
    lines, tail = read_lines(path)
    rows = [_object(line) for line in lines]
    by_seed = {item.seed: item for item in items}
    done: dict[int, list[Any]] = {}
    position = 0
    while position < len(rows):
        count = _count_rows(rows[position], by_seed)
        seed = rows[position]["seed"] if count else -1
        group = rows[position : position + count]
        numbers = [(row.get("seed"), row.get("row", 0)) for row in group]
        whole = numbers == [(seed, number) for number in range(len(group))]
        if not count or seed in done or not whole:
            raise InputError(
                f"{path}, line {position + 1} is not a row of this run, which has other prompts, "
                f"seeds, temperatures or limits; use another output{way_out}, or delete this file."
            )
        if len(group) < count:
            break
        done[seed] = group
        position += count
    # What follows the complete lines must be the beginning of a row.
    beginnings = (format_rows([item.identity]).removesuffix("}\n") + "," for item in items)
    known = (beginning.encode() for beginning in beginnings)
    if tail and not any(tail.startswith(row) or row.startswith(tail) for row in known):
        shown = tail[:40].decode(errors="replace")
        raise InputError(
            f"{path} ends with {shown!r}, which does not begin a row of this run; use another "
            "output, or delete this file."
        )
    if is_first() and (tail or position < len(rows)):
        os.truncate(path, sum(len(line) + 1 for line in lines[:position]))
    return done


def check_is_no_source(path: Path, data: DataSettings) -> None:
    """Refuse an output that is also a file of a source, and a source without files."""
    if not path.exists():
        return
    for index, source in enumerate(data.sources):
        if source.folder is not None:
            files = [file for _, file in find_texts(source)]
        else:
            files = find_files(source.files or [])
        if any(path.samefile(file) for file in files):
            raise InputError(
                f"output {path} is a file of {data.name(index)}, which the run reads; use another "
                "output."
            )


def format_rows(rows: Iterable[dict[str, Any]]) -> str:
    """Format rows as JSON lines."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def append_rows(
    texts: Iterable[JsonRows],
    have: int,
    goal: int,
    settings: RegenerateSettings,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Append the rows of each text or conversation to the output, until the goal is reached.

    Amounts are numbers of texts, conversations or tokens; see `amount_of`.

    Args:
      texts: the rows of each text or conversation.
      have: amount that the output already holds.
      goal: amount at which writing ends.
      settings: settings of the run.
      advance: called with the amount of each text or conversation after it is written.
    """
    # All processes decode together; the first one writes.
    path = settings.output if is_first() else Path(os.devnull)
    with path.open("a", encoding="utf-8") as file:
        for rows in texts:
            file.write(format_rows(rows))
            file.flush()
            amount = amount_of(rows, settings)
            advance(amount)
            have += amount
            if have >= goal:
                break


def amount_of(rows: JsonRows, settings: RegenerateSettings) -> int:
    """Return what a text or conversation adds to the goal.

    This is its number of tokens that carry loss if `settings.tokens` is the limit, otherwise 1.
    """
    return 1 if settings.tokens is None else count_tokens(rows)


def _count_rows(value: dict[str, Any], by_seed: Mapping[int, Item]) -> int:
    """Number of rows of the item that starts with this row; 0 if no item of the run does."""
    try:
        item = by_seed[value["seed"]]
        mask = [*[0] * len(item.opening), 1] if item.opening else [0]
        starts = (
            value.get("row", 0) == 0
            and value["input_ids"][: len(item.opening)] == item.opening
            and value["loss_mask"][: len(mask)] == mask
            and item.identity.items() <= value.items()
        )
        count = value.get("rows", 1)
        return count if starts and type(count) is int and count > 0 else 0
    except (KeyError, TypeError):
        return 0


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def count_tokens(rows: JsonRows) -> int:
    """Return the number of tokens that carry loss."""
    return sum(sum(row["loss_mask"]) for row in rows)


def written_texts(row: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield the token ids of each answer in a row, or of the text that the target wrote."""
    pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
    for carries_loss, own in groupby(pairs, lambda pair: pair[1]):
        if carries_loss:
            yield [token for token, _ in own]


def summarize(settings: RegenerateSettings) -> str:
    """Describe in a sentence what the output contains and what was left out.

    A second sentence warns if half of the texts or more repeat themselves.
    """
    rows = read_rows(settings.output)
    first = [row for row in rows if row.get("row", 0) == 0]
    summary = f"{len(rows)} rows of {len(first)} conversations in {settings.output}: "
    if not any("answers" in row for row in rows):
        summary = f"{len(rows)} texts in {settings.output}"
    else:
        answers, cut = (sum(row[name] for row in rows) for name in ("answers", "cut"))
        limit = settings.max_new_tokens or settings.data.sequence_length
        summary += (
            f"{answers} answers, of which {cut} were cut at their limit of {limit} tokens or less"
        )
    if settings.prompts == "self":
        summary += f"; {count_tokens(rows):,} tokens carry loss"
    ended = [
        Skip(row.get("record", f"seed {row['seed']}"), row["left_out"])
        for row in first
        if row.get("left_out")
    ]
    if ended:
        summary += f"; later answers left out: {describe_skips(ended)}"
    dropped = sum((Counter(row.get("dropped", {})) for row in first), Counter())
    if dropped:
        summary += f"; left out: {describe_counts(dropped)}"
    texts = [text for row in rows for text in written_texts(row)]
    repeating = sum(map(repeats_itself, texts))
    if texts and 2 * repeating >= len(texts):
        summary += (
            f". Warning: {repeating} of {len(texts)} repeat themselves, and a head that is trained "
            "on these learns little else; raise temperatures, or let a base model continue texts "
            "(prompt_tokens)."
        )
    return summary


def describe_counts(counts: Counter[str]) -> str:
    """List all reasons with their counts, the most frequent first."""
    return "; ".join(f"{count} × {reason}" for reason, count in counts.most_common())
