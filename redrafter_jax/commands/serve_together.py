"""`serve` with one engine whose mesh has devices of several processes.

Process 0, the leader, runs the HTTP server; the other processes repeat the calls of its engine.
"""

import argparse
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import jax

from redrafter_jax.command_line import end_at_once
from redrafter_jax.commands.option_groups import option_of
from redrafter_jax.commands.serve_alone import make_server
from redrafter_jax.commands.served import load_served
from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.engine.led import FollowingEngine, LeadingEngine
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.links import Follower, Leader, LostProcessError, meet
from redrafter_jax.parallel.processes import least_of_all
from redrafter_jax.serving.server import listen
from redrafter_jax.text.grammars import GrammarCompiler

# Options that may differ between processes: the first three identify the process, and only process
# 0 uses the others.
_OWN = ("coordinator_address", "num_processes", "process_id", "host", "port", "api_key", "name")
# Packages of which all processes must have the same version, because messages between processes and
# compiled programs depend on it.
_PACKAGES = ("redrafter-jax", "jax", "jaxlib", "llguidance")


def serve_together(arguments: argparse.Namespace, limits: ServeConfig) -> None:
    """Serve, or follow the process that serves, until any of the processes gets SIGTERM or Ctrl-C.

    Raises:
      InputError: an argument or a file cannot be used.
      LostProcessError: another process is gone.
      RuntimeError: the engine has failed.
    """
    # JAX handles SIGTERM as a preemption notice; until the server handles it, end the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    link = meet(arguments.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"))
    # A program that waits in a collective for a lost process would hang.
    _watch(link, end_at_once)
    try:
        _check_same(arguments, link)
        if isinstance(link, Leader):
            _lead(arguments, limits, link)
        else:
            _follow(arguments, link)
    except BaseException:
        # Report this error, not the losses that follow from it.
        _watch(link, lambda error: None)
        raise


def _watch(link: Leader | Follower, on_loss: Callable[[LostProcessError], object]) -> None:
    if isinstance(link, Leader):
        link.watch(on_loss, lambda: None)
    else:
        link.watch(on_loss)


def _check_same(arguments: argparse.Namespace, link: Leader | Follower) -> None:
    """Refuse package versions and options that differ from those of process 0."""
    versions = {name: _version(name) for name in _PACKAGES}
    for name, value in link.agree(versions).items():
        if versions.get(name) != value:
            raise InputError(
                f"{name} is {versions.get(name) or 'not installed'} in this process and "
                f"{value or 'not installed'} in process 0; install the same version in all."
            )
    own = {name: value for name, value in vars(arguments).items() if name not in _OWN}
    for name, value in link.agree(own).items():
        if own.get(name) != value:
            raise InputError(
                f"{option_of(name)} is {own.get(name)} in this process and {value} in process 0; "
                "start all processes with the same options."
            )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lead(arguments: argparse.Namespace, limits: ServeConfig, link: Leader) -> None:
    listening = listen(arguments.host, arguments.port)
    engine, model = load_served(arguments, partial(LeadingEngine, link), least_of_all)
    where = f" in {jax.process_count()} processes"
    server = make_server(arguments, limits, listening, engine, model, where)
    link.watch(server.fail, server.end)
    try:
        server.run([listening])
    finally:
        if server.failed:
            link.close()
        else:
            link.end()
            jax.distributed.shutdown()
    if server.failed:
        raise link.lost or RuntimeError("the engine has failed; see the log above")


def _follow(arguments: argparse.Namespace, link: Follower) -> None:
    engine, model = load_served(arguments, partial(FollowingEngine, link), least_of_all)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: link.ask_for_end())
    form = model.format
    grammars = GrammarCompiler(form.tokenizer, engine.vocab_size, form.stop_tokens)
    # The tokenizer is indexed now, so that process 0 need not wait for this process when it answers
    # the first request with a grammar.
    # Without llguidance, process 0 refuses grammars itself.
    with suppress(InputError):
        grammars.prepare()
    engine.follow(grammars)
    jax.distributed.shutdown()
