"""What a benchmark needs: the same work many times in one program, and timers that take turns.

Launching a program from Python takes as long as a small kernel runs, so what is timed is in a loop
inside the program, of a constant number of turns: the GPU need not ask the host for the next one.
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
    """Run a turn `count` times; XLA can neither drop a turn nor move work out of the loop.

    Every turn gets a 0 of which XLA cannot know that it is the same in all: the turn's index masked
    by an argument of the program. What is computed from it is computed in every turn. (A barrier
    would not do: on the CPU XLA drops it before it moves code out of loops.)

    Args:
      turn: from the carry and the 0 to the next carry; what is timed must end up in there.
      carry: pytree of arrays.
      count: turns, a constant of the program.
      zero: the number 0, an argument of the program and no constant.
    """
    return jax.lax.fori_loop(0, count, lambda index, carry: turn(carry, index & zero), carry)


def empty_like(function: Callable[..., Any], *arguments: Any) -> Any:
    """Zeros in the shapes that the function returns: a first carry that no turn reads."""
    shapes = jax.eval_shape(function, *arguments)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def take_turns(
    timers: Mapping[Name, Callable[[], float]], repeats: int
) -> Iterator[tuple[Name, float]]:
    """Every timer's seconds, all of them once in a repeat, each time in another order.

    A slow moment of the machine then hits all of them, and none always follows the same one.
    """
    names = list(timers)
    for repeat in range(repeats):
        for index in np.random.default_rng(repeat).permutation(len(names)):
            yield names[index], timers[names[index]]()
