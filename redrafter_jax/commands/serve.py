"""`serve`: an HTTP server with OpenAI's API."""

import argparse
import hashlib
import logging
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import jax

from redrafter_jax.commands.option_groups import config_of
from redrafter_jax.commands.options import (
    adaptive_of,
    find_drafting,
    load_models,
    load_prompt_format,
)
from redrafter_jax.commands.terminal import log
from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.target import Target
from redrafter_jax.text.chat_template import PromptFormat
from redrafter_jax.text.tool_styles import ToolFormat, tool_format


def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
      InputError: an argument, a file or a package cannot be used.
    """
    try:
        from redrafter_jax.commands.cache_memory import default_cache_memory, longest_text
        from redrafter_jax.engine.engine import Engine
        from redrafter_jax.engine.trees import bind_models
        from redrafter_jax.serving.server import LOOPBACK, Server, listen
        from redrafter_jax.serving.service import ServedModel
    except ModuleNotFoundError as error:
        raise InputError(
            f"redrafter serve needs the package {error.name}, which is not installed; in a "
            "checkout of redrafter-jax, pip install '.[serve]' installs all it needs."
        ) from None
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("redrafter_jax").setLevel(logging.INFO)
    config = config_of(ServeConfig, arguments)
    # First: what follows takes long.
    listening = listen(arguments.host, arguments.port)
    files = open_target(arguments.target)
    found, tree = find_drafting(arguments, files)
    prompt_format = load_prompt_format(arguments, files, ["Hello"])
    tools = _tools_of(arguments, prompt_format)
    target, drafter, tree = load_models(arguments, files, found, tree)
    bound, _ = bind_models(target, drafter, tree)
    memory = config.cache_memory or default_cache_memory(target, bound, config.slots)
    length = config.context_length or longest_text(target, bound, memory)
    engine = Engine(
        target,
        drafter,
        tree=tree,
        adaptive=adaptive_of(arguments),
        slots=config.slots,
        context_length=length,
        cache_memory=memory,
        queue_limit=config.queue_limit,
        stop_tokens=prompt_format.stop_tokens,
        steps_per_call=config.steps_per_call,
        top_log_probs=config.max_logprobs,
    )
    given = Path(arguments.target)
    name = arguments.name or (given.resolve() if given.name in ("", "..") else given).name
    server = Server(
        engine,
        ServedModel(name, fingerprint(target), prompt_format, length, tools),
        config,
        host=arguments.host,
        api_key=arguments.api_key,
        log_prompts=arguments.log_prompts,
    )
    # Also before and after uvicorn hears signals itself: it raises them again when it has ended.
    # A server that was told to end by SIGTERM, and did, has not failed.
    signal.signal(signal.SIGTERM, server.handle_exit)
    if arguments.host not in LOOPBACK and arguments.api_key is None:
        log(f"Anyone who can reach {arguments.host} may ask; --api-key asks for a key.")
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log(f"Serving {name} at http://{shown}:{port}; compiling, ready when /health says so.")
    server.run([listening])
    if server.failed:
        sys.exit(1)


def _tools_of(arguments: argparse.Namespace, prompt_format: PromptFormat) -> ToolFormat | None:
    """How answers call tools: as --tool-parser says, or else the chat template."""
    template = prompt_format.template
    if arguments.tool_parser and not template.tools:
        raise InputError(
            f"--tool-parser {arguments.tool_parser} is given, but the chat template of "
            f"{template.name} writes no tools; leave it out, or give one that does by "
            "--chat-template."
        )
    style = arguments.tool_parser or template.call_style
    writes = template.tools and style is not None
    return tool_format(style, prompt_format.tokenizer) if writes else None


def fingerprint(target: Target) -> str:
    """Digest of all that may change rounding, and so a text, besides the request."""
    # Of a quantized target the norms alone have the activations' dtype.
    arrays = [(str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(target)]
    versions = [version(package) for package in ("redrafter-jax", "jax", "jaxlib")]
    devices = target.mesh and target.mesh.shape, jax.devices()[0].device_kind
    stated = repr((versions, target.config, arrays, devices)).encode()
    return "fp_" + hashlib.sha256(stated).hexdigest()[:10]
