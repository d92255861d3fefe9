"""A target that drafts for itself: with fewer bits, with its first layers alone, or with both.

Nothing is trained and nothing loaded. Such a drafter has keys and values of the target's own shape,
so it attends to those that the target keeps anyway, and reads no text itself.
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

# What names of such drafters begin with.
PREFIX = "self:"
_FORMS = get_args(WeightFormat)


@dataclass(frozen=True)
class SelfDrafter:
    """Which part of a target drafts for it, and in how many bits.

    Attributes:
      name: as the user wrote it.
      form: of its matrices; None leaves them as they are.
      layers: how many of the target's first layers it has; None for all.
    """

    name: str
    form: WeightFormat | None = None
    layers: int | None = None

    def shape(self, target: TargetConfig) -> TargetConfig:
        """The drafter's configuration, if the target has that many layers and inputs.

        Raises:
          InputError: it has fewer layers, or int4 does not take its matrices.
        """
        config = target
        if self.layers is not None:
            most = target.num_hidden_layers - (self.form is None)
            if not 1 <= self.layers <= most:
                raise InputError(
                    f"drafter is {self.name!r}; the target has {target.num_hidden_layers} layers, "
                    f"of which from 1 to {most} can draft."
                )
            config = target.with_layers(self.layers)
        if self.form is not None:
            # Of shapes alone; all layers have the same.
            one = config.with_layers(1)
            quantization = Quantization.of(self.form)
            jax.eval_shape(lambda: quantize_model(init_target(one, 0), quantization))
        return config

    def of(self, target: Target) -> ModelDrafter:
        """The drafter, which shares the parameters of the target that are not quantized.

        Raises:
          InputError: as `shape`, or weights to quantize are quantized already.
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
                f"drafter is {self.name!r}, but the target's weights are quantized already; give "
                f"a drafter of its own, or {PREFIX}layers=N."
            )
        quantized = quantize_model(model, Quantization.of(self.form))
        return ModelDrafter(place(quantized, target.mesh), shares_cache=True)


def parse_self(name: str) -> SelfDrafter | None:
    """What a name such as "self:int4" or "self:layers=8" means; None for paths and hub ids.

    Raises:
      InputError: what comes after "self:" means nothing.
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
                f"drafter is {name!r}; after {PREFIX} write {', '.join(_FORMS)} or layers=N, or "
                f"one of each, such as {PREFIX}int4 or {PREFIX}layers=8,int4."
            )
    return found
