"""The contract of tree attention; every implementation must pass all of it.

An implementation joins by its name in `IMPLEMENTATIONS`, with what it takes. The kernel has more
tests of its own in test_tree_attention_mosaic.py.
"""

import re
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

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


class Implementation(NamedTuple):
    """Arrays that it takes, and how near it comes to float64."""

    name: str
    dtype: Any
    head_dim: int
    tolerance: float


IMPLEMENTATIONS = [
    Implementation("reference", np.float32, 16, 2e-5),
    Implementation("mosaic_gpu_interpret", jnp.bfloat16, 64, 3e-2),
]
REFERENCE, INTERPRETER = IMPLEMENTATIONS

attend = jax.jit(tree_attention, static_argnames=("implementation", "scale", "window"))


@pytest.fixture(
    params=[REFERENCE, pytest.param(INTERPRETER, marks=pytest.mark.long)],
    ids=lambda implementation: implementation.name,
)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return request.param


def random_inputs(
    nodes: int, group: int, implementation: Implementation = REFERENCE
) -> dict[str, Any]:
    """Three rows, two key/value heads, a random tree each."""
    _, dtype, head_dim, _ = implementation
    return draw_inputs(Case(LENGTHS, nodes, group, S, head_dim, 2, dtype), garbage=None)


@cache
def usual_output(implementation: Implementation) -> np.ndarray:
    """Of `random_inputs(7, 2, implementation)`."""
    inputs = random_inputs(7, 2, implementation)
    return np.asarray(attend(**inputs, scale=SCALE, implementation=implementation.name))


def assert_equals(out: Any, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(("nodes", "group"), [(1, 1), (7, 2), (33, 4)])
@pytest.mark.parametrize("window", [10**6, 1, 10, S + 2])
def test_equals_attention_query_by_query(nodes: int, group: int, window: int) -> None:
    inputs = random_inputs(nodes, group)
    out = attend(**inputs, scale=SCALE, window=window, implementation="reference")
    assert_equals(out, expected_output(inputs, SCALE, window), 2e-5)


def test_a_window_past_every_position_is_none() -> None:
    """Then a kernel that knows no windows can run."""
    inputs = {key: jnp.asarray(value) for key, value in random_inputs(7, 2).items()}

    def program(window: int | None) -> str:
        return str(jax.make_jaxpr(partial(tree_attention, scale=SCALE, window=window))(**inputs))

    assert program(S + 7) == program(None)
    assert program(S + 6) != program(None)


def test_a_window_sees_at_least_the_node_itself() -> None:
    inputs = random_inputs(7, 2)
    with pytest.raises(ValueError, match=r"^tree_attention: window is 0, but a node sees at least"):
        attend(**inputs, scale=SCALE, window=0)


# numpy, which multiplies in the interpreter, warns of scores that the length then hides.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(
    ("implementation", "garbage"),
    [
        *product([REFERENCE], [np.nan, np.inf, -np.inf]),
        (INTERPRETER, np.nan),
        pytest.param(INTERPRETER, np.inf, marks=pytest.mark.long),
    ],
    indirect=["implementation"],
)
def test_garbage_past_the_lengths_is_never_read(
    implementation: Implementation, garbage: float
) -> None:
    inputs = random_inputs(7, 2, implementation)
    past_length = np.arange(S)[None, None, :, None] >= inputs["lengths"][:, None, None, None]
    dirty = inputs | {
        name: np.where(past_length, garbage, inputs[name]).astype(implementation.dtype)
        for name in ("k_cache", "v_cache")
    }
    out = attend(**dirty, scale=SCALE, implementation=implementation.name)
    np.testing.assert_array_equal(out, usual_output(implementation))
    assert_equals(out, expected_output(inputs, SCALE), implementation.tolerance)


@pytest.mark.parametrize("window", [None, 10])
def test_garbage_of_one_row_changes_no_bit_of_any(window: int | None) -> None:
    inputs = random_inputs(7, 2)
    dirty = inputs | {"v_cache": inputs["v_cache"].copy()}
    dirty["v_cache"][2, 1, 40, 3] = np.nan  # row 2 has 13 tokens
    clean_output, dirty_output = (
        attend(**arrays, scale=SCALE, window=window, implementation="reference")
        for arrays in (inputs, dirty)
    )
    np.testing.assert_array_equal(clean_output, dirty_output)


def test_the_cache_is_read_and_not_copied() -> None:
    """Clearing garbage is left to the branch that is taken where a NaN came through."""
    inputs = random_inputs(7, 2)
    program = attend.lower(**inputs, scale=SCALE, implementation="reference").compile()
    entry = (program.as_text() or "").partition("\nENTRY")[2]
    made_by = set(re.findall(r"= f32\[3,2,80,16\]\S* ([\w-]+)\(", entry))
    assert made_by == {"parameter"}


@pytest.mark.parametrize("nodes", [1, 33])
def test_bfloat16_goes_in_and_comes_out(implementation: Implementation, nodes: int) -> None:
    inputs = random_inputs(nodes, 2, implementation._replace(dtype=jnp.bfloat16))
    out = attend(**inputs, scale=SCALE, implementation=implementation.name)
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
    inputs = {key: jnp.asarray(value) for key, value in random_inputs(7, 2).items()}
    inputs[name] = jnp.zeros(shape, inputs[name].dtype)
    with pytest.raises(ValueError, match=f"^tree_attention: .*{re.escape(words)}"):
        tree_attention(**inputs, scale=SCALE, window=None, implementation=None)
