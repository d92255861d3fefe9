"""Rows written into pages: the specification, and the kernel in the interpreter and compiled."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_kernels import races_found, watched_interpreter
from needs import needs_compiler, needs_hopper

from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.launches import step_launches
from pallas_kernels.tree_attention import PAGE
from pallas_kernels.write_rows import write_rows

PAGES, K, H = 6, 2, 128


def random_inputs(layers: int = 3, H: int = H) -> dict[str, Any]:
    """Tokens at the edges of pages, in the last slot and the first; one has no page."""
    random = np.random.default_rng(0)
    page = jnp.asarray([[0, 1, PAGES], [4, 3, 3]])
    slot = jnp.asarray([[PAGE - 1, 0, 0], [PAGE - 1, 0, 1]])

    def arrays(*shape: int) -> tuple[Any, ...]:
        return tuple(jnp.asarray(random.normal(size=shape), jnp.bfloat16) for _ in range(layers))

    fresh = arrays(*page.shape, K, H)
    return {"layers": arrays(PAGES, K, PAGE, H), "fresh": fresh, "page": page, "slot": slot}


def expected_output(inputs: dict[str, Any]) -> list[np.ndarray]:
    written = [np.array(layer) for layer in inputs["layers"]]
    pages, slots = np.asarray(inputs["page"]), np.asarray(inputs["slot"])
    for layer, rows in zip(written, inputs["fresh"], strict=True):
        for at in np.ndindex(pages.shape):
            if pages[at] < PAGES:
                layer[pages[at], :, slots[at]] = np.asarray(rows)[at]
    return written


def assert_all_equal(output: Any, inputs: dict[str, Any]) -> None:
    for one, expected in zip(output, expected_output(inputs), strict=True):
        np.testing.assert_array_equal(np.asarray(one), expected)


def test_the_specification_writes_every_token_at_its_place() -> None:
    inputs = random_inputs(H=8)
    assert_all_equal(write_rows(**inputs), inputs)


def run_kernel(inputs: dict[str, Any]) -> tuple[Any, bool]:
    """What the kernel writes in the interpreter, and whether its programs raced."""
    with watched_interpreter(cores=4):
        kernel = partial(write_rows, implementation="mosaic_gpu_interpret")
        output = jax.tree.map(np.asarray, jax.jit(kernel)(**inputs))
        return output, races_found()


def test_the_kernel_writes_what_the_specification_does() -> None:
    inputs = random_inputs()
    output, raced = run_kernel(inputs)
    assert not raced
    assert_all_equal(output, inputs)


def test_tokens_at_the_same_place_would_be_seen_to_race() -> None:
    inputs = random_inputs(layers=1)
    _, raced = run_kernel(inputs | {"slot": jnp.zeros_like(inputs["slot"])})
    assert raced


def write_in_turns(
    layers: Any, fresh: Any, page: jax.Array, slot: jax.Array, turns: jax.Array
) -> Any:
    def turn(carry: Any) -> Any:
        at, layers = carry
        return at + 1, write_rows(layers, fresh, page, slot)

    return jax.lax.while_loop(lambda carry: carry[0] < turns, turn, (0, layers))[1]


@needs_compiler
def test_one_kernel_writes_all_layers_in_place() -> None:
    inputs = jax.eval_shape(lambda: random_inputs(layers=64))
    run = jax.jit(write_in_turns, donate_argnums=0)
    turns = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = [inputs[name] for name in ("layers", "fresh", "page", "slot")]
    compiled = compile_on(gpu_mesh("h200"), run, *arguments, turns)
    [kernel] = compiled.kernels
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.registers <= 168
    layer = 2 * inputs["layers"][0].size
    assert compiled.memory.alias_size_in_bytes == 64 * layer
    fresh = 64 * 2 * inputs["fresh"][0].size
    assert compiled.memory.temp_size_in_bytes < fresh + 4096
    # The condition, the turn, places, the new rows side by side, and the kernel.
    launches = step_launches(compiled.hlo)
    [written] = [one for one in launches if "write_rows" in one.operation]
    assert len(launches) <= 5
    assert written.writes <= written.reads < fresh + 4096


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": (), "fresh": ()}, "there are 0 layers and new rows for 0; it needs one or"),
        ({"fresh": ()}, "there are 3 layers and new rows for 0"),
        (
            {"slot": jnp.zeros((2, 4), int)},
            r"slot has shape \(2, 4\), but layers\[0\] \(6, 2, 64, 128\) and page \(2, 3\) need "
            r"\(2, 3\)\.",
        ),
        ({"fresh": (jnp.zeros((2, 3, 1, H)),) * 3}, r"fresh\[0\] has shape \(2, 3, 1, 128\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_rows(**random_inputs() | changed)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (random_inputs(H=64), "its heads must have 128 numbers, but have 64"),
        (
            random_inputs() | dict.fromkeys(("page", "slot"), jnp.zeros((2, 129), int)),
            "it writes up to 256 tokens, but there are 258",
        ),
        (
            random_inputs() | {"fresh": (jnp.zeros((2, 3, K, H)),) * 3},
            "its arrays must be all of one dtype, but are bfloat16 and float32",
        ),
    ],
)
def test_what_the_kernel_cannot_take_is_named(inputs: dict[str, Any], message: str) -> None:
    inputs["fresh"] = tuple(
        jnp.zeros((*inputs["page"].shape, *one.shape[2:]), one.dtype) for one in inputs["fresh"]
    )
    with watched_interpreter(cores=1), pytest.raises(NotImplementedError, match=message):
        write_rows(**inputs, implementation="mosaic_gpu_interpret")


@pytest.mark.gpu
@needs_hopper
def test_the_gpu_writes_what_the_specification_does() -> None:
    inputs = random_inputs(layers=64)
    kernel = jax.jit(partial(write_rows, implementation="mosaic_gpu"))
    assert_all_equal(kernel(**inputs), inputs)
