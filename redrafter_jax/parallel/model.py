"""Models: Flax modules that are split into a hashable structure and a pytree of parameters."""

from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh


class Source(str):
    """The origin of a model, for errors and reports.

    All sources compare equal, so a model from another origin causes no new compilation.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return 0


_UNKNOWN = Source("")
Config = TypeVar("Config")
Module = TypeVar("Module", bound=nnx.Module)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params",),
    meta_fields=("config", "graphdef", "mesh", "source"),
)
@dataclass(frozen=True)
class Model(Generic[Config, Module]):
    """A target or a drafter as a pytree: the leaves are the parameters, the rest is static.

    Pass it to `jax.jit` functions as an ordinary argument, and call `merge` inside.

    Attributes:
      config: the configuration of the module.
      graphdef: the structure of the module, which is hashable.
      params: the module's parameters.
      mesh: the mesh that the parameters are split over, from `make_mesh`; None on one device.
      source: folder, GGUF file or hub id that the model was loaded from; empty otherwise.
    """

    config: Config
    graphdef: nnx.GraphDef[Module]
    params: nnx.State
    mesh: Mesh | None = None
    source: Source = _UNKNOWN

    @classmethod
    def split(cls, config: Config, module: Module) -> "Model[Config, Module]":
        """Split a module into a `Model`, without a mesh."""
        graphdef, params = nnx.split(module)
        return cls(config, graphdef, params)

    def merge(self) -> Module:
        """Return the module with these parameters.

        The module shares the parameters with this model: an assignment to a parameter of the module
        changes both.
        """
        return nnx.merge(self.graphdef, self.params)
