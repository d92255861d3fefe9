"""Prompts of the tiny pair, so short that their caches are of one size."""

from redrafter_jax.text.prompts import Asked, Prompt

PROMPTS = ["abc", "d\nab", "w", "mnop", "kk"]


def asked_with(rows: list[list[int]]) -> Asked:
    """Rows of tokens that nothing but their limit ends."""
    prompts = [Prompt(str(row), ("x",), None, "", row) for row, _ in enumerate(rows)]
    return Asked(prompts, [1] * len(rows), rows, "none", ())
