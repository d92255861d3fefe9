"""`serve --replicas`: several engines behind one endpoint, run by Ray Serve."""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

import argparse
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

from ray.serve import Application

from redrafter_jax.commands.option_groups import config_of
from redrafter_jax.commands.options import find_drafting, load_prompt_format
from redrafter_jax.commands.parser import read_arguments
from redrafter_jax.commands.served import load_served, warn_if_no_chat, warn_if_open
from redrafter_jax.commands.terminal import log
from redrafter_jax.config.limits import is_not
from redrafter_jax.config.serving import ReplicaConfig, ServeConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.parallel.cluster import is_own
from redrafter_jax.serving.replicas.deployment import Cluster, Endpoint, make_application
from redrafter_jax.serving.server import listen
from redrafter_jax.text.chat_formats import FORMATS
from redrafter_jax.text.chat_template import NONE, OWN

# Values of --chat-template that are not the paths of files.
_TEMPLATES = (NONE, OWN, *FORMATS)


def serve(arguments: argparse.Namespace, limits: ServeConfig, replicas: ReplicaConfig) -> None:
    """Serve until SIGTERM or Ctrl-C, or deploy to a cluster that is already running.

    Raises:
      InputError: an argument or a file cannot be used, or the replicas do not start.
    """
    if arguments.port == 0:
        raise InputError("--port is 0, but replicas need a fixed port; give its number.")
    _check_files(arguments)
    endpoint = _endpoint(arguments)
    warn_if_open(arguments)
    own = is_own()
    if own:
        listen(endpoint.host, endpoint.port).close()  # refuses a port that is in use
    cluster = Cluster()
    log(f"Starting {replicas.replicas or 1} replicas; each compiles before it answers.")
    cluster.deploy(_application(arguments, limits, replicas), endpoint)
    log(f"Serving at http://{endpoint.host}:{endpoint.port}; ready.")
    if not own:
        return
    told_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # replaces Ray's handlers, which cut answers off
        signal.signal(number, lambda *_: told_to_end.set())
    told_to_end.wait()
    log("Shutting down after running answers have ended.")
    cluster.end()


def application(options: dict[str, Any]) -> Application:
    """Build the application of `redrafter serve --replicas` for Ray Serve's configuration files.

    A file names this function as `import_path`. Its `args` are the options, such as
    `{"target": "/models/target", "host": "0.0.0.0", "slots": 8}`.

    Args:
      options: options of `redrafter serve`, without dashes. A flag has the value true; options with
        the value false or null are left out. Ray Serve itself listens at the address in the file's
        `http_options`. `host` must repeat this address, because by default the endpoint answers
        only requests that name this machine.

    Raises:
      InputError: `host` is missing, or an option or a file cannot be used.
    """
    words = ["serve"]
    for name, value in options.items():
        if isinstance(value, list):
            raise InputError(f"{name} in args {is_not(value, 'a single value, not a list')}.")
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    if "--host" not in words:
        raise InputError(
            "args has no host, so the endpoint would refuse requests from other machines; give the "
            "host of http_options, such as host: 0.0.0.0."
        )
    arguments = read_arguments(words)
    _check_files(arguments)
    warn_if_open(arguments)
    limits, replicas = config_of(ServeConfig, arguments), config_of(ReplicaConfig, arguments)
    return _application(arguments, limits, replicas)


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse files that cannot be used, before any process starts, and make paths absolute."""
    files = open_target(arguments.target)
    find_drafting(arguments, files)
    warn_if_no_chat(arguments, load_prompt_format(arguments, files, ["Hello"]))
    for option, names in (("target", ()), ("drafter", ()), ("chat_template", _TEMPLATES)):
        given = getattr(arguments, option)
        if given is None or given in names:
            continue
        if Path(given).exists():  # replicas run in another working folder
            setattr(arguments, option, str(Path(given).resolve()))


def _endpoint(arguments: argparse.Namespace) -> Endpoint:
    return Endpoint(arguments.host, arguments.port, arguments.api_key)


def _application(
    arguments: argparse.Namespace, limits: ServeConfig, replicas: ReplicaConfig
) -> Application:
    return make_application(
        partial(load_served, arguments),
        limits,
        replicas,
        _endpoint(arguments),
        log_prompts=arguments.log_prompts,
    )
