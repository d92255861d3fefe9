"""Rows of equal length, made of documents of any length."""

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

    Attributes:
      windows: arrays of the rows.
      cut: number of documents that are longer than a row and were cut into pieces.
      unused: number of pieces that are left out, because no token after the first two of the piece
        carries loss.
    """

    windows: Windows
    cut: int
    unused: int


# The documents of each source, with the rows made from them.
Sources = Sequence[tuple[SourceDocuments, Rows]]


def make_rows(source: SourceDocuments, settings: DataSettings, end_token: int) -> Rows:
    """Make rows of `data.sequence_length` tokens from the documents of a source.

    Longer documents are cut into pieces. With `data.pack`, several pieces share a row.

    Raises:
      InputError: a document is longer than a row and `data.long_records` is "refuse", or no piece
        has a token that carries loss after its first two tokens.
    """
    length = settings.sequence_length
    long = [document for document in source.documents if len(document.tokens) > length]
    if long and settings.long_records == "refuse":
        longest = max(long, key=lambda document: len(document.tokens))
        raise InputError(
            f"{source.name}: {len(long)} of {len(source.documents)} records are longer than "
            f"data.sequence_length={length}, the longest {longest.place} with "
            f"{len(longest.tokens)} tokens; raise data.sequence_length, or set "
            "data.long_records=cut."
        )
    pieces = [piece for document in source.documents for piece in split(document, length)]
    # The first drafted token is two positions after the hidden state from which it is drafted.
    useful = [piece for piece in pieces if piece.loss_mask[2:].any()]
    if not useful:
        raise InputError(
            f"{source.name} has nothing to train on: none of its {len(source.documents)} records "
            "has a token that carries loss after its first two tokens. Change the data, or leave "
            "the source out."
        )
    rows = [[piece] for piece in useful]
    if settings.pack:
        groups = pack([len(piece.tokens) for piece in useful], length)
        rows = [[useful[index] for index in group] for group in groups]
    return Rows(join(rows, end_token, length), len(long), len(pieces) - len(useful))


def cut(records: Iterable[Document | Skip], end_token: int, length: int) -> Windows:
    """Cut all documents into rows of `length` tokens; no row has tokens of two documents.

    Skips are ignored. The last row of a document is padded with `end_token`.
    """
    documents = [record for record in records if isinstance(record, Document)]
    rows = [[piece] for document in documents for piece in split(document, length)]
    return join(rows, end_token, length)


def split(document: Document, length: int) -> Iterator[Document]:
    """Split a document into pieces of `length` tokens; the last one may be shorter."""
    for start in range(0, len(document.tokens), length):
        part = slice(start, start + length)
        yield document._replace(tokens=document.tokens[part], loss_mask=document.loss_mask[part])


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Pack pieces, given by their sizes, into few groups of total size `length` or less.

    The algorithm is best-fit decreasing: the pieces are placed from the longest to the shortest,
    each into the group with the least sufficient room. This takes at most 11/9 of the optimal
    number of groups, plus a constant (Johnson, 1974).

    Returns:
      The groups, each as the indices of its pieces.
    """
    groups: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    # Number of groups by remaining room, to find the least sufficient room without a search.
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
    """Build the arrays of rows from the pieces of each row.

    Rows are padded to `length` with end tokens, which carry no loss.
    """
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
