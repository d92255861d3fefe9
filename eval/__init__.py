"""`python -m eval`: speculative against plain decoding, measured and reported."""
