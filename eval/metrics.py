"""Measures of decoded texts that several reports share, and their definitions."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from jaxtyping import Float

from redrafter_jax.acceptance import (
    FEW,
    acceptance_length,
    acceptance_rate_per_depth,
    ends_at_once,
    repeats_itself,
)
from redrafter_jax.text.prompts import EncodedPrompts

from .benchmark import Run

DEFINITIONS = {
    "acceptance_length": "mean tokens gained per target call after prefill, bonus token included; "
    "1.0 for the baseline",
    "acceptance_rate_per_depth": "share of drafts accepted at depth 1, 2, ... of the tree, given "
    "that their parent was accepted; a call cut short by a row's limit counts as a rejection",
    "calls_per_depth": "entry d: target calls that accepted a draft at depth d; entry 0: all "
    "target calls; the rate at depth d is entry d / entry (d - 1)",
    "accept_counts": "entry c - 1: target calls that gained exactly c tokens",
    "accepted_by": "accepted tokens by the source that proposed them; a token that several "
    "sources proposed counts for the first, and a call's last token is its bonus token",
    "target_calls": "target calls after prefill, summed over prompts, in one pass over them",
    "identical": "share of prompts whose text equals the baseline's, token for token, in every "
    "repeat",
    "chat_template": 'template that renders prompts as user turns; "none": prompts are verbatim',
    "turns": "number of user turns of the longest prompt; each turn is a row. A later turn follows "
    "the baseline's answers to the earlier turns, which are decoded once for all methods, with the "
    "same sampling and seed",
    "answer_tokens": "quartiles of the baseline's new tokens, including the stop token",
    "ended_by": "number of the baseline's texts that end at a stop token, or at max_new_tokens",
    "short": f"texts that a stop token ends within {FEW} tokens",
    "repeating": "texts of 16 tokens or more in which less than half of the 4-grams are distinct",
}


def count_accepted(runs: Sequence[Run]) -> dict[str, Any]:
    """Compute acceptance length, rates per depth, and the counts of these; see `DEFINITIONS`."""
    counts = np.concatenate([run.accept_counts for run in runs]).sum(axis=0)
    per_depth = acceptance_rate_per_depth(counts)
    return {
        "acceptance_length": acceptance_length(counts),
        "acceptance_rate_per_depth": [None if np.isnan(r) else float(r) for r in per_depth],
        "calls_per_depth": np.cumsum(counts[::-1])[::-1].tolist(),
        "accept_counts": counts.tolist(),
        "accepted_by": {
            name: sum(sum(run.accepted_by[name]) for run in runs) for name in runs[0].accepted_by
        },
        "target_calls": sum(sum(run.steps) for run in runs),
        "new_tokens": sum(run.new_tokens for run in runs),
    }


def describe_answers(asked: EncodedPrompts, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Describe the prompts and the baseline's answers for a report.

    `texts` are the token ids of the answers, each with at least one token.
    """
    stopped = sum(text[-1] in asked.stop_tokens for text in texts)
    return {
        "chat_template": asked.template,
        "turns": max(asked.turns),
        "answer_tokens": quartiles(np.asarray([len(text) for text in texts], float)),
        "ended_by": {"stop_token": stopped, "max_new_tokens": len(texts) - stopped},
        "short": sum(ends_at_once(text, asked.stop_tokens) for text in texts),
        "repeating": sum(map(repeats_itself, texts)),
    }


def answer_lines(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the result of `describe_answers`; warn of short or repetitive answers."""
    low, middle, high = said["answer_tokens"]
    stopped, limited = said["ended_by"].values()
    turns = "" if said["turns"] == 1 else f", up to {said['turns']} turns with its own answers"
    yield (
        f"chat template: {said['chat_template']}{turns}; answers of {middle:g} tokens ({low:g} to "
        f"{high:g}), {stopped} ended by a stop token and {limited} by max_new_tokens"
    )
    if 2 * said["short"] >= stopped + limited:
        yield (
            f"Warning: {said['short']} of {stopped + limited} answers end within {FEW} tokens, so "
            "little more than prefill is measured. Chat models may end early if prompts are not in "
            "their chat template."
        )
    if 2 * said["repeating"] >= stopped + limited:
        yield (
            f"Warning: {said['repeating']} of {stopped + limited} answers repeat themselves, so "
            "any drafter predicts them. Base models often repeat themselves; with other models use "
            "other prompts, stop=eos or a temperature above 0."
        )


def first_divergence(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the index of the first new token that differs or is missing; None for equal texts."""
    for index, (ours, theirs) in enumerate(zip_longest(tokens, expected)):
        if ours != theirs:
            return index
    return None


def quartiles(values: Float[np.ndarray, " n"]) -> list[float] | None:
    """Return the quartiles (25%, 50%, 75%) of the values that are not NaN; None if all are NaN."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return None
    return np.quantile(known, (0.25, 0.5, 0.75)).tolist()
