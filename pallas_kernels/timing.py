"""What a benchmark needs: the same work many times in one program, and timers that take turns.

Launching a program from Python takes as long as a small kernel runs, so what is timed is in a loop
inside the program, of a constant number of turns: the GPU need not ask the host for the next one.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

# Bytes of the array that is copied, and of what one timed run reads and writes.
COPIED, RUN = 2**30, 32 * 10**9

Carry = TypeVar("Carry")
Name = TypeVar("Name", bound=Hashable)


def repeat(
    turn: Callable[[Carry, Int[Array, ""]], Carry], carry: Carry, count: int, zero: Int[Array, ""]
) -> Carry:
    """The carry after `count` turns, of which XLA can move nothing out of the loop, nor drop any.

    A turn is given 0 as a number that XLA must take to differ from turn to turn: the turn's own
    number masked by an argument of the program. All that is computed from it is computed in every
    turn. (A barrier would not do: on the CPU XLA drops it before it moves code out of loops.)

    Args:
      turn: from the carry and the 0 to the next carry; what is to be timed must end up in there.
      carry: pytree of arrays.
      count: turns, a constant of the program.
      zero: the number 0, an argument of the program and no constant.
    """
    return jax.lax.fori_loop(0, count, lambda index, carry: turn(carry, index & zero), carry)


def empty_like(function: Callable[..., Any], *arguments: Any) -> Any:
    """Zeros in the shapes that the function returns: a first carry that no turn reads."""
    shapes = jax.eval_shape(function, *arguments)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def interleave(
    timers: Mapping[Name, Callable[[], float]], repeats: int
) -> dict[Name, Float[np.ndarray, " repeats"]]:
    """Seconds of every timer in every repeat; see `take_turns`."""
    seconds: dict[Name, list[float]] = {name: [] for name in timers}
    for name, taken in take_turns(timers, repeats):
        seconds[name].append(taken)
    return {name: np.asarray(times) for name, times in seconds.items()}


def take_turns(
    timers: Mapping[Name, Callable[[], float]], repeats: int
) -> Iterator[tuple[Name, float]]:
    """Every timer's seconds, all of them once in a repeat, each time in another order.

    A slow moment of the machine then hits all of them, and none always follows the same one.
    """
    names = list(timers)
    for repeat in range(repeats):
        for place in np.random.default_rng(repeat).permutation(len(names)):
            yield names[place], timers[names[place]]()


def beside_copy(
    timers: dict[str, Callable[[], float]], size: int, calls: int, repeats: int
) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """What each timer's calls take, and the rate at which they read, beside that of a copy.

    Args:
      timers: of runs of `calls` calls.
      size: bytes that a call reads.
      calls: in a run.
      repeats: of all timers and of the copy, in turns.

    Returns:
      By timer "microseconds" of a call (quartiles), "gigabytes_per_second" (of the median) and
      "share_of_copy" (quartiles); and the quartiles of the copy's own rate.
    """
    elements = COPIED // 4
    copies = max(1, round(RUN / (2 * 4 * elements)))
    copy, array = copy_program(copies), [jnp.zeros(elements, jnp.uint32)]

    def copy_again() -> Any:
        """It is given the array that the run before returned: nothing is allocated."""
        array[0] = copy(array[0], jnp.int32(0))
        return array[0]

    seconds = interleave({**timers, "copy": timer(copy_again)}, repeats)
    copy_rates = 2 * 4 * elements * copies / seconds.pop("copy")
    found = {
        name: {
            "microseconds": quartiles(1e6 * times / calls),
            "gigabytes_per_second": size * calls / float(np.median(times)) / 1e9,
            "share_of_copy": quartiles(size * calls / times / copy_rates),
        }
        for name, times in seconds.items()
    }
    return found, quartiles(copy_rates / 1e9)


def copy_program(turns: int) -> Callable[..., UInt[Array, " n"]]:
    """Reads and writes the whole array in every turn; the array is donated."""

    def run(array: UInt[Array, " n"], zero: Int[Array, ""]) -> UInt[Array, " n"]:
        return repeat(
            lambda array, none: array + (none + 1).astype(array.dtype), array, turns, zero
        )

    return jax.jit(run, donate_argnums=0)


def timer(program: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
    """Seconds of one run; compiled and run once here."""

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - started

    run()
    return run


def quartiles(values: np.ndarray) -> list[float]:
    """The lower one, the median and the upper one."""
    return [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))]
