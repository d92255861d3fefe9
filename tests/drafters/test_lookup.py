"""What followed the last place where the text read as it does at its end."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrafter_jax.drafters.lookup import LONGEST_MATCH, prompt_lookup

pytestmark = pytest.mark.usefixtures("quick_compilation")

GARBAGE = 1
SLOTS = 24


def looked_up(texts: Sequence[Sequence[int]], count: int) -> list[list[int] | None]:
    """Row by row; slots past a text hold what could be mistaken for it."""
    tokens = np.full((len(texts), SLOTS), GARBAGE, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    last = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    copied, found = jax.jit(prompt_lookup, static_argnums=2)(tokens, last, count)
    pairs = zip(copied.tolist(), found.tolist(), strict=True)
    return [one if there else None for one, there in pairs]


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3]),
        # The latest of equally long matches.
        ([1, 2, 1, 3, 1], [3, 1, 3, 1, 3]),
        # A longer one goes before a later one.
        ([8, 9, 4, 5, 9, 6, 8, 9], [4, 5, 9, 6, 8]),
        # Of matches longer than are looked for, the latest.
        ([0, 1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4], [6, 0, 1, 2, 3]),
        ([1, 2, 3], None),
    ],
)
def test_the_text_goes_on_as_it_did(text: list[int], copied: list[int] | None) -> None:
    assert LONGEST_MATCH == 4
    assert looked_up([text], 5) == [copied]


def by_hand(text: Sequence[int], count: int) -> list[int] | None:
    """Every earlier place in turn, from the latest."""
    best, most = None, 0
    for place in range(len(text) - 2, -1, -1):
        length = 0
        while length < min(4, place + 1) and text[place - length] == text[-1 - length]:
            length += 1
        if length > most:
            best, most = place, length
    if best is None:
        return None
    repeated = list(text[best + 1 :])
    return (repeated * count)[:count]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=SLOTS), min_size=3, max_size=3),
    st.sampled_from([1, 3, 7]),
)
def test_every_row_finds_its_own_latest_and_longest_match(
    texts: list[list[int]], count: int
) -> None:
    assert looked_up(texts, count) == [by_hand(text, count) for text in texts]
