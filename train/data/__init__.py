"""The pipeline from data sources to batches, one file per stage; see docs/training-data.md."""
