"""The pieces of `python -m tools.gpu`, the most informative first; imports no JAX."""

from collections.abc import Collection
from importlib.util import find_spec
from typing import NamedTuple

# Time limit of a piece in seconds.
LIMIT = 530
# Modules that every piece imports.
NEEDED = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "rich",
    "jaxtyping",
    "annotated_types",
    "filelock",
    "safetensors",
    "tokenizers",
    "tqdm",
    "yaml",
)


class Piece(NamedTuple):
    """A program that measures something and writes one JSON file.

    Attributes:
      name: name of the piece and of its file.
      module: module to run, with `--output FILE`.
      arguments: further arguments of the module.
      needs: modules that the piece needs in addition to `NEEDED`.
      small: arguments for small shapes; None if the piece needs a GPU.
      takes_model: whether the module takes the model's file or folder as `--model`.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    small: tuple[str, ...] | None = ("--small",)
    takes_model: bool = False


def _steps(name: str, *arguments: str) -> Piece:
    return Piece(name, "tools.gpu.steps", arguments, small=("--small", *arguments))


def _bench(name: str, module: str, *arguments: str) -> Piece:
    return Piece(name, f"pallas_kernels.{module}", arguments, small=None)


PIECES = (
    Piece("kernels", "tools.gpu.kernels"),
    Piece("copy", "tools.gpu.copying"),
    _steps("step_llama_3_1_8b", "--whole"),
    Piece("acceptance", "tools.gpu.acceptance"),
    Piece("texts", "tools.gpu.texts", needs=("transformers", "jinja2"), takes_model=True),
    _steps("parts_llama_3_1_8b"),
    _steps("rows_llama_3_1_8b", "--whole", "--rows", "8"),
    _steps("trees_llama_3_1_8b", "--whole", "--trees"),
    _steps("step_vicuna_7b", "--whole", "--shape", "vicuna_7b"),
    _bench("attention_llama_3_1_8b", "bench", "--heads", "llama-3.1-8b", "--repeats", "5"),
    _bench("attention_vicuna_7b", "bench", "--heads", "vicuna-7b", "--repeats", "5"),
    _bench("products", "bench_matmul", "--repeats", "5"),
    Piece(
        "checks",
        "tools.gpu.checks",
        needs=("pytest", "xdist", "beartype", "hypothesis", "chex"),
        small=None,
    ),
)


def missing_packages(names: Collection[str]) -> list[str]:
    """Return the modules among `names` that are not installed; no module is imported."""
    return [name for name in names if find_spec(name) is None]
