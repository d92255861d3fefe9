"""Grids of draft trees in settings, and the fields that identify trees in tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from redrafter_jax.config import TreeConfig
from redrafter_jax.settings.sections import BuildableSettings

# The fields that identify a tree, with their column names in tables.
TREE = {
    "beam_width": "W",
    "draft_rounds": "R",
    "num_nodes": "N",
    "lookup_tokens": "C",
    "sharpness": "sharp",
    "final_beams_only": "final",
    "rerank": "rerank",
    "candidates": "cand",
    "static_tree": "static",
    "mean_nodes": "mean",
}


def tree_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the columns, by field, that distinguish the trees of `rows` in a table.

    These are the sizes, whose column names are one letter, and all other fields that differ.
    """
    differs = {name: len({row[name] for row in rows}) > 1 for name in TREE}
    return {name: word for name, word in TREE.items() if differs[name] or len(word) == 1}


def _as_list(value: Any) -> Any:
    if value == []:
        raise PydanticCustomError("empty", "Input should be a value or a list of them")
    return value if isinstance(value, list) else [value]


def _as_tuples(value: Any) -> Any:
    # The value has lists here, which pydantic does not accept as tuples.
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _as_static_tree(value: Any, handle: Callable[[Any], Any]) -> Any:
    try:
        return handle(_as_tuples(value))
    except ValidationError:  # pydantic's own error would have a line per type of the union
        raise PydanticCustomError(
            "static_tree", "Input should be true, false or paths such as [[0], [1], [0, 0]]"
        ) from None


type Values[T] = Annotated[list[T], BeforeValidator(_as_list)]


class TreeGrid(BuildableSettings):
    """A grid of trees: every combination of the given values of `TreeConfig` fields.

    Each field is a value or a list of values; only `static_tree` is always a single value. The
    first field varies slowest.
    """

    beam_width: Values[int] = [TreeConfig.beam_width]
    draft_rounds: Values[int] = [TreeConfig.draft_rounds]
    final_beams_only: Values[bool] = [TreeConfig.final_beams_only]
    rerank: Values[bool] = [TreeConfig.rerank]
    candidates: Values[int | None] = [TreeConfig.candidates]
    lookup_tokens: Values[int] = [TreeConfig.lookup_tokens]
    num_nodes: Values[int | None] = [TreeConfig.num_nodes]
    sharpness: Values[float] = [TreeConfig.sharpness]
    mean_nodes: Values[int | None] = [TreeConfig.mean_nodes]
    static_tree: Annotated[bool | tuple[tuple[int, ...], ...], WrapValidator(_as_static_tree)] = (
        TreeConfig.static_tree
    )

    def build(self) -> list[TreeConfig]:
        """Build the distinct trees of the grid, normalized by `with_budget`."""
        lists = {name: value if isinstance(value, list) else [value] for name, value in self}
        trees = (
            TreeConfig(**dict(zip(lists, one, strict=True))) for one in product(*lists.values())
        )
        return list(dict.fromkeys(map(with_budget, trees)))


def with_budget(tree: TreeConfig) -> TreeConfig:
    """Normalize a tree, so that equal trees have equal fields.

    `num_nodes` becomes the number of nodes N, and `rerank` is set only if it has an effect. A tree
    of given paths is unchanged.
    """
    if isinstance(tree.static_tree, tuple):  # its paths are its nodes
        return tree
    rerank = tree.extensions > tree.beam_width
    return replace(tree, num_nodes=tree.budget, rerank=rerank)


def build_all(grids: Iterable[TreeGrid]) -> list[TreeConfig]:
    """Build the distinct trees of all grids, in order."""
    return list(dict.fromkeys(tree for grid in grids for tree in grid.build()))
