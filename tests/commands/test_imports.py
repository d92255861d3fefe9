"""What is imported, by name: nobody waits for JAX to read a help, nor for a client of the hub."""

import re
import subprocess
import sys

import pytest
from places import ROOT

TELL = "atexit.register(lambda: print(*sys.modules))"
HELP = "import sys; sys.argv[1:] = {}; import redrafter_jax.__main__ as program; program.main()"


def modules(code: str) -> set[str]:
    """Names of all modules that are loaded where the code ends."""
    ended = subprocess.run(
        [sys.executable, "-c", f"import atexit, sys; {TELL}; {code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(ended.stdout.splitlines()[-1].split())


def imported(code: str) -> set[str]:
    """Top-level packages that are loaded where the code ends."""
    return {name.partition(".")[0] for name in modules(code)}


@pytest.mark.parametrize(
    "code",
    [
        HELP.format(["--help"]),
        HELP.format(["chat", "--help"]),
        HELP.format(["serve", "--help"]),
        # Ctrl-C is told as that from here on.
        "import train.__main__, eval.__main__, redrafter_jax.entry_points",
    ],
)
def test_a_help_and_a_start_need_no_jax(code: str) -> None:
    assert not imported(code) & {"jax", "flax", "numpy", "tokenizers", "fastapi"}


@pytest.mark.long
def test_decoding_costs_what_jax_and_flax_cost() -> None:
    own = {"redrafter_jax", "pallas_kernels", "annotated_types", "jaxtyping", "safetensors"}
    base = imported("import jax, flax.nnx") | own
    # `tqdm` takes 20 ms, `tokenizers` as long; all else is of the standard library.
    allowed = {*sys.stdlib_module_names, "tqdm", "tokenizers"}
    assert imported("from redrafter_jax import *") - base <= allowed
    commands = imported("import redrafter_jax.commands.generate") - base
    assert commands <= allowed


@pytest.mark.long
def test_what_continues_a_prompt_is_sixty_files() -> None:
    loaded = modules("import redrafter_jax.commands.generate")
    own = {name for name in loaded if name.startswith(("redrafter_jax", "pallas_kernels"))}
    assert "redrafter_jax.engine.engine" in own
    # A kind of drafter, a format of files, a built-in chat template or a grammar is loaded when it
    # is named.
    others = "head|lookup|model_drafter|quantized|gguf|chat_formats|grammars|serving|verdict"
    assert [name for name in own if re.search(others, name)] == []
    assert len(own) <= 60
