"""Training data that the target generates, one file per stage; see docs/training-data.md."""
