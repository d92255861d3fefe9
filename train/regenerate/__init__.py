"""Training data in the target's own words, a room per step: see docs/training-data.md."""
