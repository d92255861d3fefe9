"""`push`: uploads a head's folder to the Hugging Face hub."""

import argparse

from redrafter_jax.commands.terminal import log
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import find_drafter
from redrafter_jax.files.publish import publish


def run(arguments: argparse.Namespace) -> None:
    """Upload the head, and print its address on the hub.

    Raises:
      InputError: the folder holds no head or no model card, or the hub refuses the upload.
    """
    folder = arguments.folder
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give a head's folder, such as run/drafter.")
    find_drafter(folder)  # refuses a head that could not be loaded again
    address, unlicensed = publish(folder, arguments.repository, private=arguments.private)
    if unlicensed:
        log("The model card states no licence yet; set `license` at the top of README.md.")
    print(address)
