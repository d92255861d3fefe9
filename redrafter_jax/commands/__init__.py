"""The commands of `python -m redrafter_jax`, a file each; `parser` states their options."""
