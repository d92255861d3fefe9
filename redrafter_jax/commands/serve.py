"""`serve`: an HTTP server with OpenAI's API."""

import argparse
import logging
import signal
import sys

from redrafter_jax.commands.option_groups import config_of
from redrafter_jax.commands.terminal import log
from redrafter_jax.config.serving import ReplicaConfig, ServeConfig
from redrafter_jax.errors import InputError


def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
      InputError: an argument, a file or a package cannot be used.
    """
    config, replicas = config_of(ServeConfig, arguments), config_of(ReplicaConfig, arguments)
    several = replicas.replicas is not None or replicas.max_replicas is not None
    extra = "serve,ray" if several else "serve"
    try:
        from redrafter_jax.commands.served import load_served
        from redrafter_jax.serving.server import LOOPBACK, Server, listen

        if several:
            from redrafter_jax.commands.serve_replicas import serve_replicas
    except ModuleNotFoundError as error:
        raise InputError(
            f"redrafter serve needs the package {error.name}, which is not installed; in a "
            f"checkout of redrafter-jax, pip install '.[{extra}]' installs all it needs."
        ) from None
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("redrafter_jax").setLevel(logging.INFO)
    if arguments.host not in LOOPBACK and arguments.api_key is None:
        log(f"Anyone who can reach {arguments.host} may ask; --api-key asks for a key.")
    if several:
        serve_replicas(arguments, config, replicas)
        return
    # First: what follows takes long.
    listening = listen(arguments.host, arguments.port)
    engine, model = load_served(arguments)
    server = Server(
        engine,
        model,
        config,
        host=arguments.host,
        api_key=arguments.api_key,
        log_prompts=arguments.log_prompts,
    )
    # Also before and after uvicorn hears signals itself: it raises them again when it has ended.
    # A server that was told to end by SIGTERM, and did, has not failed.
    signal.signal(signal.SIGTERM, server.handle_exit)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log(f"Serving {model.name} at http://{shown}:{port}; compiling, ready when /health says so.")
    server.run([listening])
    if server.failed:
        sys.exit(1)
