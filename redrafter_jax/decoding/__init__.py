"""Decode steps and prefill, as functions of arrays."""
