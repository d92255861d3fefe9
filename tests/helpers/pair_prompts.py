"""Prompts of the tiny pair, so short that their caches are of one size."""

PROMPTS = ["abc", "d\nab", "w", "mnop", "kk"]
