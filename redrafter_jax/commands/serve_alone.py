"""`serve` by one engine in this process."""

import argparse
import signal
import sys

from redrafter_jax.commands.served import load_served, warn_if_open
from redrafter_jax.commands.terminal import log
from redrafter_jax.config.serving import ReplicaConfig, ServeConfig
from redrafter_jax.serving.server import Server, listen


def serve(arguments: argparse.Namespace, limits: ServeConfig, replicas: ReplicaConfig) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
      InputError: an argument or a file cannot be used.
    """
    del replicas
    # First: what follows takes long.
    listening = listen(arguments.host, arguments.port)
    engine, model = load_served(arguments)
    server = Server(
        engine,
        model,
        limits,
        host=arguments.host,
        api_key=arguments.api_key,
        log_prompts=arguments.log_prompts,
    )
    # Handle SIGTERM outside of uvicorn's run too: uvicorn raises it again when it has ended, but
    # ending on SIGTERM is a success.
    signal.signal(signal.SIGTERM, server.handle_exit)
    warn_if_open(arguments)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log(f"Serving {model.name} at http://{shown}:{port}; compiling, ready when /health says so.")
    server.run([listening])
    if server.failed:
        sys.exit(1)
