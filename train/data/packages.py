"""Packages that only some data needs."""

from importlib import import_module
from typing import Any

from redrafter_jax.errors import InputError


def require(module: str, purpose: str, extra: str) -> Any:
    """The module.

    Raises:
      InputError: its package is not installed; the sentence names `extra`, which brings it.
    """
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise InputError(
            f"{purpose} needs the package {package}, which is not installed; "
            f"pip install '{extra}' brings it."
        ) from None
