"""Arguments that the commands that decode share, and what is made of them."""

import argparse
from typing import get_args

import jax
from jax.sharding import Mesh
from tokenizers import Tokenizer

from redrafter_jax.checkpoints.huggingface import load_drafter, load_target
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import make_mesh
from redrafter_jax.text.chat_template import ChatTemplate, TemplateName, Turn, load_template
from redrafter_jax.text.tokenizer import require_text


def add_models(command: argparse.ArgumentParser) -> None:
    """Which target and drafter to load, and how."""
    command.add_argument("--target", required=True, help="folder or hub id of the target")
    drafters = command.add_mutually_exclusive_group(required=True)
    drafters.add_argument("--drafter", help="folder or hub id of a drafter trained for it")
    drafters.add_argument("--no-drafter", action="store_true", help="plain decoding")
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the parameters (bfloat16 on a GPU, else float32)",
    )
    command.add_argument(
        "--mesh-model",
        type=int,
        default=1,
        metavar="N",
        help="devices that share the work, each with a part of the weights (%(default)s)",
    )


def add_choices(command: argparse.ArgumentParser) -> None:
    """How the target chooses tokens."""
    add = command.add_argument_group("how tokens are chosen").add_argument
    add("--temperature", type=float, default=0.0, help="0 takes the most likely token (0)")
    add("--top-k", type=int, help="above temperature 0: keep the k most likely tokens")
    add(
        "--top-p",
        type=float,
        help="likewise: keep the most likely tokens that reach this probability",
    )
    add(
        "--min-p",
        type=float,
        help="likewise: drop tokens below this share of the best one's probability",
    )
    add("--stop", action="append", metavar="STRING", help="end before this text; may be repeated")
    add("--seed", type=int, default=0, help="the same seed gives the same text (%(default)s)")


def add_draft(command: argparse.ArgumentParser) -> None:
    """How trees are drafted."""
    width, rounds = DraftConfig.beam_width, DraftConfig.draft_rounds
    title = "how drafts are made, which changes the speed but never the text"
    add = command.add_argument_group(title).add_argument
    add("--beam-width", type=int, default=width, help="beams kept per round (%(default)s)")
    add("--draft-rounds", type=int, default=rounds, help="tokens per beam (%(default)s)")
    add("--num-nodes", type=int, help="tree nodes to verify, root and copied ones included (all)")
    sharpness = DraftConfig.sharpness
    add("--sharpness", type=float, default=sharpness, help="factor on draft scores (%(default)s)")
    copied = DraftConfig.lookup_tokens
    add(
        "--lookup-tokens",
        type=int,
        default=copied,
        help="prompt lookup: of the nodes, so many that copy what followed when the text last read "
        "so (%(default)s)",
    )


def add_template(command: argparse.ArgumentParser) -> None:
    """How conversations are written."""
    command.add_argument(
        "--chat-template",
        choices=get_args(TemplateName),
        help="how turns become text: by the tokenizer's own template (the default) or a built-in",
    )
    command.add_argument("--system", metavar="TEXT", help="a system turn that comes first")


def sampling_of(arguments: argparse.Namespace) -> SamplingConfig:
    """What `add_choices` was given.

    Raises:
      InputError: a value is out of its range.
    """
    return SamplingConfig(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
    )


def refuse_idle_filters(arguments: argparse.Namespace) -> None:
    """Refuse filters where `add_choices` was given no temperature for them to act at.

    Raises:
      InputError: there are some.
    """
    given = [name for name in ("top_k", "top_p", "min_p") if getattr(arguments, name) is not None]
    if given and arguments.temperature == 0:
        options = " and ".join("--" + name.replace("_", "-") for name in given)
        raise InputError(
            f"--temperature is 0, which takes the most likely token whatever {options} would keep; "
            f"give a --temperature above 0, or leave {options} out."
        )


def draft_of(arguments: argparse.Namespace) -> DraftConfig | None:
    """What `add_draft` was given; None without a drafter.

    Raises:
      InputError: a value is out of its range, or nothing is drafted.
    """
    draft = DraftConfig(
        beam_width=arguments.beam_width,
        draft_rounds=arguments.draft_rounds,
        num_nodes=arguments.num_nodes,
        sharpness=arguments.sharpness,
        lookup_tokens=arguments.lookup_tokens,
    )
    if arguments.no_drafter and draft != DraftConfig():
        raise InputError(
            "--no-drafter drafts nothing; leave --beam-width, --draft-rounds, --num-nodes, "
            "--sharpness and --lookup-tokens out, or give --drafter."
        )
    return None if arguments.no_drafter else draft


def template_of(arguments: argparse.Namespace, tokenizer: Tokenizer) -> ChatTemplate:
    """What `add_template` was given.

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


def load_models(arguments: argparse.Namespace) -> tuple[Target, DraftModel | None]:
    """What `add_models` was given; no drafter for plain decoding.

    Raises:
      InputError: one of the two cannot be loaded, or the mesh does not fit.
    """
    mesh = _mesh_of(arguments.mesh_model)
    dtype = arguments.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    target = load_target(arguments.target, dtype, mesh)
    return target, None if arguments.no_drafter else load_drafter(arguments.drafter, dtype, mesh)


def _mesh_of(parts: int) -> Mesh | None:
    if not 1 <= parts <= jax.device_count():
        raise InputError(
            f"--mesh-model is {parts}; it must be from 1 to the {jax.device_count()} devices here."
        )
    return None if parts == 1 else make_mesh(model=parts)
