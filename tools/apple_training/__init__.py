"""Beside Apple's PyTorch trainer: same target, first drafter, batches and optimizer."""
