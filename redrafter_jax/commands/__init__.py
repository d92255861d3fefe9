"""The commands of `python -m redrafter_jax`, a file each: `add` states its arguments."""
