"""Loading a checkpoint holds at most a weight or two on the host beside the device's copy."""

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax.numpy as jnp
import pytest
from packed_folders import write_packed
from tiny_gguf import write_random
from tiny_models import cast, random_target, stored_shapes

from eval.abstract import bytes_of
from redrafter_jax import load_target, save_target
from redrafter_jax.config import TargetConfig
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.files.convert import convert

pytestmark = pytest.mark.long

MB = 10**6
STATUS = Path("/proc/self/status")


def memory(name: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def load_and_measure(folder: Path) -> tuple[int, int]:
    """Bytes of the weights, and the most that the process grew by."""
    jnp.zeros(1).block_until_ready()  # the backend is no part of a checkpoint
    before = memory("VmRSS")
    target = load_target(folder)
    loaded = bytes_of(target.params)
    return loaded, memory("VmHWM") - before


# 102 MB in bfloat16, of which no weight has more than 12.6, and no two side by side more than 25.2.
CONFIG = TargetConfig(512, 1536, 4096, 2, 12, 12, 128, 1e4, 1e-5, 64, True, ())


def write_folder(folder: Path) -> Path:
    save_target(cast(random_target(CONFIG), "bfloat16"), folder)
    return folder


def write_quantized(folder: Path) -> Path:
    path = folder / "model.gguf"
    write_random(path, "Q8_0", CONFIG)
    return path


def write_codes(folder: Path) -> Path:
    convert(write_folder(folder / "plain"), folder / "int4", quantization=Quantization.of("int4"))
    return folder / "int4"


def write_words(folder: Path) -> Path:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    return write_packed(folder, random_target(CONFIG), stated)


@pytest.mark.parametrize(
    ("write", "bits"),
    [
        (write_folder, 16),
        (write_quantized, 16),
        (write_codes, 4.25),
        # The embedding, one number of 73, has 16.
        (write_words, 4.375 + (16 - 4.375) / 73),
    ],
)
@pytest.mark.skipif(not STATUS.is_file(), reason="Linux alone tells a process its memory")
def test_no_second_copy_of_the_weights_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], bits: float
) -> None:
    path = write(tmp_path)
    # What is freed goes back at once: what counts is what is held, not what malloc keeps for later.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
    # Spawned, not forked: nothing of this process counts.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        loaded, grown = process.submit(load_and_measure, path).result()
    numbers = sum(math.prod(shape) for shape in stored_shapes(CONFIG).values())
    assert 1 <= loaded / (numbers * bits / 8) < 1.02
    # A second copy in bfloat16 would be 102 MB; code that is loaded on the way takes 20.
    assert numbers * 2 > 100 * MB
    assert grown - loaded < 60 * MB
