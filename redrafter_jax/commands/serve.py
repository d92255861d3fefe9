"""`serve`: an HTTP server with OpenAI's API."""

import argparse
import logging
import sys

from redrafter_jax.commands.option_groups import config_of, option_of
from redrafter_jax.config.serving import ReplicaConfig, ServeConfig
from redrafter_jax.errors import InputError


def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
      InputError: an argument, a file or a package cannot be used.
    """
    limits, replicas = config_of(ServeConfig, arguments), config_of(ReplicaConfig, arguments)
    given = option_of("max_replicas" if replicas.replicas is None else "replicas")
    for name in ("num_processes", "coordinator_address", "process_id"):
        if replicas.several and getattr(arguments, name) is not None:
            raise InputError(
                f"{given} and {option_of(name)} are both given, but each replica is an engine of "
                "one process; leave one of the two options out."
            )
    extras = "serve,ray" if replicas.several else "serve"
    try:
        if replicas.several:
            from redrafter_jax.commands.serve_replicas import serve
        else:
            from redrafter_jax.commands.serve_alone import serve
    except ModuleNotFoundError as error:
        raise InputError(
            f"redrafter serve needs the package {error.name}, which is not installed; in a "
            f"checkout of redrafter-jax, install all of its packages: pip install '.[{extras}]'."
        ) from None
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("redrafter_jax").setLevel(logging.INFO)
    serve(arguments, limits, replicas)
