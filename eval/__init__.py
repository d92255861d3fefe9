"""Measurements and reports of speculative and autoregressive decoding, with `python -m eval`."""
