"""The commands of `python -m redrafter_jax`, one module each; `parser` defines their options."""
