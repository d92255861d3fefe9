"""What the compiler for an H200 makes of the beam search and of the decode loop; see `make aot`."""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from needs import needs_compiler
from places import CONFIGS
from written_arrays import moved_sizes

from eval.abstract import abstract_drafter, abstract_state, abstract_target, bytes_of
from eval.launches import ROWS
from eval.plan import compile_decode
from eval.shapes import PlanSettings
from pallas_kernels.aot import Compilation, compile_on, gpu_mesh
from pallas_kernels.launches import step_launches
from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead, RootOnly, bind_drafter
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.drafters.recurrent import beam_search
from redrafter_jax.engine.device import decode_rows
from redrafter_jax.models.target import Target
from redrafter_jax.settings.files import load_settings
from redrafter_jax.types import Beams, DecodeState, Sampling

pytestmark = needs_compiler


class Step(NamedTuple):
    """A decode loop, and what it was compiled for."""

    target: Target
    whole_bytes: int  # of the target with all its layers
    drafter: Drafter
    tree: TreeConfig | None
    state: DecodeState
    compiled: Compilation


def compile_step(config: str, kind: str, batch_size: int, layers: int) -> Step:
    """The decode loop of a configuration for an H200: bfloat16, 4096 cache slots."""
    settings = load_settings(PlanSettings, CONFIGS / f"plan_{config}.yaml")
    shape = settings.target.build()
    whole_bytes = bytes_of(abstract_target(shape, jnp.bfloat16))
    target = abstract_target(replace(shape, num_hidden_layers=layers), jnp.bfloat16)
    model = abstract_drafter(settings.drafter_config(settings.tree.draft_rounds), jnp.bfloat16)
    drafter, tree = {
        "autoregressive": lambda: bind_drafter(None),
        "prompt lookup": lambda: bind_drafter(PromptLookup()),
        "recurrent": lambda: bind_drafter(model, settings.tree),
        "both": lambda: bind_drafter(model, replace(settings.tree, lookup_tokens=8)),
    }[kind]()
    state = abstract_state(target, drafter, batch_size, 4096)
    compiled = compile_decode(gpu_mesh("h200"), target, drafter, state, tree)
    return Step(target, whole_bytes, drafter, tree, state, compiled)


# Layers are alike: what holds for a few holds for all 32.
LLAMA, VICUNA = "llama_3_1_8b", "vicuna_7b"
STEPS = [
    *product([LLAMA], ["autoregressive", "prompt lookup", "recurrent"], [1], [4]),
    *product([LLAMA], ["both"], [8], [4]),
    *product([VICUNA], ["recurrent"], [1, 8], [4]),
]
WHOLE = [(LLAMA, "recurrent", 1, 32), (LLAMA, "both", 8, 32), (VICUNA, "recurrent", 8, 32)]


@pytest.fixture(
    scope="module",
    params=[*STEPS, *(pytest.param(step, marks=pytest.mark.long) for step in WHOLE)],
    ids=lambda step: "-".join(map(str, step)),
)
def step(request: pytest.FixtureRequest) -> Step:
    return compile_step(*request.param)


def test_the_whole_state_is_updated_in_place(step: Step) -> None:
    memory = step.compiled.memory
    state = bytes_of(step.state)
    # The cache, the token buffer, the context and all numbers of rows: all that is donated.
    assert memory.alias_size_in_bytes == state > bytes_of(step.state.cache)
    # What the rows gained, and the table of addresses of the results, are all that is new.
    B, S = step.state.tokens.shape
    decode = partial(decode_rows, tree=step.tree, steps=S)
    _, gained = jax.eval_shape(decode, step.target, step.drafter, step.state, jnp.arange(B), 1)
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert bytes_of(gained) <= new < bytes_of(gained) + 1024
    # Beside the models the numbers of the rows, and of steps.
    models = bytes_of((step.target, step.drafter))
    assert memory.argument_size_in_bytes == state + models + 4 * (B + 1)


def test_every_layer_attends_by_the_kernel(step: Step) -> None:
    calls = re.findall(r'custom_call_target="mosaic_gpu_v2"', step.compiled.hlo)
    # Attention, and what merges its splits; one kernel that writes all layers of the cache; the
    # filters of the target, and of each round of a head; of few rows, the residual's two sums with
    # the norms after them, but the last.
    filters = 1
    if step.drafter.models and step.tree is not None:
        filters += step.tree.draft_rounds
    L = step.target.config.num_hidden_layers
    sums = 2 * L - 1 if len(step.state.root) == 1 else 0
    assert len(calls) == 2 * L + 1 + filters + sums
    names = ["tree_attention", "merge_attention", "write_rows", "lowest_kept"]
    names += ["add_norm"] if sums else []
    for name in names:
        assert any(name in kernel.name for kernel in step.compiled.kernels)
    for kernel in step.compiled.kernels:
        assert any(name in kernel.name for name in names)
        assert kernel.spill_stores == kernel.spill_loads == 0


@pytest.mark.parametrize(
    "step",
    [*STEPS[:3], pytest.param(WHOLE[0], marks=pytest.mark.long)],
    indirect=True,
    ids=lambda step: "-".join(map(str, step)),
)
def test_launches_outside_the_layers_are_few(step: Step) -> None:
    blocks = step.state.cache.table.shape[1]
    count = {
        rows: sum(one.times for one in step_launches(step.compiled.hlo, taken, blocks))
        - 10 * step.target.config.num_hidden_layers
        for rows, taken in ROWS.items()
    }
    most = {"none": (32, 36), "recurrent": (92, 104)}.get(step.drafter.name, (110, 130))
    assert count["greedy"] <= most[0]
    assert count["filtered"] <= most[1]


def test_temporaries_are_small(step: Step) -> None:
    assert step.compiled.memory.temp_size_in_bytes < 0.05 * step.whole_bytes


def test_no_weight_and_no_cache_is_copied_or_transposed(step: Step) -> None:
    cache = step.state.cache
    arrays = jax.tree.leaves((step.target, step.drafter, cache.keys, cache.values))
    large = {leaf.size for leaf in arrays if leaf.ndim > 1}
    assert not large & moved_sizes(step.compiled.hlo)


def test_a_transposed_cache_would_be_seen() -> None:
    cache = jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.bfloat16)
    compiled = compile_on(gpu_mesh("h200"), jax.jit(lambda x: x.swapaxes(1, 2)), cache)
    assert cache.size in moved_sizes(compiled.hlo)


def test_kernels_are_launched_from_command_buffers(step: Step) -> None:
    launched = thunks_in_loop(step.compiled.thunks)
    # What may stay outside: the condition of the loop. A conditional outside would bring its
    # predicate to the host, and so would a loop over the rounds.
    outside = [thunk.kind for thunk in launched if not thunk.in_command_buffer]
    assert outside.count("kCustomKernel") <= 2
    assert set(outside) <= {"kCustomKernel", "kCommandBuffer"}
    # All layers are in it, and what is around them.
    layers = step.target.config.num_hidden_layers
    assert sum(thunk.in_command_buffer for thunk in launched) > 10 * layers + 32


@pytest.mark.parametrize(
    "draft",
    [TreeConfig(8), TreeConfig(64), TreeConfig(1, num_nodes=64, rerank=True)],
    ids=["8 beams", "64 beams", "one beam, 64 nodes"],
)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_no_vocabulary_is_sorted(draft: TreeConfig, batch_size: int) -> None:
    settings = load_settings(PlanSettings, CONFIGS / "plan_llama_3_1_8b.yaml")
    drafter = abstract_drafter(settings.drafter_config(settings.tree.draft_rounds), jnp.bfloat16)
    V, D = drafter.config.vocab_size, drafter.config.hidden_size

    def search(
        drafter: LoadedHead,
        embedding: jax.Array,
        context: jax.Array,
        root: jax.Array,
        noise: jax.Array,
        sampling: Sampling,
    ) -> Beams:
        return beam_search(drafter.merge(), embedding, context, root, noise, sampling, draft)

    arrays = (
        jax.ShapeDtypeStruct((V, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch_size, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        jax.ShapeDtypeStruct((batch_size, 5, V), jnp.float32),
    )
    target = abstract_target(settings.target.build(), jnp.bfloat16)
    sampling = abstract_state(target, RootOnly(), batch_size, 64).sampling
    hlo = compile_on(gpu_mesh("h200"), jax.jit(search), drafter, *arrays, sampling).hlo
    # XLA makes calls of large sorts, `__cub$DeviceRadixSort...`, which the next check overlooks.
    # The Mosaic kernel is that of the filters, in every round.
    calls = re.findall(r'custom_call_target="([^"]*)"', hlo)
    assert set(calls) == {"__gpu$TopK", "mosaic_gpu_v2"}
    assert calls.count("mosaic_gpu_v2") == draft.draft_rounds
    sorted_rows = re.findall(r"= \(?\w+\[([\d,]*)\]\S* .*\bsort\(", hlo)
    lengths = [int(shape.split(",")[-1]) for shape in sorted_rows]
    # Sorted is what the kernel does not take: fewer than 1024 pairs of beam and token.
    assert max(lengths, default=0) < 1024


def test_nothing_goes_to_the_host_inside_the_loop(step: Step) -> None:
    on_device = {
        "kAsyncDone",
        "kAsyncStart",
        "kCommandBuffer",
        "kConditional",
        "kCopy",
        "kCustomCall",
        "kCustomKernel",
        "kDynamicSliceFusion",
        "kWhile",
    }
    assert {thunk.kind for thunk in thunks_in_loop(step.compiled.thunks)} <= on_device
    assert not re.search(r" (infeed|outfeed|send|recv)\(", step.compiled.hlo)
    assert "S(5)" not in step.compiled.hlo, "host memory"
    targets = set(re.findall(r'custom_call_target="([^"]*)"', step.compiled.hlo))
    assert targets <= {"__gpu$TopK", "mosaic_gpu_v2"}


class Thunk(NamedTuple):
    kind: str
    in_command_buffer: bool


def thunks_in_loop(text: str) -> list[Thunk]:
    """All that the outermost loop launches, its condition first."""
    above: list[tuple[int, str]] = []
    found = []
    for line in text.splitlines():
        match = re.match(r"( *)\d+: (k\w+)", line)
        if match is None:
            continue
        indent, kind = len(match[1]), match[2]
        above = [(depth, name) for depth, name in above if depth < indent]
        if above:
            found.append(Thunk(kind, any(name == "kCommandBuffer" for _, name in above)))
        above.append((indent, kind))
    return found
