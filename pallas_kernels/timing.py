"""Timing tools of the benchmarks: repetition within one program, and timers that take turns.

Launching a program from Python takes as long as a small kernel runs, so the timed work runs in a
loop inside the program. The loop's trip count is constant, so the GPU does not wait for the host.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

Carry = TypeVar("Carry")
Name = TypeVar("Name", bound=Hashable)


def repeat(
    turn: Callable[[Carry, Int[Array, ""]], Carry], carry: Carry, count: int, zero: Int[Array, ""]
) -> Carry:
    """Run `turn` `count` times in a loop that XLA can neither shorten nor hoist work out of.

    Every turn gets a 0 that XLA cannot prove to be constant: the loop index masked by an argument
    of the program. Work that depends on this 0 is repeated in every turn. (An optimization barrier
    does not suffice: XLA for CPUs drops barriers before it hoists code out of loops.)

    Args:
      turn: function from the carry and the 0 to the next carry, which must depend on the timed
        work.
      carry: pytree of arrays.
      count: number of turns, a constant of the program.
      zero: the number 0, which must be an argument of the program and not a constant.
    """
    return jax.lax.fori_loop(0, count, lambda index, carry: turn(carry, index & zero), carry)


def empty_like(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return zeros in the shapes and dtypes of the function's results, for an initial carry."""
    shapes = jax.eval_shape(function, *arguments)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def take_turns(
    timers: Mapping[Name, Callable[[], float]], repeats: int
) -> Iterator[tuple[Name, float]]:
    """Yield the seconds of every timer once per repeat, in a different order each time.

    A slow moment of the machine then affects all timers, and no timer always follows the same one.
    """
    names = list(timers)
    for repeat in range(repeats):
        for index in np.random.default_rng(repeat).permutation(len(names)):
            yield names[index], timers[names[index]]()
