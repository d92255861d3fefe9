"""`serve` with one engine: in this process, or in several processes that are one job."""

import argparse
import signal
import socket
import sys

import jax

from redrafter_jax.commands.served import load_served, warn_if_no_chat, warn_if_open
from redrafter_jax.commands.terminal import log
from redrafter_jax.config.serving import ReplicaConfig, ServeConfig
from redrafter_jax.engine.engine import Engine
from redrafter_jax.parallel.processes import join
from redrafter_jax.serving.server import Server, listen
from redrafter_jax.serving.service import ServedModel


def serve(arguments: argparse.Namespace, limits: ServeConfig, replicas: ReplicaConfig) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
      InputError: an argument or a file cannot be used.
    """
    del replicas
    join(arguments.coordinator_address, arguments.num_processes, arguments.process_id)
    if jax.distributed.is_initialized():
        from redrafter_jax.commands.serve_together import serve_together

        serve_together(arguments, limits)
        return
    # Listen first, so that a port in use is refused before the models are loaded.
    listening = listen(arguments.host, arguments.port)
    server = make_server(arguments, limits, listening, *load_served(arguments))
    server.run([listening])
    if server.failed:
        sys.exit(1)


def make_server(
    arguments: argparse.Namespace,
    limits: ServeConfig,
    listening: socket.socket,
    engine: Engine,
    model: ServedModel,
    where: str = "",
) -> Server:
    """Build the server that the options ask for, make SIGTERM end it, and log its address.

    Args:
      arguments: the command's options.
      limits: limits on requests.
      listening: the socket that the server will use.
      engine: the engine.
      model: the served model.
      where: words that follow "compiling" in the log, such as " in 2 processes".
    """
    server = Server(
        engine,
        model,
        limits,
        host=arguments.host,
        api_key=arguments.api_key,
        log_prompts=arguments.log_prompts,
    )
    # Handle SIGTERM also outside of uvicorn's run: uvicorn raises the signal again when it has
    # ended, but a server that ends on SIGTERM has succeeded.
    signal.signal(signal.SIGTERM, server.handle_exit)
    warn_if_open(arguments)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    log(f"Serving {model.name} at {url}; compiling{where}, ready when /health says so.")
    warn_if_no_chat(arguments, model.format)
    return server
