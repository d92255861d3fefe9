"""Tree attention: the reference, and what is refused; test_tree_attention_mosaic.py: the kernel."""

import re
import sys
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.fuser  # its import, by the first kernel, would empty jit's caches
import jax.numpy as jnp
import numpy as np
import pytest
from attention_arrays import Case, expected_output, newest, paged
from attention_arrays import random_inputs as draw_inputs

from pallas_kernels.tree_attention import PAGE, tree_attention
from pallas_kernels.tree_attention.reference import BLOCK, reference
from redrafter_jax.models.cache import slots_of

S = 80
LENGTHS = (0, S, 13)
SCALE = 0.3


_attend = jax.jit(
    partial(tree_attention, scale=SCALE, implementation="reference"), static_argnames="window"
)


def attend(window: int | None = None, **inputs: Any) -> jax.Array:
    """The reference on a cache [B K S H], whose pages lie anywhere."""
    return _attend(**paged(inputs), window=window)


def random_inputs(
    nodes: int, group: int, dtype: Any = np.float32, garbage: float | None = None
) -> dict[str, Any]:
    """Three rows, two key/value heads, a random tree each."""
    return draw_inputs(Case(LENGTHS, nodes, group, S, 16, 2, dtype), garbage)


def inputs_of(slots: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Three rows of so many tokens in so many slots."""
    return draw_inputs(Case(lengths, 7, 2, slots, 16, 2, np.float32))


@pytest.mark.parametrize(("nodes", "group"), [(1, 1), (7, 2), (33, 4)])
@pytest.mark.parametrize("window", [10**6, 1, 10, S + 2])
def test_equals_attention_query_by_query(nodes: int, group: int, window: int) -> None:
    inputs = random_inputs(nodes, group)
    expected = expected_output(inputs, SCALE, window)
    np.testing.assert_allclose(attend(**inputs, window=window), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("attending", [1, 4, 32])
@pytest.mark.parametrize("window", [10**6, 1, 3, 10, S + 2])
def test_of_a_tree_that_grows_the_newest_nodes_attend(attending: int, window: int) -> None:
    inputs = random_inputs(33, 2)
    expected = expected_output(inputs, SCALE, window)[:, -attending:]
    output = attend(**newest(inputs, attending), window=window)
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)


def test_a_window_past_every_position_is_none() -> None:
    """Then a kernel that knows no windows can run."""
    inputs = random_inputs(7, 2)

    def program(window: int | None) -> str:
        return str(
            jax.make_jaxpr(partial(tree_attention, scale=SCALE, window=window))(**paged(inputs))
        )

    room = 2 * PAGE  # of 80 slots
    assert program(room + 7) == program(None)
    assert program(room + 6) != program(None)


def test_a_window_sees_at_least_the_node_itself() -> None:
    inputs = random_inputs(7, 2)
    with pytest.raises(ValueError, match=r"^tree_attention: window is 0, but must be 1 or more"):
        attend(**inputs, window=0)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_past_the_lengths_changes_no_bit(garbage: float, window: int | None) -> None:
    clean, dirty = (random_inputs(7, 2, garbage=slots) for slots in (None, garbage))
    np.testing.assert_array_equal(attend(**dirty, window=window), attend(**clean, window=window))


@pytest.mark.parametrize("pages", [16, 17])
def test_the_cache_is_read_and_not_copied(pages: int) -> None:
    program = _attend.lower(**paged(inputs_of(pages * PAGE, (0, 40, 13)))).compile()
    whole = rf"= f32\[{3 * pages},2,{PAGE},16\]\S* ([\w-]+)\("
    made_by = set(re.findall(whole, program.as_text() or ""))
    assert made_by <= {"parameter", "get-tuple-element"}


@pytest.mark.parametrize("slots", [BLOCK - 8, BLOCK, 2 * BLOCK, 2 * BLOCK + 40, 5 * BLOCK + 8])
def test_the_room_changes_no_bit(slots: int) -> None:
    """Nor does a longer row in the batch."""
    wide = inputs_of(8 * BLOCK, (17, 0, BLOCK - 8))
    expected = attend(**wide)
    narrow: dict[str, Any] = wide | {
        name: wide[name][:, :, :slots] for name in ("k_cache", "v_cache")
    }
    np.testing.assert_array_equal(attend(**narrow), expected)
    longer: dict[str, Any] = wide | {"lengths": jnp.asarray((17, 7 * BLOCK + 3, BLOCK - 8))}
    np.testing.assert_array_equal(attend(**longer)[::2], expected[::2])


@pytest.mark.parametrize(
    ("lengths", "window", "blocks"),
    [
        ((0, 0, 0), None, []),
        ((1, 0, BLOCK), None, [0]),
        ((5, BLOCK + 1, 9), None, [0, 1]),
        ((8 * BLOCK, 1, 1), None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ((8 * BLOCK, 4 * BLOCK, 4 * BLOCK), 10, [3, 4, 5, 6, 7]),
        ((3 * BLOCK, 3 * BLOCK, 3 * BLOCK), 10, [2]),
        ((3 * BLOCK, 0, 3 * BLOCK), 10, [2]),
        ((0, 0, 0), 10, []),
        ((3 * BLOCK, 3 * BLOCK, 3 * BLOCK), 1, []),
    ],
)
def test_blocks_that_no_row_sees_are_not_read(
    lengths: tuple[int, ...], window: int | None, blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def record(cached: Any, table: Any, index: Any) -> Any:
        read.append(int(index))
        return slots_of(cached, table)[:, :, int(index) * BLOCK :][:, :, :BLOCK]

    monkeypatch.setattr(sys.modules[reference.__module__], "_block", record)
    with jax.disable_jit():
        reference(**paged(inputs_of(8 * BLOCK, lengths)), scale=SCALE, window=window)
    assert read[::2] == read[1::2] == blocks  # keys and values


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
        ("k_cache", (6, 2, 32, 16), "need (6, 2, 64, 16)."),
        ("v_cache", (5, 2, 64, 16), "(5, 2, 64, 16), but q (3, 7, 4, 16), k_cache"),
        ("table", (2, 2), "table has shape (2, 2)"),
        ("lengths", (2,), "lengths has shape (2,)"),
        ("k_tree", (3, 7, 2, 8), "and 7 nodes in k_tree need (3, 7, 2, 16)."),
        ("k_tree", (3, 7, 2), "k_tree has shape (3, 7, 2), not 4 axes."),
        ("v_tree", (3, 6, 2, 16), "need (3, 7, 2, 16)."),
        ("mask", (7, 7), "mask has shape (7, 7)"),
        ("mask", (3, 6, 7), "need (3, 7, 7)."),
        ("q", (3, 7, 3, 16), "2 key heads do not divide 3 query heads."),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    inputs = paged(random_inputs(7, 2))
    inputs[name] = jnp.zeros(shape, inputs[name].dtype)
    with pytest.raises(ValueError, match=f"^tree_attention: .*{re.escape(words)}"):
        tree_attention(**inputs, scale=SCALE, window=None, implementation=None)
