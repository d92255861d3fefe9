"""The last stage: documents of any length become rows of one."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from redrafter_jax.errors import InputError
from train.data.documents import SourceDocuments
from train.data.settings import DataSettings
from train.data.types import Document, Windows


class Rows(NamedTuple):
    """The rows of a source.

    Attributes:
      windows: at least one.
      cut: documents that were longer than a row and are spread over several.
      unused: pieces of those that hold no token to learn, and are no rows.
    """

    windows: Windows
    cut: int
    unused: int


def make_rows(source: SourceDocuments, settings: DataSettings, end_token: int) -> Rows:
    """Cut the documents into rows of `data.sequence_length` tokens.

    Raises:
      InputError: a document is longer than that, and `data.long_records` refuses it.
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
    windows = cut(source.documents, end_token, length)
    learnt = windows.loss_mask.any(axis=1)
    kept = Windows(windows.tokens[learnt], windows.loss_mask[learnt])
    return Rows(kept, len(long), int((~learnt).sum()))


def cut(documents: Sequence[Document], end_token: int, length: int) -> Windows:
    """All tokens of all documents in rows of `length`; the last row of each is padded.

    Padding is the end token and carries no loss.
    """
    tokens, masks = [], []
    for document in documents:
        size = len(document.tokens)
        padding = -size % length
        window = np.pad(document.tokens, (0, padding), constant_values=end_token)
        tokens.append(window.reshape(-1, length))
        masks.append(np.pad(document.loss_mask, (0, padding)).reshape(-1, length))
    return Windows(np.concatenate(tokens), np.concatenate(masks))
