"""Documents become rows that hold every token once and never cross a document."""

import numpy as np
import pytest
from chat_folders import data_settings
from hypothesis import given
from hypothesis import strategies as st

from redrafter_jax.errors import InputError
from train.data.documents import SourceDocuments
from train.data.rows import make_rows, pack
from train.data.types import Document

END = 9


def document(tokens: list[int], mask: list[int]) -> Document:
    return Document("a, line 1", "tokens", np.asarray(tokens, np.int32), np.asarray(mask, bool))


def source(*documents: Document) -> SourceDocuments:
    return SourceDocuments("data.sources.0 (a)", 1.0, list(documents), [])


def test_long_records_are_cut_and_counted_or_refused() -> None:
    long = document([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 0, 1])
    loaded = source(document([1, 2, 3], [0, 0, 1]), long)
    settings = data_settings({"files": ["a"]}, sequence_length=4)
    rows = make_rows(loaded, settings, END)
    assert rows.windows.tokens.tolist() == [[1, 2, 3, 9], [5, 6, 7, 8]]
    # The first piece of the long one holds nothing to learn.
    assert (rows.cut, rows.unused) == (1, 1)
    refusing = settings.model_copy(update={"long_records": "refuse"})
    with pytest.raises(
        InputError,
        match=r"1 of 2 records are longer than data\.sequence_length=4, the longest a, line 1 with "
        "8 tokens",
    ):
        make_rows(loaded, refusing, END)
    exact = source(document([1, 2, 3, 4], [0, 1, 1, 1]))
    assert make_rows(exact, refusing, END).cut == 0


def test_what_no_draft_reaches_is_no_row() -> None:
    settings = data_settings({"files": ["a"]}, sequence_length=4)
    short = document([1, 2], [0, 1]), document([3, 4, 5], [1, 1, 0])
    rows = make_rows(source(*short, document([6, 7, 8], [0, 0, 1])), settings, END)
    assert rows.windows.tokens.tolist() == [[6, 7, 8, 9]]
    assert rows.unused == 2
    with pytest.raises(InputError, match="none of its 2 records has a token that carries loss"):
        make_rows(source(*short), settings, END)


def test_packed_rows_of_literal_documents() -> None:
    documents = [document([1, 2, 3], [0, 1, 1]), document([4, 5, 6, 7, 8, 9, 0, 1, 2], [1] * 9)]
    settings = data_settings({"files": ["a"]}, sequence_length=6, pack=True)
    windows = make_rows(source(*documents), settings, END).windows
    assert windows.tokens.tolist() == [[4, 5, 6, 7, 8, 9], [1, 2, 3, 0, 1, 2]]
    assert windows.loss_mask.tolist() == [[1] * 6, [0, 1, 1, 1, 1, 1]]
    assert windows.segments.tolist() == [[1] * 6, [1, 1, 1, 2, 2, 2]]


@given(st.lists(st.integers(1, 12), max_size=40))
def test_packing_loses_nothing_and_leaves_no_two_rows_that_would_fit_into_one(
    sizes: list[int],
) -> None:
    groups = pack(sizes, 12)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    filled = sorted(sum(sizes[index] for index in group) for group in groups)
    assert all(1 <= size <= 12 for size in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 12
    fewest = -(-sum(sizes) // 12)
    assert len(groups) <= 11 / 9 * max(fewest, sum(size > 6 for size in sizes)) + 4
