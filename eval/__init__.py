"""`python -m eval`: speculative and autoregressive decoding, measured and reported."""
