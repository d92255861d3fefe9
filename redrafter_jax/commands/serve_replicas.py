"""`serve --replicas`: several engines behind one endpoint, run by Ray Serve."""

import argparse
import signal
import threading
from functools import partial
from pathlib import Path

from redrafter_jax.commands.options import find_drafting, load_prompt_format
from redrafter_jax.commands.served import load_served, warn_if_no_chat, warn_if_open
from redrafter_jax.commands.terminal import log
from redrafter_jax.config.serving import ReplicaConfig, ServeConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.parallel.cluster import is_own
from redrafter_jax.serving.replicas.deployment import Cluster, Endpoint, make_application
from redrafter_jax.serving.server import listen


def serve(arguments: argparse.Namespace, limits: ServeConfig, replicas: ReplicaConfig) -> None:
    """Serve until SIGTERM or Ctrl-C, or deploy to a cluster that is already running.

    Raises:
      InputError: an argument or a file cannot be used, or the replicas do not start.
    """
    if arguments.port == 0:
        raise InputError("--port is 0, but replicas need a fixed port; give its number.")
    # Report errors in files before any process starts.
    files = open_target(arguments.target)
    find_drafting(arguments, files)
    warn_if_no_chat(arguments, load_prompt_format(arguments, files, ["Hello"]))
    for option in ("target", "drafter"):
        given = getattr(arguments, option)
        if given is not None and Path(given).exists():  # replicas run in another working folder
            setattr(arguments, option, str(Path(given).resolve()))
    endpoint = Endpoint(arguments.host, arguments.port, arguments.api_key)
    warn_if_open(arguments)
    own = is_own()
    if own:
        listen(endpoint.host, endpoint.port).close()  # refuses a port that is in use
    cluster = Cluster()
    log(f"Starting {replicas.replicas or 1} replicas; each compiles before it answers.")
    application = make_application(
        partial(load_served, arguments),
        limits,
        replicas,
        endpoint,
        log_prompts=arguments.log_prompts,
    )
    cluster.deploy(application, endpoint)
    log(f"Serving at http://{endpoint.host}:{endpoint.port}; ready.")
    if not own:
        return
    told_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # replaces Ray's handlers, which cut answers off
        signal.signal(number, lambda *_: told_to_end.set())
    told_to_end.wait()
    log("Shutting down after running answers have ended.")
    cluster.end()
