"""What is timed stays in its loop, as often as asked, and timers take turns."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.timing import repeat, take_turns

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
ZERO = jax.ShapeDtypeStruct((), jnp.int32)
Turn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@pytest.mark.parametrize(
    ("turn", "stays"),
    [
        pytest.param(lambda carry, x, none: (x + none) @ x, True, id="the product needs the zero"),
        pytest.param(lambda carry, x, none: carry @ x, True, id="the product needs the carry"),
        # What the tool is for: this product is the same in every turn, and XLA sees it.
        pytest.param(lambda carry, x, none: x @ x, False, id="the product needs neither"),
    ],
)
def test_what_needs_the_zero_stays_in_the_loop(turn: Turn, stays: bool) -> None:
    @jax.jit
    def run(carry: jax.Array, x: jax.Array, zero: jax.Array) -> jax.Array:
        return repeat(lambda carry, none: turn(carry, x, none), carry, 100, zero)

    hlo = run.lower(X, X, ZERO).compile().as_text() or ""
    assert multiplies_outside(hlo) != stays


def multiplies_outside(hlo: str) -> bool:
    """Whether the program multiplies matrices before or after its loop."""
    entry = hlo[hlo.index("\nENTRY") :]
    assert " while(" in entry
    called = re.findall(r"(?:calls|to_apply)=%([\w.]+)", entry)
    bodies = [re.search(rf"\n%{re.escape(name)} .*?\n}}", hlo, re.DOTALL) for name in called]
    return " dot(" in entry or any(body is not None and " dot(" in body[0] for body in bodies)


def test_in_every_repeat_all_run_once_and_none_always_follows_the_same_one() -> None:
    ran: list[str] = []

    def timer(name: str) -> Any:
        return lambda: ran.append(name) or float(len(ran))

    names = "abcdefghijk"
    taken = list(take_turns({name: timer(name) for name in names}, repeats=9))
    repeats = [ran[place : place + 11] for place in range(0, 99, 11)]
    assert all("".join(sorted(repeat)) == names for repeat in repeats)
    for name in names:
        before = {ran[place - 1] for place, other in enumerate(ran) if place and other == name}
        assert len(before) > 3
    assert taken == [(name, place) for place, name in enumerate(ran, start=1)]
