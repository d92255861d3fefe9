"""Prompts of the tiny pair, so short that their caches are of one size."""

from redrafter_jax.text.prompts import Asked

PROMPTS = ["abc", "d\nab", "w", "mnop", "kk"]


def asked_with(rows: list[list[int]]) -> Asked:
    """Rows of tokens that nothing but their limit ends."""
    return Asked([], rows, "none", ())
