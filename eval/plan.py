"""`python -m eval plan`: whether target and drafter fit a GPU, and lower bounds on step times.

Everything is computed from shapes: no weights are loaded, nothing runs, and no GPU is needed.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int
from rich.console import RenderableType

from pallas_kernels.aot import AotUnavailableError, Compilation, compile_on, gpu_mesh
from pallas_kernels.gpus import GPUS
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead, RootOnly, as_drafter, check_pair
from redrafter_jax.drafters.kinds import find_weighted
from redrafter_jax.engine.device import decode_rows
from redrafter_jax.engine.gains import Gains
from redrafter_jax.errors import InputError
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import MODEL
from redrafter_jax.parallel.mesh import DATA, check_rows, check_target, data_shards
from redrafter_jax.types import DecodeState

from .abstract import (
    abstract_drafter,
    abstract_state,
    abstract_target,
    bytes_of,
    item_bits,
    on_mesh,
)
from .launches import Both, compile_both, count_step, list_launches
from .report import make_table, show, write_report
from .shapes import PlanSettings

DEFINITIONS = {
    "needed_bytes": "weights of both models, decode state and temporaries per device; all other "
    "bytes are per device too",
    "state": "cache, token buffer and everything else that a decode step passes to the next",
    "temporaries": "temporaries of the compiled decode loop, from the compiler's memory analysis, "
    "and its per-step outputs for the host; prefill is not included",
    "bound_milliseconds": "bytes that must be read / peak bandwidth: a lower bound on the time, "
    "not a measurement",
    "baseline": "one target call on one token of every row: every weight of the target once (of an "
    "untied embedding only the tokens' rows) and the whole cache, with all slots full",
    "verification": "one target call on the N nodes of every row: as the baseline, with more rows "
    "of the embedding; activations and logits are not counted",
    "draft": "drafting one tree of R rounds and W beams. In each round, a head that drafts beams "
    "reads all of its weights, or the target's head if it has no output head, and W rows of the "
    "embedding; the projection of its context is read once. Weights that stay in the GPU's cache "
    "between rounds are counted again. Heads that draft independently are read once each, R heads "
    "in all",
    "launches": "kernels and copies that a decode step launches, read from the compiled program; "
    "launches in a loop count once per iteration, and the copy that a small sort makes of its "
    "operand is not counted",
    "launches_in_a_layer": "difference between programs with more and with fewer layers, per layer",
    "rows": "greedy; sampled without filters; filtered by top-k, top-p and min-p",
    "moved_bytes": "operands and results of every launch, each once. Of an operand, only the "
    "slices or rows that are read count. Of an array that is updated in place, only the update "
    "counts; for a kernel that is not XLA's, at most as many bytes as it reads of other operands",
    "least_bytes": "bytes that a step must move at least: those of the baseline, or of draft and "
    "verification, plus the target's logits, written once and read once",
    "milliseconds": "moved bytes / peak bandwidth + launches x launch_microseconds: the time of "
    "the program if every launch waited for the previous one and reached peak bandwidth; not a "
    "measurement",
    "break_even": "(draft + verification) / baseline: the acceptance length below which these "
    "bounds promise no gain",
}


def plan(settings: PlanSettings) -> None:
    """Compute the memory that target and drafter need, and bounds on step times; write a report.

    Raises:
      InputError: the models, the mesh or the folder of the report cannot be used.
    """
    tree, gpu, dtype = settings.tree, GPUS[settings.gpu], jnp.dtype(settings.dtype)
    target_config = settings.target.build()
    drafter_config = settings.drafter_config(tree.draft_rounds)
    check_pair(target_config, drafter_config, tree)
    make_folder(settings.report_dir, "report_dir")
    # Planning needs no device, and initializing the GPU backend may log errors of CUDA.
    jax.config.update("jax_platforms", "cpu")
    target = abstract_target(target_config, dtype, settings.quantize)
    drafter = abstract_drafter(drafter_config, dtype, settings.quantize_drafter)
    state = abstract_state(target, as_drafter(drafter), settings.batch_size, settings.slots)

    temporaries, reason, both = None, None, {}
    try:
        mesh = gpu_mesh(settings.gpu, (settings.mesh.data, settings.mesh.model), (DATA, MODEL))
        if mesh.size > 1:
            check_target(target_config, mesh)
            check_rows(settings.batch_size, mesh)
            target, drafter = on_mesh(target, mesh), on_mesh(drafter, mesh)
            state = on_mesh(state, mesh)
        both = _compile(settings, mesh, drafter)
        memory = both["tree"].whole.memory
        noted = memory.output_size_in_bytes - memory.alias_size_in_bytes
        temporaries = memory.temp_size_in_bytes + noted
    except AotUnavailableError as error:
        reason = str(error)
        if settings.mesh.data * settings.mesh.model > 1:
            raise InputError(
                f"mesh.data={settings.mesh.data} and mesh.model={settings.mesh.model} is a mesh of "
                f"several GPUs, and planning it needs to compile for these GPUs. {reason}"
            ) from None
    needs = {
        "target": bytes_of(target),
        "drafter": bytes_of(drafter),
        "cache": bytes_of(state.cache),
        "rest of the state": bytes_of(state) - bytes_of(state.cache),
        "temporaries": temporaries,
    }
    needed = sum(filter(None, needs.values()))
    reads = bytes_read(target, drafter, state, tree)
    bounds = {name: 1000 * read / gpu.bandwidth for name, read in reads.items()}
    logits = logits_bytes(target, settings.batch_size)
    least = {
        "baseline": reads["baseline"] + logits,
        "tree": reads["draft"] + reads["verification"] + tree.budget * logits,
    }
    report: dict[str, Any] = {
        "needs_bytes": needs,
        "needed_bytes": needed,
        "memory_bytes": gpu.memory_bytes,
        "fits": needed <= gpu.memory_bytes,
        "temporaries_missing": reason,
        "reads_bytes": reads,
        "bound_milliseconds": bounds,
        "break_even": (bounds["draft"] + bounds["verification"]) / bounds["baseline"],
        "least_bytes": least,
        "steps": {
            name: count_step(
                one, least[name], gpu.bandwidth, settings.launch_microseconds, settings.slots
            )
            for name, one in both.items()
        },
        "launches": {name: list_launches(one.whole, settings.slots) for name, one in both.items()},
        "gpu": asdict(gpu),
    }
    path = settings.report_dir / "plan.json"
    write_report(path, report, settings, DEFINITIONS)
    show(path, *_tables(report))


def _compile(settings: PlanSettings, mesh: Mesh, drafter: LoadedHead | Drafter) -> dict[str, Both]:
    """Compile the decode loops of the baseline and of the tree, for two numbers of layers."""
    config, tree = settings.target.build(), settings.tree

    def compile_layers(layers: int, drafter: Drafter, tree: TreeConfig | None) -> Compilation:
        target = abstract_target(config.with_layers(layers), settings.dtype, settings.quantize)
        state = abstract_state(target, drafter, settings.batch_size, settings.slots)
        if mesh.size > 1:
            target, state = on_mesh(target, mesh), on_mesh(state, mesh)
        return compile_decode(mesh, target, drafter, state, tree)

    bound = as_drafter(drafter)
    return {
        "baseline": compile_both(
            config.num_hidden_layers, partial(compile_layers, drafter=RootOnly(), tree=None)
        ),
        "tree": compile_both(
            config.num_hidden_layers,
            partial(compile_layers, drafter=bound, tree=tree),
            bound.layers(config),
        ),
    }


def bytes_read(
    target: Target, drafter: LoadedHead, state: DecodeState, tree: TreeConfig
) -> dict[str, int]:
    """Compute the minimum bytes that a decode step with a full cache reads per device.

    Returns:
      The bytes of the "draft", of the "verification" and of a target call of the "baseline".
    """
    row_bytes = embedding_bytes(target, len(state.root) // data_shards(target.mesh))
    cache = bytes_of((state.cache.keys, state.cache.values))
    return {
        "draft": draft_bytes(target, drafter, tree, row_bytes),
        "verification": call_bytes(target, tree.budget, row_bytes) + cache,
        "baseline": call_bytes(target, 1, row_bytes) + cache,
    }


def embedding_bytes(target: Target, rows: int) -> int:
    """Return the bytes of the embeddings of one token for each of `rows` rows."""
    table = jax.tree.leaves(target.params["embed_tokens"])
    return rows * sum(leaf.shape[1] * item_bits(leaf) for leaf in table) // 8


def call_bytes(target: Target, nodes: int, row_bytes: int) -> int:
    """Return the bytes of weights that a target call on `nodes` tokens per row reads per device.

    `row_bytes` is from `embedding_bytes`.
    """
    if target.config.tie_word_embeddings:
        return bytes_of(target)
    return bytes_of(target) - bytes_of(target.params["embed_tokens"]) + nodes * row_bytes


def logits_bytes(target: Target, rows: int) -> int:
    """Return the bytes per device of writing and reading the logits of one node of every row."""
    V, mesh = target.config.vocab_size, target.mesh
    parts = 1 if mesh is None or V % mesh.shape[MODEL] else mesh.shape[MODEL]
    return 2 * 4 * (rows // data_shards(mesh)) * (V // parts)


def draft_bytes(
    target: Target, drafter: LoadedHead | Drafter, tree: TreeConfig, row_bytes: int
) -> int:
    """Return the bytes that drafting one tree for every row reads per device.

    The record of the drafter's kind states how often each weight is read. Of the target's
    vocabulary projection, only the columns of the draft vocabulary are read. `row_bytes` is from
    `embedding_bytes`.
    """
    bound = as_drafter(drafter)
    [model] = bound.models
    config, record = model.config, find_weighted(model.config)
    assert record is not None, f"{type(config).__name__} is no drafter's configuration"
    reads = record.count_reads(config, model.params, tree)
    read = sum(times * bytes_of(part) for part, times in reads.weights)
    if bound.cache is not None:
        read += bytes_of(reads.reading)
    read += reads.embeddings * row_bytes
    if reads.projections:
        tied = target.config.tie_word_embeddings
        table = target.params["embed_tokens" if tied else "lm_head"]
        bits = sum(leaf.size * item_bits(leaf) for leaf in jax.tree.leaves(table))
        parts = 1 if model.mesh is None else model.mesh.shape[MODEL]
        V, tokens = config.vocab_size, config.draft_vocab_size
        # On a mesh each device reads its shard of the whole projection.
        tokens = tokens if parts == 1 or V % parts else V // parts
        read += reads.projections * (tokens * bits // (8 * V))
    return read


def compile_decode(
    mesh: Mesh, target: Target, drafter: Drafter, state: DecodeState, tree: TreeConfig | None
) -> Compilation:
    """Compile the decode loop for GPUs that need not be present; see `compile_on`.

    This is the loop of `generate` with a fixed tree, for all rows, with one step per cache slot.
    """
    B, S = state.tokens.shape

    @partial(jax.jit, donate_argnames="state")
    def decode(
        target: Target,
        drafter: Drafter,
        state: DecodeState,
        rows: Int[Array, " B"],
        most: Int[Array, ""],
    ) -> tuple[DecodeState, tuple[Gains, Bool[Array, " B"]]]:
        prepared = drafter.prepare(Lender(target))
        return decode_rows(target, prepared, state, rows, most, tree=tree, steps=S)

    rows, most = jax.ShapeDtypeStruct((B,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    if target.mesh is not None:
        rows = on_mesh(rows, target.mesh)
    return compile_on(mesh, decode, target, drafter, state, rows, most)


def _tables(report: dict[str, Any]) -> Iterator[RenderableType]:
    def gigabytes(size: int | None) -> str:
        return "not computed" if size is None else f"{size / 1e9:.3f}"

    needs = report["needs_bytes"] | {
        "needed": report["needed_bytes"],
        "there is": report["memory_bytes"],
    }
    rows = [[name, gigabytes(size)] for name, size in needs.items()]
    yield make_table(f"Memory of {report['gpu']['name']}", ["", "GB"], rows)
    verdict = "It fits." if report["fits"] else "It does not fit."
    if report["temporaries_missing"]:
        yield f"temporaries are not computed: {report['temporaries_missing']}"
        verdict = f"Without temporaries: {verdict}"
    yield verdict
    yield make_table(
        f"Lower bounds per step at {report['gpu']['bandwidth'] / 1e12:g} TB/s",
        ["", "GB read", "ms at least"],
        [
            [name, gigabytes(size), f"{report['bound_milliseconds'][name]:.3f}"]
            for name, size in report["reads_bytes"].items()
        ],
    )
    if report["steps"]:
        yield make_table(
            "A step as compiled: launches, and what they move",
            ["", "rows", "a layer", "outside", "a step", "GB", "/ least", "ms"],
            [
                [
                    name,
                    rows,
                    f"{count['launches_in_a_layer']:.1f}",
                    f"{count['launches_outside']:.0f}",
                    str(count["launches"]),
                    gigabytes(count["moved_bytes"]),
                    f"{count['moved_over_least']:.3f}",
                    f"{count['milliseconds']:.2f}",
                ]
                for name, counts in report["steps"].items()
                for rows, count in counts.items()
            ],
            text_columns=2,
        )
    yield "bounds from bytes and peak bandwidth, not measurements"
    yield f"break-even acceptance length by these bounds: {report['break_even']:.2f}"
