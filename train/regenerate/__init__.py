"""Training data in the target's own words, one file per stage; see docs/training-data.md."""
