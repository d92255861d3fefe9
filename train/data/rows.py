"""Documents of any length become rows of equal length."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from redrafter_jax.errors import InputError

from .documents import SourceDocuments
from .settings import DataSettings
from .types import Document, Skip, Windows


class Rows(NamedTuple):
    """The rows of a source, at least one.

    `cut` of its documents were longer than a row and take several. `unused` pieces are left out:
    no token after their first two carries loss.
    """

    windows: Windows
    cut: int
    unused: int


# Every source and its rows.
Sources = Sequence[tuple[SourceDocuments, Rows]]


def make_rows(source: SourceDocuments, settings: DataSettings, end_token: int) -> Rows:
    """Cut the documents into rows of `data.sequence_length` tokens, and pack them if that is set.

    Raises:
      InputError: a document is longer than that, and `data.long_records` refuses it; or no token
        after the first two of a piece carries loss.
    """
    length = settings.sequence_length
    long = [document for document in source.documents if len(document.tokens) > length]
    if long and settings.long_records == "refuse":
        longest = max(long, key=lambda document: len(document.tokens))
        raise InputError(
            f"{source.name}: {len(long)} of {len(source.documents)} records are longer than "
            f"data.sequence_length={length}, the longest {longest.place} with "
            f"{len(longest.tokens)} tokens; raise it, or set data.long_records=cut."
        )
    pieces = [piece for document in source.documents for piece in split(document, length)]
    # The first drafted token is two after that of the hidden state.
    useful = [piece for piece in pieces if piece.loss_mask[2:].any()]
    if not useful:
        raise InputError(
            f"{source.name} holds nothing to train on: none of its {len(source.documents)} records "
            "has a token that carries loss after its first two. Give it other data or leave it out."
        )
    rows = [[piece] for piece in useful]
    if settings.pack:
        groups = pack([len(piece.tokens) for piece in useful], length)
        rows = [[useful[index] for index in group] for group in groups]
    return Rows(join(rows, end_token, length), len(long), len(pieces) - len(useful))


def cut(records: Iterable[Document | Skip], end_token: int, length: int) -> Windows:
    """All tokens of all documents in rows of `length`, each row of one document."""
    documents = [record for record in records if isinstance(record, Document)]
    rows = [[piece] for document in documents for piece in split(document, length)]
    return join(rows, end_token, length)


def split(document: Document, length: int) -> Iterator[Document]:
    """The document in pieces of `length` tokens, the last of them shorter."""
    for start in range(0, len(document.tokens), length):
        part = slice(start, start + length)
        yield document._replace(tokens=document.tokens[part], loss_mask=document.loss_mask[part])


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Groups of pieces, by index, that fit into `length`: few groups, and deterministic.

    Best fit decreasing: each piece, the longest first, goes where the least room is left that
    suffices. This takes at most 11/9 of the optimal number of groups, and a few (Johnson, 1974).
    """
    groups: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    # The number of groups by room left, to find the least that suffices at once.
    counts = np.zeros(length + 1, int)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        enough = np.flatnonzero(counts[size:])
        if len(enough):
            room = size + int(enough[0])
            group = with_room[room].pop()
            counts[room] -= 1
        else:
            room, group = length, len(groups)
            groups.append([])
        groups[group].append(index)
        with_room[room - size].append(group)
        counts[room - size] += 1
    return groups


def join(rows: Sequence[Sequence[Document]], end_token: int, length: int) -> Windows:
    """Arrays of rows: each has its pieces and then padding, end tokens without loss."""
    tokens = np.full((len(rows), length), end_token, np.int32)
    loss_mask = np.zeros((len(rows), length), bool)
    segments = np.zeros((len(rows), length), np.int32)
    for row, pieces in enumerate(rows):
        start = 0
        for number, piece in enumerate(pieces, start=1):
            part = slice(start, start + len(piece.tokens))
            tokens[row, part] = piece.tokens
            loss_mask[row, part] = piece.loss_mask
            segments[row, part] = number
            start = part.stop
    return Windows(tokens, loss_mask, segments)
