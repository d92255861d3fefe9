"""Builds the engine and describes the model that the options of `serve` ask for."""

import argparse
import hashlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax

from redrafter_jax.commands.cache_memory import default_cache_memory, longest_text
from redrafter_jax.commands.option_groups import config_of
from redrafter_jax.commands.options import (
    adaptive_of,
    find_drafting,
    load_models,
    load_prompt_format,
    mirror_of,
)
from redrafter_jax.commands.terminal import log
from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.memory import cache_costs
from redrafter_jax.engine.trees import bind_models
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.target import Target
from redrafter_jax.serving.server import LOOPBACK
from redrafter_jax.serving.service import ServedModel
from redrafter_jax.text.chat_template import NO_TEMPLATE, PromptFormat
from redrafter_jax.text.tool_styles import ToolFormat, tool_format


def warn_if_open(arguments: argparse.Namespace) -> None:
    """Warn about a server that other machines can reach and that asks for no key."""
    if arguments.host not in LOOPBACK and arguments.api_key is None:
        log(f"Anyone who can reach {arguments.host} may send requests; --api-key requires a key.")


def warn_if_no_chat(arguments: argparse.Namespace, form: PromptFormat) -> None:
    """Warn about a model without a chat template, unless the options ask for none."""
    if form.template is NO_TEMPLATE and arguments.chat_template is None:
        log(
            "This model has no chat template, so only /v1/completions answers; name a template "
            "with --chat-template."
        )


def load_served[Kind: Engine](
    arguments: argparse.Namespace,
    make: Callable[..., Kind] = Engine,
    least: Callable[[int], int] = lambda memory: memory,
) -> tuple[Kind, ServedModel]:
    """Build the engine that the options ask for, and describe the model for its clients.

    Args:
      arguments: the command's options.
      make: function that makes the engine; it takes the arguments of `Engine`.
      least: function from the bytes of the cache in this process to the minimum over all processes,
        whose devices may have different amounts of free memory.

    Raises:
      InputError: an argument or a file cannot be used.
    """
    config, mirror = config_of(ServeConfig, arguments), mirror_of(arguments)
    files = open_target(arguments.target)
    found, tree = find_drafting(arguments, files)
    prompt_format = load_prompt_format(arguments, files, ["Hello"])
    tools = _tools_of(arguments, prompt_format)
    target, drafter, tree = load_models(arguments, files, found, tree)
    costs = cache_costs(target, *bind_models(target, drafter, tree), mirror, config.slots)
    memory = config.cache_memory or default_cache_memory(target, costs, config.slots)
    memory = least(memory)
    length = config.context_length or longest_text(target, costs, memory)
    engine = make(
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
        mirror=mirror,
    )
    given = Path(arguments.target)
    name = arguments.name or (given.resolve() if given.name in ("", "..") else given).name
    return engine, ServedModel(name, fingerprint(target), prompt_format, length, tools)


def _tools_of(arguments: argparse.Namespace, prompt_format: PromptFormat) -> ToolFormat | None:
    """Return the format of tool calls, from --tool-parser or the template; None if unknown."""
    template = prompt_format.template
    if arguments.tool_parser and not template.tools:
        raise InputError(
            f"--tool-parser is {arguments.tool_parser}, but the chat template of {template.name} "
            "does not support tools; leave --tool-parser out, or give another --chat-template."
        )
    style = arguments.tool_parser or template.call_style
    if style is None or not template.tools:
        return None
    return tool_format(style, prompt_format.tokenizer)


def fingerprint(target: Target) -> str:
    """Return a digest of everything, besides the request, that can change rounding and the text."""
    # In a quantized target only the norms have the dtype of activations.
    arrays = [(str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(target)]
    versions = [version(package) for package in ("redrafter-jax", "jax", "jaxlib")]
    devices = target.mesh and target.mesh.shape, jax.devices()[0].device_kind
    stated = repr((versions, target.config, arrays, devices)).encode()
    return "fp_" + hashlib.sha256(stated).hexdigest()[:10]
