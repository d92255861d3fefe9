"""Types of the data pipeline: raw records, records, documents, skips and rows.

A token carries loss if its prediction is part of the training loss.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from redrafter_jax.text.chat_template import Turn

Format = Literal["messages", "conversations", "alpaca", "text", "tokens"]


class Raw(NamedTuple):
    """A record as it was read; `place` is its file and line for messages."""

    place: str
    value: Any


class Skip(NamedTuple):
    """A record that is left out.

    Attributes:
      place: file and line of the record.
      reason: kind of the fault, in the same words for all records with this fault.
      detail: what is wrong with this record; empty if `reason` says it.
    """

    place: str
    reason: str
    detail: str = ""


class Text(NamedTuple):
    """A plain text, whose tokens all carry loss.

    `place` is its file and line; `unread` are unused fields of the record.
    """

    place: str
    text: str
    unread: tuple[str, ...] = ()


class Chat(NamedTuple):
    """A conversation; assistant turns carry loss, except those with weight 0.

    `place` is its file and line; `without_loss` holds the indices of turns with weight 0; `unread`
    are unused fields of the record.
    """

    place: str
    turns: list[Turn]
    unread: tuple[str, ...] = ()
    without_loss: frozenset[int] = frozenset()


class Tokens(NamedTuple):
    """Token ids and their loss mask of 0 and 1, of equal length.

    `place` is their file and line; `is_chat` is True for conversations that `train regenerate`
    wrote; `unread` are unused fields of the record.
    """

    place: str
    ids: list[int]
    mask: list[int]
    is_chat: bool = False
    unread: tuple[str, ...] = ()


Record = Text | Chat | Tokens


class Document(NamedTuple):
    """A record in the target's tokens, before it is cut or padded to rows.

    Attributes:
      place: file and line of the record.
      kind: type of the record.
      tokens: token ids.
      loss_mask: True for tokens whose prediction carries loss.
      left_out: number of answers that carry no loss because a token spans their boundary.
      is_chat: whether the document is a conversation.
      unread: fields of the record that neither this code nor the chat template reads.
    """

    place: str
    kind: Literal["text", "chat", "tokens"]
    tokens: Int[np.ndarray, " t"]
    loss_mask: Bool[np.ndarray, " t"]
    left_out: int = 0
    is_chat: bool = False
    unread: tuple[str, ...] = ()


class Windows(NamedTuple):
    """n rows of T tokens each.

    Attributes:
      tokens: token ids, padded at the end with the end token.
      loss_mask: True for tokens whose prediction carries loss.
      segments: number of the token's document within its row, from 1; 0 at padding.
    """

    tokens: Int[np.ndarray, "n T"]
    loss_mask: Bool[np.ndarray, "n T"]
    segments: Int[np.ndarray, "n T"]


def count_reasons(skips: Sequence[Skip]) -> dict[str, int]:
    """Return the number of skipped records for each reason, the most frequent reason first."""
    return dict(Counter(skip.reason for skip in skips).most_common())


def describe_skips(skips: Sequence[Skip]) -> str:
    """Describe all reasons in one line, each with its count and its first record."""
    first = {skip.reason: skip for skip in reversed(skips)}
    return "; ".join(
        f"{count} × {reason} (first at {_place(first[reason])})"
        for reason, count in count_reasons(skips).items()
    )


def count_unread(records: Iterable[Document | Record | Skip]) -> dict[str, int]:
    """Return the number of records with each unused field, the most frequent field first."""
    unread = (() if isinstance(record, Skip) else record.unread for record in records)
    return dict(Counter(chain.from_iterable(unread)).most_common())


def describe_unread(records: Iterable[Document | Record | Skip]) -> str:
    """List all unused fields with their counts in one line; empty if there are none."""
    return ", ".join(f"{name} ({count})" for name, count in count_unread(records).items())


def _place(skip: Skip) -> str:
    return f"{skip.place}: {skip.detail}" if skip.detail else skip.place
