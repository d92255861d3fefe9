"""Grids of trees: every combination of some fields' values."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from redrafter_jax.config import DraftConfig
from redrafter_jax.settings.sections import BuildableSettings


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


type Values[T] = Annotated[list[T], BeforeValidator(_as_list), Field(min_length=1)]


class TreeGrid(BuildableSettings):
    """Trees of every combination of these fields of `DraftConfig`, each a value or a list of them.

    The first field changes last.
    """

    beam_width: Values[int] = [DraftConfig.beam_width]
    draft_rounds: Values[int] = [DraftConfig.draft_rounds]
    final_beams_only: Values[bool] = [DraftConfig.final_beams_only]
    rerank: Values[bool] = [DraftConfig.rerank]
    lookup_tokens: Values[int] = [DraftConfig.lookup_tokens]
    num_nodes: Values[int | None] = [DraftConfig.num_nodes]
    sharpness: Values[float] = [DraftConfig.sharpness]

    def build(self) -> list[DraftConfig]:
        """The library's configuration of every tree, its budget written out; none comes twice."""
        names, values = zip(*self, strict=True)
        trees = (DraftConfig(**dict(zip(names, one, strict=True))) for one in product(*values))
        return list(dict.fromkeys(_plain(tree) for tree in trees))


def _plain(tree: DraftConfig) -> DraftConfig:
    """The same tree with its budget as `num_nodes`, and `rerank` only if it adds extensions."""
    rerank = tree.extensions > tree.beam_width
    return replace(tree, num_nodes=tree.budget, rerank=rerank)


def build_all(grids: Iterable[TreeGrid]) -> list[DraftConfig]:
    """The trees of all grids, in their order; none comes twice."""
    return list(dict.fromkeys(tree for grid in grids for tree in grid.build()))
