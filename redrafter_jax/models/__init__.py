"""The target decoder and its families."""
