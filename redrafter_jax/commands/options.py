"""What the options of the decoding commands stand for: models, templates, configurations."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from tokenizers import Tokenizer

from redrafter_jax.checkpoints.huggingface import load_drafter, load_target
from redrafter_jax.commands.arguments import config_of, option_of
from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import make_mesh
from redrafter_jax.text.chat_template import (
    ChatTemplate,
    Turn,
    encode_turns,
    end_tokens,
    load_template,
)
from redrafter_jax.text.tokenizer import require_text


def draft_of(arguments: argparse.Namespace) -> DraftConfig:
    """How trees are drafted.

    Raises:
      InputError: a value is out of its range, or is for the drafter that there is not.
    """
    draft = config_of(DraftConfig, arguments)
    given = [name for name, value in vars(draft).items() if value != getattr(DraftConfig, name)]
    idle = " and ".join(option_of(name) for name in given if name != "lookup_tokens")
    if arguments.no_drafter and idle:
        raise InputError(f"{idle} is for a drafter's trees; give --drafter, or leave it out.")
    return draft


def template_of(arguments: argparse.Namespace, tokenizer: Tokenizer) -> ChatTemplate:
    """How conversations are written.

    Raises:
      InputError: the tokenizer has no template, or does not fit the built-in one.
    """
    name = arguments.chat_template or "tokenizer"
    return load_template(name, arguments.target, tokenizer, "--chat-template ")


def opening_of(arguments: argparse.Namespace) -> list[Turn]:
    """The turns that come before the user's first: the system's, if there is one.

    Raises:
      InputError: it is not valid text.
    """
    if arguments.system is None:
        return []
    require_text(arguments.system, "--system")
    return [{"role": "system", "content": arguments.system}]


class Writing(NamedTuple):
    """How `generate` turns a prompt's text into tokens, and where its continuation ends.

    Attributes:
      encode: from the text to tokens.
      stops: from the target's own end tokens and all texts to the tokens that end a continuation.
      gap: what a continuation begins with that is not part of its text.
    """

    encode: Callable[[str], list[int]]
    stops: Callable[[tuple[int, ...], list[str]], tuple[int, ...]]
    gap: str


def writing_of(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Writing:
    """A prompt as it stands, or with --chat as a message of the template.

    Raises:
      InputError: options of conversations are given without --chat, or there is no template.
    """
    if not arguments.chat:
        for name in ("chat_template", "system"):
            if getattr(arguments, name) is not None:
                option = option_of(name)
                raise InputError(
                    f"{option} is for conversations; give --chat too, or leave it out."
                )
        return Writing(lambda text: tokenizer.encode(text).ids, lambda stops, _: stops, "")
    template, opening = template_of(arguments, tokenizer), opening_of(arguments)

    def turns(text: str) -> list[Turn]:
        return [*opening, {"role": "user", "content": text}]

    return Writing(
        lambda text: encode_turns(template, tokenizer, turns(text)),
        lambda stops, texts: end_tokens(template, tokenizer, stops, list(map(turns, texts))),
        template.gap,
    )


def load_models(arguments: argparse.Namespace, draft: DraftConfig) -> tuple[Target, Drafter]:
    """The target and the drafter, checked for each other before anything is compiled.

    Raises:
      InputError: one of the two cannot be loaded, they do not go together or with the trees, or the
        mesh does not fit.
    """
    mesh = _mesh_of(arguments.mesh_model)
    dtype = arguments.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    target = load_target(arguments.target, dtype, mesh)
    if not arguments.no_drafter:
        drafter = bind_drafter(load_drafter(arguments.drafter, dtype, mesh), draft)
    elif draft.lookup_tokens:
        drafter = PromptLookup(draft.lookup_tokens)
    else:
        drafter = RootOnly()
    drafter.check(target.config)
    return target, drafter


def _mesh_of(parts: int) -> Mesh | None:
    if not 1 <= parts <= jax.device_count():
        raise InputError(
            f"--mesh-model is {parts}; it must be from 1 to the {jax.device_count()} devices here."
        )
    return None if parts == 1 else make_mesh(model=parts)
