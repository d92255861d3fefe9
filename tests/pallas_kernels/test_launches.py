"""What a compiled program launches, against a program counted by hand, and a real one."""

import jax
import jax.numpy as jnp
import pytest
from needs import needs_compiler

from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.launches import Launch, parse, size_of, step_launches

# A step of unknown length: three turns of a loop that adds a row of a table and writes a slice in
# place; a product; noise, if somebody asks for it.
HLO = """HloModule jit_step, is_scheduled=true

%fused_row (table: bf16[1000,64], at: s32[], x: f32[64]) -> f32[64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %x = f32[64]{0} parameter(2)
  %zero = s32[] constant(0)
  %row = bf16[1,64]{1,0} dynamic-slice(%table, %at, %zero), dynamic_slice_sizes={1,64}
  %flat = bf16[64]{0} bitcast(%row)
  %wide = f32[64]{0} convert(%flat)
  ROOT %sum = f32[64]{0} add(%wide, %x)
}

%fused_write (kept: f32[9,64], x.1: f32[64], at.1: s32[]) -> f32[9,64] {
  %kept = f32[9,64]{1,0} parameter(0)
  %x.1 = f32[64]{0} parameter(1)
  %at.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %row.1 = f32[1,64]{1,0} bitcast(%x.1)
  ROOT %written = f32[9,64]{1,0} dynamic-update-slice(%kept, %row.1, %at.1, %zero.1)
}

%turn (arg: (f32[9,64], f32[64], bf16[1000,64], s32[])) -> (f32[9,64], f32[64], bf16[1000,64], s32[]) {
  %arg = (f32[9,64]{1,0}, f32[64]{0}, bf16[1000,64]{1,0}, s32[]) parameter(0)
  %kept.1 = f32[9,64]{1,0} get-tuple-element(%arg), index=0
  %x.2 = f32[64]{0} get-tuple-element(%arg), index=1
  %table.1 = bf16[1000,64]{1,0} get-tuple-element(%arg), index=2
  %at.2 = s32[] get-tuple-element(%arg), index=3
  %row_fusion = f32[64]{0} fusion(%table.1, %at.2, %x.2), kind=kLoop, calls=%fused_row, metadata={op_name="jit(step)/add"}
  %write_fusion = f32[9,64]{1,0} fusion(%kept.1, %row_fusion, %at.2), kind=kLoop, calls=%fused_write
  ROOT %out = (f32[9,64]{1,0}, f32[64]{0}, bf16[1000,64]{1,0}, /*index=3*/s32[]) tuple(%write_fusion, %row_fusion, %table.1, %at.2)
}

%below (arg.1: (f32[9,64], f32[64], bf16[1000,64], s32[])) -> pred[] {
  %arg.1 = (f32[9,64]{1,0}, f32[64]{0}, bf16[1000,64]{1,0}, s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%draw (arg.2: (f32[64])) -> (f32[64]) {
  %arg.2 = (f32[64]{0}) parameter(0)
  %x.3 = f32[64]{0} get-tuple-element(%arg.2), index=0
  %drawn = f32[64]{0} copy(%x.3)
  %again = f32[64]{0} copy(%drawn)
  ROOT %out.1 = (f32[64]{0}) tuple(%again)
}

%skip (arg.3: (f32[64])) -> (f32[64]) {
  ROOT %arg.3 = (f32[64]{0}) parameter(0)
}

%body (state: (f32[9,64], f32[64], bf16[1000,64], s32[])) -> (f32[9,64], f32[64], bf16[1000,64], s32[]) {
  %state = (f32[9,64]{1,0}, f32[64]{0}, bf16[1000,64]{1,0}, s32[]) parameter(0)
  %rounds = (f32[9,64]{1,0}, f32[64]{0}, bf16[1000,64]{1,0}, s32[]) while(%state), condition=%below, body=%turn, backend_config={"known_trip_count":{"n":"3"}}
  %kept.2 = f32[9,64]{1,0} get-tuple-element(%rounds), index=0
  %x.4 = f32[64]{0} get-tuple-element(%rounds), index=1
  %table.2 = bf16[1000,64]{1,0} get-tuple-element(%rounds), index=2
  %at.3 = s32[] get-tuple-element(%rounds), index=3
  %scores = (f32[1000]{0}, s8[16]{0}) custom-call(%table.2, %x.4), custom_call_target="product"
  %tuple = (f32[64]{0}) tuple(%x.4)
  %asked = pred[] constant(false)
  %cond = (f32[64]{0}) conditional(%asked, %tuple, %tuple), true_computation=%draw, false_computation=%skip, metadata={op_name="jit(step)/while/body/noise/cond"}
  %noise = f32[64]{0} get-tuple-element(%cond), index=0
  ROOT %out.2 = (f32[9,64]{1,0}, f32[64]{0}, bf16[1000,64]{1,0}, s32[]) tuple(%kept.2, %noise, %table.2, %at.3)
}

ENTRY %main (start: (f32[9,64], f32[64], bf16[1000,64], s32[])) -> (f32[9,64], f32[64], bf16[1000,64], s32[]) {
  %start = (f32[9,64]{1,0}, f32[64]{0}, bf16[1000,64]{1,0}, s32[]) parameter(0)
  ROOT %steps = (f32[9,64]{1,0}, f32[64]{0}, bf16[1000,64]{1,0}, s32[]) while(%start), condition=%below, body=%body
}
"""  # noqa: E501
GREEDY = [
    # A row of the table, its number, and x.
    Launch("row_fusion", "jit(step)/add", 3, 128 + 4 + 256, 256),
    # What is written, and where.
    Launch("write_fusion", "", 3, 256 + 4, 256),
    Launch("scores", "", 1, 128000 + 256, 4000 + 16),
]


def test_a_program_counted_by_hand() -> None:
    assert step_launches(HLO) == GREEDY
    drawn = [Launch(name, "", 1, 256, 256) for name in ("drawn", "again")]
    assert step_launches(HLO, taken=("noise",)) == [*GREEDY, *drawn]
    assert step_launches(HLO, taken=("filters",)) == GREEDY


def test_of_arrays_that_a_call_updates_in_place_its_other_operands_count() -> None:
    place = "output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {})}"
    called = HLO.replace(
        "%scores = (f32[1000]{0}, s8[16]{0}) custom-call(%table.2, %x.4), ",
        "%scores = (f32[64]{0}, f32[9,64]{1,0}) custom-call(%at.3, %x.4, %kept.2), " + place + ", ",
    )
    assert step_launches(called)[-1] == Launch("scores", "", 1, 4, 4)


def test_a_step_of_unknown_length_within_is_refused() -> None:
    unknown = HLO.replace('"known_trip_count":{"n":"3"}', "")
    with pytest.raises(ValueError, match="the nested loop rounds has an unknown trip count"):
        step_launches(unknown)
    assert step_launches(unknown, unknown_turns=3) == GREEDY
    known = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}')
    with pytest.raises(ValueError, match="has 0 loops of unknown trip count, not one"):
        step_launches(known)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[3,5]{1,0}", 30),
        ("s4[3]{0:E(4)}", 2),
        ("f8e4m3fn[7]{0}", 7),
        ("pred[]", 1),
        ("(f32[2]{0}, token[], (u32[], c64[2]{0}))", 8 + 4 + 16),
    ],
)
def test_bytes_of_a_shape(shape: str, size: int) -> None:
    assert size_of(shape) == size


@needs_compiler
def test_all_that_the_runtime_launches_is_counted() -> None:
    """Against the runtime's own list."""

    def loop(x: jax.Array, weights: jax.Array, steps: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            at, x = carry
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return at + 1, x / jnp.sum(x)

        return jax.lax.while_loop(lambda carry: carry[0] < steps, step, (jnp.int32(0), x))[1]

    f32 = jnp.float32
    x, weights = jax.ShapeDtypeStruct((32, 512), f32), jax.ShapeDtypeStruct((3, 512, 512), f32)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_on(gpu_mesh("h200"), jax.jit(loop), x, weights, steps)
    # Within the loop, which is indented.
    lines = [line for line in compiled.thunks.splitlines() if line.startswith("    ")]
    kinds = "kCustomKernel", "kCopy", "kCustomCall", "kKernel"
    launched = [line for line in lines if any(f": {kind} " in line for kind in kinds)]
    found = step_launches(compiled.hlo)
    assert sum(one.times for one in found) == len(launched) > 3
    # Each weight is read once.
    assert sum(one.reads for one in found) > 3 * 512 * 512 * 4
    assert parse(compiled.hlo)[1].startswith("main")
