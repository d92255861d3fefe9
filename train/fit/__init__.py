"""From a checkpoint and nothing else to a draft head and its report."""
