"""Values that the steps pass on: a raw record, a record, a document, a skip."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from redrafter_jax.text.chat_template import Turn

Format = Literal["messages", "conversations", "alpaca", "text", "tokens"]


class Raw(NamedTuple):
    """A record as its file holds it; `place` is file and line, for messages."""

    place: str
    value: Any


class Skip(NamedTuple):
    """A record that is left out: where it is, the kind of fault, the fault itself."""

    place: str
    reason: str
    detail: str = ""


class Text(NamedTuple):
    """Plain text: all of it carries loss. `unread` are fields of the record that nothing reads."""

    place: str
    text: str
    unread: tuple[str, ...] = ()


class Chat(NamedTuple):
    """A conversation: the assistant's turns carry loss, but those whose `weight` is 0.

    Those are `without_loss`, by index; `unread` are fields of the record that nothing reads.
    """

    place: str
    turns: list[Turn]
    unread: tuple[str, ...] = ()
    without_loss: frozenset[int] = frozenset()


class Tokens(NamedTuple):
    """Token ids, and a mask of 0 and 1 of the same length: which of them carry loss.

    `is_chat` is True of a conversation that `train regenerate` wrote; `unread` are fields of the
    record that nothing reads.
    """

    place: str
    ids: list[int]
    mask: list[int]
    is_chat: bool = False
    unread: tuple[str, ...] = ()


Record = Text | Chat | Tokens


class Document(NamedTuple):
    """A record in the target's tokens, of any length: nothing is cut or padded yet.

    Attributes:
      place: file and line.
      kind: the kind of record it was.
      tokens: token ids.
      loss_mask: True where predicting the token counts.
      left_out: answers that carry no loss, because a token runs across their edge.
      is_chat: whether a chat template wrote it, here or before.
      unread: fields of the record that nothing has read, the chat template included.
    """

    place: str
    kind: Literal["text", "chat", "tokens"]
    tokens: Int[np.ndarray, " t"]
    loss_mask: Bool[np.ndarray, " t"]
    left_out: int = 0
    is_chat: bool = False
    unread: tuple[str, ...] = ()


class Windows(NamedTuple):
    """Rows of one length T.

    Attributes:
      tokens: token ids, padded at the end of a row with the end token.
      loss_mask: True where predicting the token counts.
      segments: number of the document within the row, from 1 on; 0 where there is padding.
    """

    tokens: Int[np.ndarray, "n T"]
    loss_mask: Bool[np.ndarray, "n T"]
    segments: Int[np.ndarray, "n T"]


def count_reasons(skips: Sequence[Skip]) -> dict[str, int]:
    """How many records each reason left out, the most frequent first."""
    return dict(Counter(skip.reason for skip in skips).most_common())


def describe_skips(skips: Sequence[Skip]) -> str:
    """One line: every reason with its count and its first record."""
    first = {skip.reason: skip for skip in reversed(skips)}
    return "; ".join(
        f"{count} × {reason} (first at {_place(first[reason])})"
        for reason, count in count_reasons(skips).items()
    )


def count_unread(records: Iterable[Document | Record | Skip]) -> dict[str, int]:
    """How many records have each field that nothing reads, the most frequent first."""
    unread = (() if isinstance(record, Skip) else record.unread for record in records)
    return dict(Counter(chain.from_iterable(unread)).most_common())


def describe_unread(records: Iterable[Document | Record | Skip]) -> str:
    """One line: every field that nothing reads, with its count; empty without any."""
    return ", ".join(f"{name} ({count})" for name, count in count_unread(records).items())


def _place(skip: Skip) -> str:
    return f"{skip.place}: {skip.detail}" if skip.detail else skip.place
