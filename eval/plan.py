"""`python -m eval plan`: does a pair fit a GPU, and how fast could a step be at the very best.

Computed from shapes alone: nothing is loaded, run or measured, and no GPU is needed.
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
    "needed_bytes": "weights of both models, decode state and temporaries, on one device (of the "
    "mesh, where there is one; so are all other bytes)",
    "state": "cache, token buffer and all else that a decode step hands to the next",
    "temporaries": "of the compiled decode loop, from the compiler's memory analysis, and what it "
    "notes of every step for the host; the prompt's pass is not in it",
    "bound_milliseconds": "bytes that must be read / peak bandwidth: a lower bound on the time, "
    "never a measurement",
    "baseline": "one target call on one token: every weight of the target once (of an embedding "
    "that is no vocabulary projection only the tokens' rows) and the whole cache, all slots full",
    "verification": "one target call on N tokens: the same and more rows of the embedding; "
    "activations and logits are not counted",
    "draft": "drafting one tree. A head that drafts in beams reads in each of R rounds all of its "
    "weights, or the target's head where it has none, and W rows of the embedding; the projection "
    "of its context is read once; what stays in the GPU's own cache between rounds is counted "
    "again. Of heads that draft by rank R are read, each once",
    "launches": "kernels and copies that a decode step starts, read from the compiled program; "
    "what a loop within it starts is counted as often as it turns, and a small sort's own copy of "
    "what it sorts is not",
    "launches_in_a_layer": "by how many programs of more layers and of fewer differ, per layer",
    "rows": "greedy; sampled, without filters; filtered, by top-k, top-p and min-p",
    "moved_bytes": "operands and results of every launch, each once; of an operand of which slices "
    "or rows are taken, these, and of an array that is updated in place the update",
    "least_bytes": "what bounds a step of the baseline, or of the tree with its draft, and the "
    "target's logits, written once and read once",
    "milliseconds": "moved bytes / peak bandwidth + launches x launch_microseconds: what the "
    "program would take if every launch waited for the one before and reached the card's rate; no "
    "measurement",
    "break_even": "(draft + verification) / baseline: the acceptance length below which these "
    "bounds promise no gain",
}


def plan(settings: PlanSettings) -> None:
    """Print what a pair needs of a GPU, and write it as JSON.

    Raises:
      InputError: the pair, the mesh or the folder of the report cannot be used.
    """
    tree, gpu, dtype = settings.tree, GPUS[settings.gpu], jnp.dtype(settings.dtype)
    target_config = settings.target.build()
    drafter_config = settings.drafter_config(tree.draft_rounds)
    check_pair(target_config, drafter_config, tree)
    make_folder(settings.report_dir, "report_dir")
    # Planning needs no device, and asking JAX for one may log what is wrong with CUDA.
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
            raise InputError(f"A mesh is planned by compiling for it. {reason}") from None
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
    """The baseline's decode loop and that of the tree, of all layers and of a few."""
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
    """The least that a decode step reads from one device's memory, its cache full.

    Returns:
      The bytes of the "draft", of the "verification" and of a "baseline" target call.
    """
    row_bytes = embedding_bytes(target, len(state.root) // data_shards(target.mesh))
    cache = bytes_of((state.cache.keys, state.cache.values))
    return {
        "draft": draft_bytes(target, drafter, tree, row_bytes),
        "verification": call_bytes(target, tree.budget, row_bytes) + cache,
        "baseline": call_bytes(target, 1, row_bytes) + cache,
    }


def embedding_bytes(target: Target, rows: int) -> int:
    """Bytes of the embeddings of one token for each of so many rows of the batch."""
    table = jax.tree.leaves(target.params["embed_tokens"])
    return rows * sum(leaf.shape[1] * item_bits(leaf) for leaf in table) // 8


def call_bytes(target: Target, nodes: int, row_bytes: int) -> int:
    """Bytes of weights that a target call on N tokens of every row reads on one device.

    `row_bytes` is from `embedding_bytes`.
    """
    if target.config.tie_word_embeddings:
        return bytes_of(target)
    return bytes_of(target) - bytes_of(target.params["embed_tokens"]) + nodes * row_bytes


def logits_bytes(target: Target, rows: int) -> int:
    """Bytes of the scores of one node of every row on one device, written and read once."""
    V, mesh = target.config.vocab_size, target.mesh
    parts = 1 if mesh is None or V % mesh.shape[MODEL] else mesh.shape[MODEL]
    return 2 * 4 * (rows // data_shards(mesh)) * (V // parts)


def draft_bytes(
    target: Target, drafter: LoadedHead | Drafter, tree: TreeConfig, row_bytes: int
) -> int:
    """Bytes that drafting one tree for every row reads on one device.

    How often weights are read is said by the drafter's kind. Of the target's vocabulary projection
    the columns of the tokens that can be drafted are read.
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
        # On a mesh each device reads its part of all tokens' weights, however few are drafted.
        tokens = tokens if parts == 1 or V % parts else V // parts
        read += reads.projections * (tokens * bits // (8 * V))
    return read


def compile_decode(
    mesh: Mesh, target: Target, drafter: Drafter, state: DecodeState, tree: TreeConfig | None
) -> Compilation:
    """The loop over decode steps, compiled for GPUs that need not be there; see `compile_on`.

    It is that of `generate` where one tree is given: all rows, and as many steps as slots.
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
        verdict = f"Without them: {verdict}"
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
