"""`python -m eval plan`: does a pair fit a GPU, and how fast could a step be at the very best.

Computed from shapes alone: nothing is loaded, run or measured, and no GPU is needed.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import RenderableType
from rich.table import Table

from pallas_kernels.aot import AotUnavailableError, Memory, compile_on, gpu_mesh
from pallas_kernels.gpus import GPUS
from redrafter_jax.command_line import make_folder
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import MODEL
from redrafter_jax.parallel.mesh import DATA, check_rows, check_target
from redrafter_jax.types import DecodeState

from .abstract import abstract_drafter, abstract_state, abstract_target, bytes_of, on_mesh
from .report import write_report
from .shape_config import PlanSettings
from .table import show
from .traffic import bytes_read

DEFINITIONS = {
    "needed_bytes": "weights of both models, decode state and temporaries, on one device (of the "
    "mesh, where there is one; so are all other bytes)",
    "state": "cache, token buffer and all else that a decode step hands to the next",
    "temporaries": "of the compiled decode loop, from the compiler's memory analysis; the prompt's "
    "pass is not in it",
    "bound_milliseconds": "bytes that must be read / peak bandwidth: a lower bound on the time, "
    "never a measurement",
    "baseline": "one target call on one token: every weight of the target once (of an embedding "
    "that is no vocabulary projection only the tokens' rows) and the whole cache, all slots full",
    "verification": "one target call on N tokens: the same and more rows of the embedding; "
    "activations and logits are not counted",
    "draft": "R rounds, each of which reads every weight of the drafter, or of the target's head "
    "where it has none, and W rows of the embedding; the projection of its context is read once; "
    "what stays in the GPU's own cache between rounds is counted again",
    "break_even": "(draft + verification) / baseline: the acceptance length below which these "
    "bounds promise no gain",
}


def plan(settings: PlanSettings) -> None:
    """Print what a pair needs of a GPU, and write it as JSON.

    Raises:
      InputError: the pair, the mesh or the folder of the report cannot be used.
    """
    draft = settings.draft
    target_config, drafter_config = settings.target.build(), settings.drafter_config()
    check_pair(target_config, drafter_config, draft)
    make_folder(settings.report_dir, "report_dir")
    gpu = GPUS[settings.gpu]
    dtype = jnp.dtype(settings.dtype)
    # Planning needs no device, and asking JAX for one may log what is wrong with CUDA.
    jax.config.update("jax_platforms", "cpu")
    target = abstract_target(target_config, dtype)
    drafter = abstract_drafter(drafter_config, dtype)
    bound = bind_drafter(drafter, draft)
    state = abstract_state(target, bound, settings.batch_size, settings.slots)

    memory, reason = None, None
    try:
        mesh = gpu_mesh(settings.gpu, (settings.mesh.data, settings.mesh.model), (DATA, MODEL))
        if mesh.size > 1:
            check_target(target_config, mesh)
            check_rows(settings.batch_size, mesh)
            target, drafter = on_mesh(target, mesh), on_mesh(drafter, mesh)
            state = on_mesh(state, mesh)
        memory = compiled_memory(mesh, target, bind_drafter(drafter, draft), state)
    except AotUnavailableError as error:
        reason = str(error)
        if settings.mesh.data * settings.mesh.model > 1:
            raise InputError(f"A mesh is planned by compiling for it. {reason}") from None
    needs = {
        "target": bytes_of(target),
        "drafter": bytes_of(drafter),
        "cache": bytes_of(state.cache),
        "rest of the state": bytes_of(state) - bytes_of(state.cache),
        "temporaries": memory and memory.temporaries,
    }
    needed = sum(filter(None, needs.values()))
    traffic = bytes_read(target, drafter, state, draft)
    bounds = {name: 1000 * read / gpu.bandwidth for name, read in traffic._asdict().items()}
    report: dict[str, Any] = {
        "needs_bytes": needs,
        "needed_bytes": needed,
        "memory_bytes": gpu.memory_bytes,
        "fits": needed <= gpu.memory_bytes,
        "temporaries_missing": reason,
        "reads_bytes": traffic._asdict(),
        "bound_milliseconds": bounds,
        "break_even": (bounds["draft"] + bounds["verification"]) / bounds["baseline"],
        "gpu": asdict(gpu),
    }
    path = settings.report_dir / "plan.json"
    write_report(path, report, settings, DEFINITIONS)
    show(path, *_tables(report))


def compiled_memory(mesh: Mesh, target: Target, drafter: Drafter, state: DecodeState) -> Memory:
    """What the decode loop needs on one device, compiled for GPUs that need not be there.

    Raises:
      AotUnavailableError: this installation cannot compile for it.
    """
    loop = jax.jit(decode, donate_argnums=2)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    return compile_on(mesh, loop, target, drafter, state, steps).memory


def in_settings(arguments: Sequence[str]) -> list[str]:
    """Settings in place of the flags that are short for them, and a file where none is given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    short = {"--target": "target", "--gpu": "gpu", "--batch": "batch_size", "--cache": "slots"}
    for flag, name in short.items():
        parser.add_argument(flag, dest=name)
    flags, rest = parser.parse_known_args(arguments)
    if not any(argument.partition("=")[0] == "--config" for argument in rest):
        rest = ["--config", str(Path(__file__).with_name("plan.yaml")), *rest]
    given = {name: value for name, value in vars(flags).items() if value is not None}
    return [*rest, *(f"{name}={value}" for name, value in given.items())]


def _tables(report: dict[str, Any]) -> Iterator[RenderableType]:
    memory = Table(title=f"Memory of {report['gpu']['name']}", title_justify="left")
    memory.add_column("")
    memory.add_column("GB", justify="right")
    for name, size in report["needs_bytes"].items():
        memory.add_row(name, "not computed" if size is None else _gigabytes(size))
    memory.add_section()
    memory.add_row("needed", _gigabytes(report["needed_bytes"]))
    memory.add_row("there is", _gigabytes(report["memory_bytes"]))
    yield memory
    verdict = "It fits." if report["fits"] else "It does not fit."
    if report["temporaries_missing"]:
        yield f"temporaries are not computed: {report['temporaries_missing']}"
        yield f"Without them: {verdict}"
    else:
        yield verdict
    bandwidth = report["gpu"]["bandwidth"] / 1e12
    bounds = Table(title=f"Lower bounds per step at {bandwidth:g} TB/s", title_justify="left")
    for column in ("", "GB read", "ms at least"):
        bounds.add_column(column, justify="right" if column else "left")
    for name, size in report["reads_bytes"].items():
        bounds.add_row(name, _gigabytes(size), f"{report['bound_milliseconds'][name]:.3f}")
    yield bounds
    yield "bounds from bytes and peak bandwidth, not measurements"
    yield f"break-even acceptance length by these bounds: {report['break_even']:.2f}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f}"
