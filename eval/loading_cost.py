"""`python -m eval load`: what loading a checkpoint takes of the host's memory, and how long.

The checkpoint is random, of a given shape, and removed again; a fresh process loads it.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file

from redrafter_jax.checkpoints.families import target_fields
from redrafter_jax.checkpoints.huggingface import load_target, stored_shapes
from redrafter_jax.checkpoints.weights import INDEX
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.settings.arguments import parse_settings

from .abstract import bytes_of
from .report import describe_versions, write_report
from .shape_config import LoadSettings

DEFINITIONS = {
    "checkpoint_bytes": "of all weights in the files, bfloat16",
    "largest_weight_bytes": "of the largest weight in the files",
    "loaded_bytes": "of all weights on the device",
    "peak_bytes": "largest resident memory of the loading process, less what it was before; of "
    "that, loaded_bytes are the device's copy where the device is the host itself",
    "above_copy_bytes": "peak_bytes without the device's copy",
    "seconds": "wall time of load_target",
}
_STATUS = Path("/proc/self/status")


class Loading(NamedTuple):
    """What one load took."""

    loaded_bytes: int
    peak_bytes: int
    above_copy_bytes: int
    seconds: float
    device: str


def measure_loading(arguments: Sequence[str] | None = None) -> None:
    """Write a random checkpoint, load it in a process of its own, and say what that took.

    Args:
      arguments: of the command line; None takes the process's own.

    Raises:
      InputError: a setting cannot be used, or this system does not tell a process its memory.
    """
    settings = parse_settings(
        LoadSettings,
        "What loading a checkpoint takes of the host's memory.",
        arguments,
        command="load",
    )
    if not _STATUS.is_file():
        raise InputError(f"{_STATUS} is missing: memory is measured on Linux alone; load there.")
    make_folder(settings.report_dir, "report_dir")
    config = settings.target.build()
    with tempfile.TemporaryDirectory(dir=settings.report_dir) as name:
        folder = Path(name)
        write_random_checkpoint(config, folder, settings.shards)
        # Spawned, not forked: nothing of this process counts.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            loading = process.submit(load_and_measure, folder, settings.dtype).result()
    weights = [2 * int(np.prod(shape)) for shape in stored_shapes(config).values()]
    report: dict[str, Any] = {
        "checkpoint_bytes": sum(weights),
        "largest_weight_bytes": max(weights),
        **loading._asdict(),
        "versions": describe_versions(),
        "config": settings.model_dump(mode="json"),
        "definitions": DEFINITIONS,
    }
    path = settings.report_dir / "load.json"
    write_report(report, path)
    print(_summary(report))
    print(f"The report: {path}")


def write_random_checkpoint(config: TargetConfig, folder: Path, shards: int) -> None:
    """`config.json`, bfloat16 weights in so many files, and their index."""
    shapes = stored_shapes(config)
    names = list(shapes)
    random = np.random.default_rng(0)
    placed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        tensors = {
            name: jnp.asarray(random.random(shapes[name], np.float32) - 0.5, jnp.bfloat16)
            for name in part
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    (folder / "config.json").write_text(json.dumps(target_fields(config)))
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))


def load_and_measure(folder: Path, dtype: str) -> Loading:
    """Load a target and read from the operating system what that took."""
    jnp.zeros(1).block_until_ready()  # the backend is no part of a checkpoint
    before, start = _memory("VmRSS"), time.perf_counter()
    target = load_target(folder, dtype=dtype)
    seconds = time.perf_counter() - start
    loaded, peak = bytes_of(target), _memory("VmHWM") - before
    device = jax.devices()[0]
    on_host = loaded if device.platform == "cpu" else 0
    return Loading(loaded, peak, peak - on_host, seconds, device.device_kind)


def _memory(name: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def _summary(report: Mapping[str, Any]) -> str:
    def megabytes(name: str) -> str:
        return f"{report[name] / 1e6:.0f} MB"

    return (
        f"{megabytes('checkpoint_bytes')} loaded in {report['seconds']:.1f} s; at most "
        f"{megabytes('above_copy_bytes')} of host memory above the device's copy of "
        f"{megabytes('loaded_bytes')}. The largest weight has "
        f"{megabytes('largest_weight_bytes')}."
    )
