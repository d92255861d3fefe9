"""Grids of trees: every combination of some fields' values."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from redrafter_jax.config import TreeConfig
from redrafter_jax.settings.sections import BuildableSettings


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


type Values[T] = Annotated[list[T], BeforeValidator(_as_list), Field(min_length=1)]


class TreeGrid(BuildableSettings):
    """Trees of every combination of these fields of `TreeConfig`, each a value or a list of them.

    The first field changes last.
    """

    beam_width: Values[int] = [TreeConfig.beam_width]
    draft_rounds: Values[int] = [TreeConfig.draft_rounds]
    final_beams_only: Values[bool] = [TreeConfig.final_beams_only]
    rerank: Values[bool] = [TreeConfig.rerank]
    lookup_tokens: Values[int] = [TreeConfig.lookup_tokens]
    num_nodes: Values[int | None] = [TreeConfig.num_nodes]
    sharpness: Values[float] = [TreeConfig.sharpness]

    def build(self) -> list[TreeConfig]:
        """The library's configuration of every tree, its budget written out; none comes twice."""
        names, values = zip(*self, strict=True)
        trees = (TreeConfig(**dict(zip(names, one, strict=True))) for one in product(*values))
        return list(dict.fromkeys(_plain(tree) for tree in trees))


def _plain(tree: TreeConfig) -> TreeConfig:
    """The same tree with its budget as `num_nodes`, and `rerank` only if it adds extensions."""
    rerank = tree.extensions > tree.beam_width
    return replace(tree, num_nodes=tree.budget, rerank=rerank)


def build_all(grids: Iterable[TreeGrid]) -> list[TreeConfig]:
    """The trees of all grids, in their order; none comes twice."""
    return list(dict.fromkeys(tree for grid in grids for tree in grid.build()))
