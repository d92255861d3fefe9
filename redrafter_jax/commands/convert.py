"""`convert`: writes a drafter or a target as a folder of safetensors."""

import argparse
from dataclasses import replace
from typing import Any

from redrafter_jax.commands.quantization_change import print_change, read_windows
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.errors import InputError
from redrafter_jax.files.convert import convert


def run(arguments: argparse.Namespace) -> None:
    """Convert the model, and print what was written and what quantizing changed.

    Raises:
      InputError: the source cannot be read, the folder cannot be written, or options contradict
        each other.
    """
    quantization = _quantization(arguments)
    windows = None if arguments.text is None else read_windows(arguments.text, arguments.source)
    sentences = convert(
        arguments.source,
        arguments.folder,
        arguments.dtype,
        for_apple=arguments.for_apple,
        quantization=quantization,
        keep_quantized=arguments.quantize == "keep",
    )
    for sentence in sentences:
        print(sentence)
    if windows is not None:
        print_change(arguments.source, arguments.folder, windows)


def _quantization(arguments: argparse.Namespace) -> Quantization | None:
    """Return the formats that the options set; None if nothing is quantized."""
    form = arguments.quantize
    given = {part: getattr(arguments, f"quantize_{part}") for part in ("embedding", "head")}
    given = {part: value for part, value in given.items() if value is not None}
    if form in (None, "keep"):
        if given:
            option = f"--quantize-{next(iter(given))}"
            raise InputError(f"{option} is for --quantize int8, int4 or fp8; give --quantize too.")
        if arguments.text is not None and form is None:
            raise InputError(
                "--text measures what --quantize changes; give both, or leave --text out."
            )
        return None
    changes: dict[str, Any] = {
        part: None if value == "none" else value for part, value in given.items()
    }
    return replace(Quantization.of(form), **changes)
