"""Training data in the target's own words, a file for each step: docs/training-data.md."""
