"""A Flax module split once, at the edge, into a hashable structure and its parameters."""

from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh

Config = TypeVar("Config")
Module = TypeVar("Module", bound=nnx.Module)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params",),
    meta_fields=("config", "graphdef", "mesh"),
    drop_fields=("source",),
)
@dataclass(frozen=True)
class Model(Generic[Config, Module]):
    """A target or a drafter as a pytree: its leaves are the parameters, the rest is static.

    Pass it through `jax.jit` as an ordinary argument and call `merge` inside.

    Attributes:
      config: the configuration the module was built from.
      graphdef: structure of the module, hashable.
      params: its parameters.
      mesh: that they are split over, from `make_mesh`; None on one device.
      source: folder, GGUF file or hub id that it was loaded from. It is no part of the pytree:
        None once a transformation has made another model of this one.
    """

    config: Config
    graphdef: nnx.GraphDef[Module]
    params: nnx.State
    mesh: Mesh | None = None
    source: str | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def split(cls, config: Config, module: Module) -> "Model[Config, Module]":
        """The pytree of `module`."""
        graphdef, params = nnx.split(module)
        return cls(config, graphdef, params)

    def loaded_from(self, source: str) -> "Model[Config, Module]":
        """The same model, which knows where its files are."""
        other = copy(self)
        object.__setattr__(other, "source", source)
        return other

    def merge(self) -> Module:
        """The module again; it shares these parameters, so assigning to its own changes both."""
        return nnx.merge(self.graphdef, self.params)
