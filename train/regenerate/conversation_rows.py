"""Rewritten conversations as rows of the output, and which of them it holds already."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from redrafter_jax.errors import InputError

from ..config import RegenerateSettings
from ..data.skips import describe_skips
from ..data.types import Skip
from .conversations import Conversation, Rewritten, Speaker, plan_batches, rewrite
from .output import (
    StoredRow,
    check_tail,
    cut_at,
    format_beginning,
    read_rows,
)
from .writer import Write


def describe_rows(
    conversation: Conversation, rewritten: Rewritten, settings: RegenerateSettings
) -> list[dict[str, Any]]:
    """The rows of a conversation, with all that they depend on but the models."""
    return [
        _identity(conversation, settings)
        | {
            "row": number,
            "rows": len(rewritten.rows),
            "answers": row.answers,
            "cut": row.cut,
            "left_out": rewritten.left_out,
            "input_ids": row.tokens,
            "loss_mask": row.mask,
        }
        for number, row in enumerate(rewritten.rows)
    ]


def rewrite_conversations(
    write: Write,
    speaker: Speaker,
    batches: Sequence[Sequence[Conversation]],
    settings: RegenerateSettings,
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the conversations, a batch at a time."""
    for batch in batches:
        rewritten = rewrite(write, speaker, batch, settings)
        yield [
            row
            for conversation, result in zip(batch, rewritten, strict=True)
            for row in describe_rows(conversation, result, settings)
        ]


def remaining_batches(
    conversations: Sequence[Conversation], done: Bool[np.ndarray, " M"], batch_size: int
) -> list[list[Conversation]]:
    """The batches of the whole run without the conversations that are done."""
    left = {each.seed for each, held in zip(conversations, done, strict=True) if not held}
    batches = (
        [conversation for conversation in batch if conversation.seed in left]
        for batch in plan_batches(conversations, batch_size)
    )
    return [batch for batch in batches if batch]


def find_done(
    conversations: Sequence[Conversation], settings: RegenerateSettings
) -> Bool[np.ndarray, " M"]:
    """Which conversations the output holds already; one cut short by a kill is removed.

    Raises:
      InputError: it holds something that these settings do not write.
    """
    path = settings.output
    rows, whole = read_rows(path)
    end = whole
    done: set[int] = set()
    position = 0
    while position < len(rows):
        first = rows[position]
        count = _rows_of(first, conversations, settings)
        held = rows[position : position + count]
        seed = first.value["seed"] if count and first.value else None
        if seed is None or seed in done or not _belong(held):
            raise InputError(
                f"{path}, line {first.number} is no row of this run's conversations, seeds, "
                "temperatures and limits; use another output, remove that one, or give a template "
                "that writes today's date that of the first start, as data.template_arguments="
                "{date_string: ...}."
            )
        if len(held) < count:
            end = first.start
            break
        done.add(seed)
        position += count
    beginnings = (format_beginning(_identity(each, settings)) for each in conversations)
    check_tail(path, whole, beginnings)
    cut_at(path, end)
    return np.asarray([conversation.seed in done for conversation in conversations], bool)


def summarize(settings: RegenerateSettings) -> str:
    """What the output holds, in a sentence, and what was left out of it."""
    values = [row.value for row in read_rows(settings.output)[0] if row.value]
    first = [value for value in values if value["row"] == 0]
    answers, cut = (sum(value[name] for value in values) for name in ("answers", "cut"))
    limit = settings.max_new_tokens or settings.data.sequence_length
    told = (
        f"{len(values)} rows of {len(first)} conversations in {settings.output}: {answers} "
        f"answers, of which {cut} were cut at their limit of {limit} tokens or less"
    )
    ended = [Skip(value["record"], value["left_out"]) for value in first if value["left_out"]]
    return f"{told}; later answers left out: {describe_skips(ended)}" if ended else told


def _identity(conversation: Conversation, settings: RegenerateSettings) -> dict[str, Any]:
    return {
        "record": conversation.place,
        "seed": conversation.seed,
        "temperature": settings.temperature_of(conversation.seed),
        "max_new_tokens": settings.max_new_tokens,
        "sequence_length": settings.data.sequence_length,
    }


def _rows_of(
    row: StoredRow, conversations: Sequence[Conversation], settings: RegenerateSettings
) -> int:
    """How many rows the conversation has that starts here; 0 if none of this run does."""
    value = row.value or {}
    try:
        conversation = conversations[value["seed"]]
        length = len(conversation.opening)
        starts = (
            value["row"] == 0
            and value["input_ids"][:length] == conversation.opening
            and value["loss_mask"][:length] == [0] * length
            and _identity(conversation, settings).items() <= value.items()
        )
        return int(value["rows"]) if starts else 0
    except (IndexError, KeyError, TypeError):
        return 0


def _belong(rows: Sequence[StoredRow]) -> bool:
    """Whether they are rows 0, 1, 2 ... of one conversation."""
    values = [row.value or {} for row in rows]
    named = [(value.get("seed"), value.get("row")) for value in values]
    return named == [(named[0][0], number) for number in range(len(rows))]
