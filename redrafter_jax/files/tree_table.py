"""`draft.yaml` of a drafter's folder: the fastest tree for each batch size and temperature.

`python -m eval tune` measures and writes it. Its values hold for the device that it names.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from redrafter_jax.config import TreeConfig
from redrafter_jax.config.limits import Checked, Count, Positive, read_config
from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import read_text, write_atomically
from redrafter_jax.files.locate import TREE_TABLE, locate

_HEADER = """\
# How this drafter's trees are drafted fastest, as `python -m eval tune` measured it on one device.
# For each batch size and temperature: the tree, or null where none was faster than the baseline,
# decoding without the drafter; its speed-up over the baseline: as predicted, the tokens that a
# target call gains over what a step was measured to cost in baseline steps, and as measured; and
# these tokens.
# Read by `redrafter_jax.load_tree`, by `tree: auto` in the settings of `python -m eval`, and by
# `generate`, `chat` and `serve` without options for the tree: the batch size that is nearest to
# theirs by ratio, of two as near the larger; of it the nearest temperature.
"""


@dataclass(frozen=True)
class TunedTree(Checked):
    """The choice for one batch size and temperature.

    Attributes:
      batch_size: rows decoded together.
      temperature: at which their tokens are chosen; 0 is greedy.
      tree: how trees are drafted; None where nothing beat decoding without the drafter.
      predicted_speedup: acceptance length over the measured cost of a step in baseline steps; 1
        for None.
      measured_speedup: of real decoding; 1 for None.
      acceptance_length: tokens that a target call gained then; None where it is not stated.
    """

    batch_size: Count
    temperature: Annotated[float, Ge(0)]
    tree: TreeConfig | None
    predicted_speedup: Positive
    measured_speedup: Positive
    acceptance_length: Positive | None = None


@dataclass(frozen=True)
class TreeTable(Checked):
    """What `draft.yaml` holds.

    Attributes:
      device: on which the trees were measured.
      dtype: of both models' parameters then.
      trees: at least one.
    """

    device: str
    dtype: str
    trees: tuple[TunedTree, ...]

    def nearest(self, batch_size: int, temperature: float) -> TunedTree:
        """Of the nearest batch size the nearest temperature.

        Batch sizes are compared by their ratio, for a step's cost grows in proportion; of two as
        near the larger is taken, at which trees pay less, and of two temperatures the lower.
        """
        sizes = {tree.batch_size for tree in self.trees}
        size = min(sizes, key=lambda size: (abs(math.log(size / batch_size)), -size))
        own = [tree for tree in self.trees if tree.batch_size == size]
        return min(own, key=lambda t: (abs(t.temperature - temperature), t.temperature))


def load_tree(
    drafter: str | Path, batch_size: int = 1, temperature: float = 0.0
) -> TreeConfig | None:
    """The tree that `python -m eval tune` found fastest for a drafter, from its `draft.yaml`.

    `generate` keeps to this tree. With the whole table, from `load_tree_table`, it goes back to
    plain decoding where none pays.

    Args:
      drafter: the folder or hub id that `load_drafter` takes.
      batch_size: rows that will be decoded together; the table's nearest one by ratio is taken.
      temperature: of the sampling; the table's nearest one is taken.

    Returns:
      How to draft; None where no tree was faster than the baseline: decode without the drafter,
      `generate(target, None, ...)`.

    Raises:
      InputError: there is no such file, or it cannot be used.
    """
    return load_tree_table(drafter).nearest(batch_size, temperature).tree


def load_tree_table(drafter: str | Path) -> TreeTable:
    """The fastest trees of a drafter by batch size and temperature, from its `draft.yaml`.

    As `tree` of `generate`, `stream` and the engine it gives each step the tree for the rows that
    decode, and plain decoding where none pays for the text at hand.

    Args:
      drafter: the folder or hub id that `load_drafter` takes.

    Raises:
      InputError: there is no such file, or it cannot be used.
    """
    table = find_tree_table(drafter)
    if table is None:
        raise InputError(
            f"{drafter} has no {TREE_TABLE}, which holds the tree for tree: auto; write one with "
            "`python -m eval tune`, or state the tree."
        )
    return table


def find_tree_table(drafter: str | Path) -> TreeTable | None:
    """The table of a drafter's folder or hub repository; None if there is none, or no folder.

    Raises:
      InputError: the file cannot be read, or does not hold such a table.
    """
    # With the models that draft, for those who name a drafter.
    from redrafter_jax.drafters.self_drafter import parse_self

    if parse_self(str(drafter)) is not None:
        return None
    path = locate(drafter) / TREE_TABLE
    if not path.exists():
        return None
    # YAML takes 20 ms to import, for the few who need it.
    from redrafter_jax.files.yaml_text import NotYamlError, parse_yaml

    try:
        values = parse_yaml(read_text(path), aliases=False)
    except NotYamlError as error:
        raise InputError(f"{path} is not valid YAML: {error}.") from None
    table = read_config(TreeTable, values, path)
    if not table.trees:
        raise InputError(f"{path} states no trees; delete it, or run `python -m eval tune` again.")
    return table


def write_tree_table(path: Path, table: TreeTable) -> None:
    """Write the table for people and for `find_tree_table`, in place of one that is there.

    Raises:
      InputError: the file cannot be written.
    """
    import yaml

    text = yaml.safe_dump(asdict(table), sort_keys=False, allow_unicode=True)
    try:
        write_atomically(path, _HEADER + text)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from None
