"""Tree attention: the reference, and what is refused; test_tree_attention_mosaic.py: the kernel."""

import re
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.fuser  # its import, by the first kernel, would empty jit's caches
import jax.numpy as jnp
import numpy as np
import pytest
from attention_arrays import Case, expected_output
from attention_arrays import random_inputs as draw_inputs

from pallas_kernels.tree_attention import tree_attention

S = 80
LENGTHS = (0, S, 13)
SCALE = 0.3


attend = jax.jit(
    partial(tree_attention, scale=SCALE, implementation="reference"), static_argnames="window"
)


def random_inputs(
    nodes: int, group: int, dtype: Any = np.float32, garbage: float | None = None
) -> dict[str, Any]:
    """Three rows, two key/value heads, a random tree each."""
    return draw_inputs(Case(LENGTHS, nodes, group, S, 16, 2, dtype), garbage)


@pytest.mark.parametrize(("nodes", "group"), [(1, 1), (7, 2), (33, 4)])
@pytest.mark.parametrize("window", [10**6, 1, 10, S + 2])
def test_equals_attention_query_by_query(nodes: int, group: int, window: int) -> None:
    inputs = random_inputs(nodes, group)
    expected = expected_output(inputs, SCALE, window)
    np.testing.assert_allclose(attend(**inputs, window=window), expected, rtol=2e-5, atol=2e-5)


def test_a_window_past_every_position_is_none() -> None:
    """Then a kernel that knows no windows can run."""
    inputs = random_inputs(7, 2)

    def program(window: int | None) -> str:
        return str(jax.make_jaxpr(partial(tree_attention, scale=SCALE, window=window))(**inputs))

    assert program(S + 7) == program(None)
    assert program(S + 6) != program(None)


def test_a_window_sees_at_least_the_node_itself() -> None:
    inputs = random_inputs(7, 2)
    with pytest.raises(ValueError, match=r"^tree_attention: window is 0, but a node sees at least"):
        attend(**inputs, window=0)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_past_the_lengths_changes_no_bit(garbage: float, window: int | None) -> None:
    clean, dirty = (random_inputs(7, 2, garbage=slots) for slots in (None, garbage))
    np.testing.assert_array_equal(attend(**dirty, window=window), attend(**clean, window=window))


def test_the_cache_is_read_and_not_copied() -> None:
    """Clearing garbage is left to the branch that is taken where a NaN came through."""
    program = attend.lower(**random_inputs(7, 2)).compile()
    entry = (program.as_text() or "").partition("\nENTRY")[2]
    made_by = set(re.findall(r"= f32\[3,2,80,16\]\S* ([\w-]+)\(", entry))
    assert made_by == {"parameter"}


@pytest.mark.parametrize("nodes", [1, 33])
def test_bfloat16_goes_in_and_comes_out(nodes: int) -> None:
    inputs = random_inputs(nodes, 2, jnp.bfloat16)
    out = attend(**inputs)
    assert out.dtype == jnp.bfloat16
    difference = np.abs(np.asarray(out, np.float64) - expected_output(inputs, SCALE))
    assert difference.max() < 3e-2
    # Rounding inputs and output only: accumulation in bfloat16 would be several times this.
    assert difference.mean() < 2e-3


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("q", (3, 7, 64), "q has shape (3, 7, 64), not 4 axes."),
        ("k_cache", (3, S, 2), "k_cache has shape (3, 80, 2), not 4 axes."),
        ("v_cache", (3, 2, S + 1, 16), "(3, 2, 81, 16), but q (3, 7, 4, 16) and k_cache"),
        ("lengths", (2,), "lengths has shape (2,)"),
        ("k_tree", (3, 6, 2, 16), "ask for (3, 7, 2, 16)."),
        ("mask", (7, 7), "mask has shape (7, 7)"),
        ("q", (3, 7, 3, 16), "2 key heads do not divide 3 query heads."),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    inputs = random_inputs(7, 2)
    inputs[name] = jnp.zeros(shape, inputs[name].dtype)
    with pytest.raises(ValueError, match=f"^tree_attention: .*{re.escape(words)}"):
        tree_attention(**inputs, scale=SCALE, window=None, implementation=None)
