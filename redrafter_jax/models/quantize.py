"""Quantization of a model's matrices."""

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
from flax import nnx

from redrafter_jax.config import WeightFormat
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.errors import InputError
from redrafter_jax.models.linear import GROUP_SIZES, group_size, quantize
from redrafter_jax.parallel.model import Model

AnyModel = TypeVar("AnyModel", bound=Model[Any, Any])


def quantize_model(model: AnyModel, quantization: Quantization) -> AnyModel:
    """Quantize the matrices of a target or drafter on one device.

    `quantization` selects the format of each matrix by its name. Under `jax.eval_shape` only the
    shapes are computed.

    Raises:
      InputError: int4 is requested, but no group size divides the inputs of a matrix.
    """

    def quantized(path: tuple[Any, ...], variable: Any) -> Any:
        name, value = ".".join(map(str, path)), variable.get_value()
        form = quantization.format_of(name) if value.ndim == 2 else None
        if form is None:
            return variable
        axis = 1 if "embed_tokens" in name else 0
        check_format(name, form, value.shape[axis])
        return variable.replace(compiled_quantize(value, form, axis))

    flat = [(path, quantized(path, leaf)) for path, leaf in nnx.to_flat_state(model.params)]
    return replace(model, params=nnx.from_flat_state(flat))


# Compiled once for all callers: XLA may round differently without compilation.
compiled_quantize = partial(jax.jit, static_argnums=(1, 2))(quantize)


def check_format(name: str, form: WeightFormat, inputs: int) -> None:
    """Raise `InputError` if the format is int4 and no group size divides the number of inputs."""
    if form == "int4" and group_size(inputs) is None:
        raise InputError(
            f"The weight {name!r} has {inputs} inputs, which no group size of int4 divides "
            f"({', '.join(map(str, GROUP_SIZES))}); use int8 or fp8 for this weight."
        )
