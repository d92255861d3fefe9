"""The file `draft.yaml` in a drafter's folder: the fastest tree per batch size and temperature.

`python -m eval tune` measures the trees and writes the file. Its values hold for the device that
the file names.
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
# The baseline is decoding without the drafter. For each batch size and temperature:
# - tree: the fastest tree; null if no tree was faster than the baseline;
# - predicted_speedup: tokens that a target call gains, divided by the measured cost of a step in
#   baseline steps;
# - measured_speedup: the measured speed, divided by the baseline's;
# - acceptance_length: tokens that a target call gained in that measurement.
# `redrafter_jax.load_tree` reads this file. So do `tree: auto` in the settings of `python -m eval`,
# and `generate`, `chat` and `serve` without options for the tree. They use the entries of the
# batch size nearest to their own by ratio (of two equally near, the larger), and among these the
# entry of the nearest temperature.
"""


@dataclass(frozen=True)
class TunedTree(Checked):
    """The fastest tree for one batch size and temperature.

    Attributes:
      batch_size: number of rows that decode together.
      temperature: the sampling temperature; 0 is greedy.
      tree: the tree; None if no tree was faster than decoding without the drafter.
      predicted_speedup: acceptance length divided by the measured cost of a step with the tree; the
        cost is in steps without drafting. 1 without a tree.
      measured_speedup: measured speed divided by the speed without the drafter; 1 without a tree.
      acceptance_length: tokens per target call when `measured_speedup` was measured; None if
        unknown.
    """

    batch_size: Count
    temperature: Annotated[float, Ge(0)]
    tree: TreeConfig | None
    predicted_speedup: Positive
    measured_speedup: Positive
    acceptance_length: Positive | None = None


@dataclass(frozen=True)
class TreeTable(Checked):
    """The contents of a `draft.yaml`.

    Attributes:
      device: name of the device on which the trees were measured.
      dtype: dtype of both models' parameters in the measurements.
      trees: the fastest trees, at least one.
    """

    device: str
    dtype: str
    trees: tuple[TunedTree, ...]

    def nearest(self, batch_size: int, temperature: float) -> TunedTree:
        """The entry of the nearest batch size, and among several, of the nearest temperature.

        Batch sizes are compared by ratio, because the cost of a step grows in proportion to them.
        Of two equally near batch sizes, the larger is taken, because trees gain less there. Of two
        equally near temperatures, the lower is taken.
        """
        sizes = {tree.batch_size for tree in self.trees}
        size = min(sizes, key=lambda size: (abs(math.log(size / batch_size)), -size))
        own = [tree for tree in self.trees if tree.batch_size == size]
        return min(own, key=lambda t: (abs(t.temperature - temperature), t.temperature))


def load_tree(
    drafter: str | Path, batch_size: int = 1, temperature: float = 0.0
) -> TreeConfig | None:
    """Load the tree that `python -m eval tune` found fastest, from the `draft.yaml` of a drafter.

    `generate` uses this tree in every step. With the whole table of `load_tree_table` instead,
    `generate` decodes without drafting while no tree is faster.

    Args:
      drafter: folder or hub id of the drafter, as `load_drafter` takes it.
      batch_size: number of rows that will decode together; the nearest batch size in the file, by
        ratio, is used.
      temperature: sampling temperature; the nearest one in the file is used.

    Returns:
      The tree; None if no tree was faster than decoding without the drafter. In this case call
      `generate(target, None, ...)`.

    Raises:
      InputError: `draft.yaml` is missing or cannot be used.
    """
    return load_tree_table(drafter).nearest(batch_size, temperature).tree


def load_tree_table(drafter: str | Path) -> TreeTable:
    """Load the fastest trees by batch size and temperature, from the `draft.yaml` of a drafter.

    `generate`, `stream` and the engine take the table as `tree`. Each step then uses the tree for
    the number of decoding rows, or drafts nothing while no tree is faster.

    Args:
      drafter: folder or hub id of the drafter, as `load_drafter` takes it.

    Raises:
      InputError: `draft.yaml` is missing or cannot be used.
    """
    table = find_tree_table(drafter)
    if table is None:
        raise InputError(
            f"{drafter} has no {TREE_TABLE}, the file with its fastest trees; write this file with "
            "`python -m eval tune`, or give a tree."
        )
    return table


def find_tree_table(drafter: str | Path) -> TreeTable | None:
    """Read the table in a drafter's folder or hub repository; None if there is none.

    A drafter without a folder, such as "self:int4", has no table.

    Raises:
      InputError: the file cannot be read, or does not hold a table of trees.
    """
    # Imported here, because it imports the drafters' modules.
    from redrafter_jax.drafters.self_drafter import parse_self

    if parse_self(str(drafter)) is not None:
        return None
    path = locate(drafter) / TREE_TABLE
    if not path.exists():
        return None
    # Importing YAML takes 20 ms, and few commands need it.
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
    """Write the table with a comment that explains it; an existing file is replaced.

    Raises:
      InputError: the file cannot be written.
    """
    import yaml

    text = yaml.safe_dump(asdict(table), sort_keys=False, allow_unicode=True)
    try:
        write_atomically(path, _HEADER + text)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from None
