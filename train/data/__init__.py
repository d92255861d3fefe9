"""From the sources of a configuration to batches, a file for each step: docs/training-data.md."""
