"""Kernel launches and memory traffic of a decode step on a GPU, from its compiled program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pallas_kernels.aot import Compilation
from pallas_kernels.launches import Launch, step_launches
from pallas_kernels.tree_attention.reference import BLOCK
from redrafter_jax.sampling import FILTERS, NOISE

# Scopes of the compiled branches that rows of each kind take.
ROWS = {"greedy": (), "sampled": (NOISE,), "filtered": (NOISE, FILTERS)}
# Number of layers of the small program that is compared with the whole one.
FEW = 2


class Both(NamedTuple):
    """A program that is compiled twice, for two numbers of target layers.

    Attributes:
      whole: the program with all layers.
      layers: L, the number of all layers.
      other: the program with another number of layers.
      other_layers: this other number.
    """

    whole: Compilation
    layers: int
    other: Compilation
    other_layers: int


def compile_both(
    layers: int, compile_layers: Callable[[int], Compilation], context_layers: Sequence[int] = ()
) -> Both:
    """Compile a program with all target layers, and with another number of layers.

    The difference between the programs shows the launches of a layer.

    Args:
      layers: L, the number of all layers.
      compile_layers: function from a number of layers to the compiled program.
      context_layers: layers whose outputs the drafter reads; the other program includes them.
    """
    few = max(FEW, *(layer + 1 for layer in context_layers), 0)
    other = few if few < layers else layers + 1
    return Both(compile_layers(layers), layers, compile_layers(other), other)


def count_step(
    both: Both, least_bytes: int, bandwidth: float, launch_microseconds: float, slots: int
) -> dict[str, dict[str, Any]]:
    """Count launches and moved bytes of a decode step, and estimate its time.

    Args:
      both: the compiled decode loop.
      least_bytes: minimum number of bytes that a step must move.
      bandwidth: memory bandwidth of the GPU, in bytes per second.
      launch_microseconds: time between two dependent launches.
      slots: S, number of cache slots per row. Attention reads all of them, and XLA's attention
        loops over blocks of slots.

    Returns:
      The measures for each kind of rows: greedy, sampled and filtered; see `eval.plan.DEFINITIONS`.
    """
    counts, blocks = {}, -(-slots // BLOCK)
    for rows, taken in ROWS.items():
        launches, moved = total(step_launches(both.whole.hlo, taken, blocks))
        others, moved_by_others = total(step_launches(both.other.hlo, taken, blocks))
        more = both.layers - both.other_layers
        layer = (launches - others) / more
        waited = launches * launch_microseconds / 1000
        counts[rows] = {
            "launches": launches,
            "launches_in_a_layer": layer,
            "launches_outside": launches - both.layers * layer,
            "moved_bytes": moved,
            "moved_bytes_in_a_layer": (moved - moved_by_others) / more,
            "moved_over_least": moved / least_bytes,
            "milliseconds": 1000 * moved / bandwidth + waited,
        }
    return counts


def total(launches: Sequence[Launch]) -> tuple[int, int]:
    """Return the number of launches, and the number of bytes that the launches read and write."""
    moved = sum(one.times * (one.reads + one.writes) for one in launches)
    return sum(one.times for one in launches), moved


def list_launches(compiled: Compilation, slots: int) -> list[dict[str, Any]]:
    """Return the launches of a greedy step in program order, as dictionaries for a report."""
    return [one._asdict() for one in step_launches(compiled.hlo, (), -(-slots // BLOCK))]
