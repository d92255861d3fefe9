"""Self-drafting: a target drafts for itself, with quantized weights, fewer layers, or both.

Nothing is trained or loaded. The drafter's keys and values have the same shape as the target's. So
the drafter attends to the target's cache and does not read the text itself.
"""

from dataclasses import dataclass, replace
from typing import get_args

import jax
from flax import nnx

from redrafter_jax.config import TargetConfig, WeightFormat
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.drafters.model_drafter import ModelDrafter
from redrafter_jax.errors import InputError
from redrafter_jax.models.linear import QuantizedWeight, SeparateWeights
from redrafter_jax.models.quantize import quantize_model
from redrafter_jax.models.target import Target, init_target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.parallel.model import Model

# Prefix of the names of self-drafters.
PREFIX = "self:"
_FORMS = get_args(WeightFormat)


@dataclass(frozen=True)
class SelfDrafter:
    """The part of a target that drafts, and the format of its weights.

    Attributes:
      name: the name that the user gave.
      form: format of the drafter's matrices; None keeps the format of the target.
      layers: number of leading target layers to use; None for all.
    """

    name: str
    form: WeightFormat | None = None
    layers: int | None = None

    def shape(self, target: TargetConfig) -> TargetConfig:
        """Return the configuration of the drafter for this target.

        Raises:
          InputError: the target has too few layers, or its matrices do not fit int4.
        """
        config = target
        if self.layers is not None:
            most = target.num_hidden_layers - (self.form is None)
            if not 1 <= self.layers <= most:
                raise InputError(
                    f"drafter is {self.name!r}, but the target has {target.num_hidden_layers} "
                    f"layers; give layers=N with N from 1 to {most}."
                )
            config = target.with_layers(self.layers)
        if self.form is not None:
            # Shapes are enough to check, and all layers have the same.
            one = config.with_layers(1)
            quantization = Quantization.of(self.form)
            jax.eval_shape(lambda: quantize_model(init_target(one, 0), quantization))
        return config

    def of(self, target: Target) -> ModelDrafter:
        """Return the drafter; it shares all parameters with the target that are not quantized.

        Raises:
          InputError: the target has too few layers, its matrices do not fit int4, or the weights to
            quantize are already quantized.
        """
        decoder, config = target.merge(), self.shape(target.config)
        decoder.config = config
        decoder.layers = nnx.List(decoder.layers[: config.num_hidden_layers])
        model = replace(Model.split(config, decoder), mesh=target.mesh, source=target.source)
        if self.form is None:
            return ModelDrafter(model, shares_cache=True)
        if any(
            isinstance(leaf.get_value(), QuantizedWeight | SeparateWeights)
            for _, leaf in nnx.to_flat_state(model.params)
        ):
            raise InputError(
                f"drafter is {self.name!r}, but the target's weights are already quantized; give "
                f"a separate drafter, or {PREFIX}layers=N."
            )
        quantized = quantize_model(model, Quantization.of(self.form))
        return ModelDrafter(place(quantized, target.mesh), shares_cache=True)


def parse_self(name: str) -> SelfDrafter | None:
    """Parse a name such as "self:int4" or "self:layers=8"; None for paths and hub ids.

    Raises:
      InputError: the part after "self:" is not understood.
    """
    if not name.startswith(PREFIX):
        return None
    found = SelfDrafter(name)
    for part in name.removeprefix(PREFIX).split(","):
        count = part.removeprefix("layers=")
        if part in _FORMS and found.form is None:
            found = replace(found, form=part)
        elif part != count and count.isdecimal() and found.layers is None:
            found = replace(found, layers=int(count))
        else:
            raise InputError(
                f"drafter is {name!r}; after {PREFIX} write a format ({', '.join(_FORMS)}), "
                f"layers=N, or both, such as {PREFIX}int4 or {PREFIX}layers=8,int4."
            )
    return found
