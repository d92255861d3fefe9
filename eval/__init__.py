"""`python -m eval`: measurements and reports of speculative and autoregressive decoding."""
