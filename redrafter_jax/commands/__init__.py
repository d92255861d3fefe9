"""The commands of `python -m redrafter_jax`, a file each; `arguments` states their options."""
