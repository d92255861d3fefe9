"""What the compiler for eight H200 makes of decoding on a mesh: what crosses between them.

See `make aot`.
"""

import re
from collections import Counter
from math import prod
from typing import NamedTuple

import jax.numpy as jnp
import pytest
from needs import needs_compiler
from places import CONFIGS

from eval.abstract import abstract_drafter, abstract_state, abstract_target, bytes_of, on_mesh
from eval.plan import compile_decode
from eval.shapes import PlanSettings
from pallas_kernels.aot import Compilation, gpu_mesh
from pallas_kernels.gpus import GPUS
from redrafter_jax.drafters.base import bind_drafter
from redrafter_jax.settings.files import load_settings

CONFIG = CONFIGS / "plan_llama_3_1_70b.yaml"
pytestmark = needs_compiler


class Collective(NamedTuple):
    """One of the compiled program, and whether it is only taken where filters are asked for."""

    kind: str
    shapes: tuple[str, ...]
    conditional: bool


def collectives(hlo: str) -> list[Collective]:
    found = []
    kinds = (
        "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    )
    for line in hlo.splitlines():
        match = re.search(rf"= (.*?) ({kinds})(-start)?\(", line)
        if match is None:
            continue
        shapes = re.findall(r"\w+\[[\d,]*\]", match[1])
        # A started one names its operands and then its results.
        results = shapes[len(shapes) // 2 :] if match[3] else shapes
        found.append(Collective(match[2], tuple(results), "/cond/" in line))
    return found


# Layers are alike: what crosses in a few crosses in all 80.
@pytest.fixture(scope="module", params=[8, pytest.param(80, marks=pytest.mark.long)])
def settings(request: pytest.FixtureRequest) -> PlanSettings:
    return load_settings(PlanSettings, CONFIG, [f"target.num_hidden_layers={request.param}"])


@pytest.fixture(scope="module")
def compiled(settings: PlanSettings) -> Compilation:
    mesh = gpu_mesh("h200", (1, 8), ("data", "model"))
    target = on_mesh(abstract_target(settings.target.build(), jnp.bfloat16), mesh)
    model = on_mesh(
        abstract_drafter(settings.drafter_config(settings.tree.draft_rounds), jnp.bfloat16), mesh
    )
    drafter, tree = bind_drafter(model, settings.tree)
    state = on_mesh(abstract_state(target, drafter, 1, 4096), mesh)
    compilation = compile_decode(mesh, target, drafter, state, tree)
    assert compilation.memory.alias_size_in_bytes == bytes_of(state)
    # And the number of the one row, and of steps.
    assert compilation.memory.argument_size_in_bytes == bytes_of((target, drafter, state)) + 8
    return compilation


def test_exactly_the_expected_sums_cross(compiled: Compilation, settings: PlanSettings) -> None:
    L, N, W = settings.target.num_hidden_layers, 32, 8
    later = settings.tree.draft_rounds - 1
    D = settings.target.hidden_size
    counts = Counter(
        (one.kind, one.shapes) for one in collectives(compiled.hlo) if not one.conditional
    )
    sums = {shapes: count for (kind, shapes), count in counts.items() if kind == "all-reduce"}
    assert sums == {
        # The embedding, and in every layer attention and the feed-forward block.
        (f"bf16[1,{N},{D}]",): 2 * L + 1,
        # The highest score of every node, and the first token that has it.
        (f"f32[1,{N}]",): 1,
        (f"s32[1,{N}]",): 1,
        # What the drafter is fed: the root, and the beams in every later round.
        (f"bf16[1,1,{D}]",): 1,
        (f"bf16[1,{W},{D}]",): later,
    }
    gathered = {shapes: count for (kind, shapes), count in counts.items() if kind == "all-gather"}
    # The features of the residual blocks, which are as wide as context and state, and of the cell.
    assert {shapes: count for shapes, count in gathered.items() if len(shapes) == 1} == {
        (f"bf16[{2 * D}]",): 2,
        (f"bf16[{W},{D}]",): later,
        (f"bf16[{W},{2 * D}]",): 2 * later,
    }
    together = {frozenset(shapes): count for shapes, count in gathered.items() if len(shapes) > 1}
    assert together == {
        # The first round's cell: the product with the root, and the bias.
        frozenset({f"bf16[{D}]"}): 1,
        # The candidates of every device, and their sums: of one beam, then of W. The sums of the
        # first round cross with the candidates of the second.
        frozenset({f"f32[{8 * W}]", f"s32[{8 * W}]"}): 1,
        frozenset({f"f32[{8 * W},{W}]", f"s32[{8 * W},{W}]", f"f32[{W},8]", "f32[8]"}): 1,
        frozenset({f"f32[{W},{8 * W}]", f"s32[{W},{8 * W}]", f"f32[{W},8]"}): later - 1,
    }
    assert {kind for kind, _ in counts} == {"all-reduce", "all-gather"}


def test_no_weight_and_no_cache_crosses(compiled: Compilation, settings: PlanSettings) -> None:
    V = settings.target.vocab_size
    sizes = [
        (prod(int(length) for length in re.findall(r"\d+", shape.partition("[")[2])), one)
        for one in collectives(compiled.hlo)
        for shape in one.shapes
    ]
    # The largest are the logits of all nodes, where a row asks for a filter.
    assert max(size for size, _ in sizes) == 32 * V
    smallest_weight = settings.target.hidden_size * 8 * 128 // 8
    assert all(size < smallest_weight for size, one in sizes if not one.conditional)


def test_every_layer_attends_by_the_kernel(compiled: Compilation, settings: PlanSettings) -> None:
    calls = re.findall(r'custom_call_target="mosaic_gpu_v2"', compiled.hlo)
    # And a kernel that merges its splits; one that writes the cache; the filters of the target and
    # of every round.
    filters = 1 + settings.tree.draft_rounds
    assert len(calls) == 2 * settings.target.num_hidden_layers + 1 + filters
    for kernel in compiled.kernels:
        assert kernel.spill_stores == kernel.spill_loads == 0


def test_it_fits(compiled: Compilation) -> None:
    memory = compiled.memory
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    assert arguments + temporaries < 0.3 * GPUS["h200"].memory_bytes
    assert temporaries < 0.05 * arguments
