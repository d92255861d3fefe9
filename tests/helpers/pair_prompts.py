"""Prompts of the tiny pair, so short that their caches are of one size."""

from typing import Any

from tiny_folders import encode

from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.generation import Generation, generate
from redrafter_jax.models.target import Target
from redrafter_jax.text.prompts import EncodedPrompts, Prompt

PROMPTS = ["abc", "d\nab", "w", "mnop", "kk"]


def asked_with(rows: list[list[int]]) -> EncodedPrompts:
    """Rows of tokens that nothing but their limit ends."""
    prompts = [Prompt(str(row), ("x",), None, "", row) for row, _ in enumerate(rows)]
    return EncodedPrompts(prompts, [1] * len(rows), rows, "none", ())


def generate_each(
    target: Target, drafter: LoadedHead | Drafter | None, **how: Any
) -> list[Generation]:
    """One prompt after the other, so that nothing is compiled beside what commands compile."""
    return [
        generate(target, drafter, [encode(text)], seeds=[seed], **how)
        for seed, text in enumerate(PROMPTS)
    ]
