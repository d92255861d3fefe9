"""What a decode step launches and moves on a GPU, by the compiled program, and what that takes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pallas_kernels.aot import Compilation
from pallas_kernels.launches import Launch, step_launches
from pallas_kernels.tree_attention.reference import BLOCK
from redrafter_jax.sampling import FILTERS, NOISE

# What rows ask for, by the scopes whose branches they take.
ROWS = {"greedy": (), "sampled": (NOISE,), "filtered": (NOISE, FILTERS)}
# Layers of the program that is compared with the whole one.
FEW = 2


class Both(NamedTuple):
    """A program compiled with all L layers, and with another number of them."""

    whole: Compilation
    layers: int
    other: Compilation
    other_layers: int


def compile_both(
    layers: int, compile_layers: Callable[[int], Compilation], context_layers: Sequence[int] = ()
) -> Both:
    """Compile a program with L layers, and with others: they differ by what a layer launches.

    The others are few, but hold the layers whose hidden states a drafter reads.
    """
    few = max(FEW, *(layer + 1 for layer in context_layers), 0)
    other = few if few < layers else layers + 1
    return Both(compile_layers(layers), layers, compile_layers(other), other)


def count_step(
    both: Both, least_bytes: int, bandwidth: float, launch_microseconds: float, slots: int
) -> dict[str, dict[str, Any]]:
    """For rows of each kind launches, bytes, and the time that these would take.

    Args:
      both: the decode loop.
      least_bytes: that a step must move.
      bandwidth: of the GPU's memory, bytes per second.
      launch_microseconds: between two launches that depend on each other.
      slots: S, all of which attention reads; XLA's own in blocks, in a loop.
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
    """How many there are, and the bytes that they read and write."""
    moved = sum(one.times * (one.reads + one.writes) for one in launches)
    return sum(one.times for one in launches), moved


def list_launches(compiled: Compilation, slots: int) -> list[dict[str, Any]]:
    """The launches of a greedy step, in the order of the program, as a report has them."""
    return [one._asdict() for one in step_launches(compiled.hlo, (), -(-slots // BLOCK))]
