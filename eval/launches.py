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
    """A program compiled with all L layers, and with another number of layers."""

    whole: Compilation
    layers: int
    other: Compilation
    other_layers: int


def compile_both(
    layers: int, compile_layers: Callable[[int], Compilation], context_layers: Sequence[int] = ()
) -> Both:
    """Compile a program with all L layers, and with only a few layers.

    The difference between the programs shows the launches of a layer. The few layers include the
    layers whose hidden states the drafter reads.
    """
    few = max(FEW, *(layer + 1 for layer in context_layers), 0)
    other = few if few < layers else layers + 1
    return Both(compile_layers(layers), layers, compile_layers(other), other)


def count_step(
    both: Both, least_bytes: int, bandwidth: float, launch_microseconds: float, slots: int
) -> dict[str, dict[str, Any]]:
    """Count launches and bytes of a step for each kind of rows, and estimate its time.

    Args:
      both: the compiled decode loop.
      least_bytes: minimum bytes that a step must move.
      bandwidth: memory bandwidth of the GPU, bytes per second.
      launch_microseconds: time between two dependent launches.
      slots: S, number of cache slots. Attention reads all of them, and XLA's attention loops over
        blocks of slots.
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
    """The number of launches, and the number of bytes that they read and write."""
    moved = sum(one.times * (one.reads + one.writes) for one in launches)
    return sum(one.times for one in launches), moved


def list_launches(compiled: Compilation, slots: int) -> list[dict[str, Any]]:
    """The launches of a greedy step in program order, as dictionaries for a report."""
    return [one._asdict() for one in step_launches(compiled.hlo, (), -(-slots // BLOCK))]
