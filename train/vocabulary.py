"""Which tokens a small head should know: those that the training data asks for most often."""

from collections.abc import Collection, Sequence

import numpy as np

from redrafter_jax.errors import InputError

from .data.types import Windows


def most_frequent(
    sources: Sequence[tuple[Windows, float]],
    count: int,
    vocab_size: int,
    always: Collection[int] = (),
) -> tuple[int, ...]:
    """The `count` tokens that are learnt most often, in rising order.

    Tokens of no loss do not count, and each source counts by its part of the mixture, whatever its
    size. Of equally frequent tokens the lower comes first.

    Args:
      sources: rows of every source and its weight.
      count: how many tokens.
      vocab_size: the target's, V.
      always: tokens that are taken in however rare they are, such as the end token.

    Raises:
      InputError: the vocabulary has fewer tokens, or `always` more.
    """
    if not len(always) <= count <= vocab_size:
        raise InputError(
            f"drafter.draft_vocab_size is {count}; the target has {vocab_size} tokens, of which "
            f"{len(always)} end a text and are always drafted, so ask for {len(always)} to "
            f"{vocab_size}, or leave it out for all."
        )
    frequency = np.zeros(vocab_size)
    for windows, weight in sources:
        learnt = np.bincount(windows.tokens[windows.loss_mask], minlength=vocab_size)
        frequency += weight * learnt / max(learnt.sum(), 1)
    frequency[list(always)] = np.inf
    best = np.argsort(-frequency, kind="stable")[:count]
    return tuple(np.sort(best).tolist())
