"""A Flax module split once, at the edge, into a hashable structure and its parameters."""

from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh


class Source(str):
    """Where a model came from, for messages; all are equal, so that none compiles anything anew."""

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
    """A target or a drafter as a pytree: its leaves are the parameters, the rest is static.

    Pass it through `jax.jit` as an ordinary argument and call `merge` inside.

    Attributes:
      config: the configuration the module was built from.
      graphdef: structure of the module, hashable.
      params: its parameters.
      mesh: the mesh that they are split over, from `make_mesh`; None on one device.
      source: folder, GGUF file or hub id that it was loaded from; empty if it was made otherwise.
    """

    config: Config
    graphdef: nnx.GraphDef[Module]
    params: nnx.State
    mesh: Mesh | None = None
    source: Source = _UNKNOWN

    @classmethod
    def split(cls, config: Config, module: Module) -> "Model[Config, Module]":
        """The pytree of `module`."""
        graphdef, params = nnx.split(module)
        return cls(config, graphdef, params)

    def merge(self) -> Module:
        """The module again; it shares these parameters, so assigning to its own changes both."""
        return nnx.merge(self.graphdef, self.params)
