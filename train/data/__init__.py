"""From the sources of a configuration to batches, a room per step: see docs/training-data.md."""
