"""Loads the models, the chat template and the stop tokens that the options of a command name."""

import argparse
import json
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from redrafter_jax.commands.option_groups import MIRROR, config_of, given_options, option_of
from redrafter_jax.commands.terminal import log
from redrafter_jax.config import Grammar, MirrorConfig, SamplingConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead, check_drafting, outline
from redrafter_jax.engine.trees import bind_models
from redrafter_jax.errors import InputError
from redrafter_jax.files.locate import TREE_TABLE
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.files.tree_table import TreeTable, find_tree_table
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import make_mesh
from redrafter_jax.streaming import KeptCache, Update, stream
from redrafter_jax.text.chat_template import (
    NO_TEMPLATE,
    NONE,
    OWN,
    ChatTemplate,
    PromptFormat,
    end_tokens,
    find_template,
    user_turn,
)
from redrafter_jax.text.tokenizer import require_text, split_stops

if TYPE_CHECKING:
    from redrafter_jax.files.drafter_files import FoundDrafter
    from redrafter_jax.text.grammars import CompiledGrammar


class TextDecoder(NamedTuple):
    """The models and settings that decode a command's texts.

    Attributes:
      target: the target model.
      drafter: the drafter, checked for this target; None for autoregressive decoding.
      tree: the shape of the drafter's trees, or a table of shapes from `python -m eval tune`; None
        if nothing is drafted.
      adaptive: whether drafting stops while a tree costs more time than it saves.
      sampling: sampling settings of all rows.
      format: the tokenizer, the chat template, and what ends a continuation.
      grammar: the grammar that constrains the texts; None for no constraint.
      mirror: settings for drafting the next trees while the target verifies; None drafts them
        afterwards.
    """

    target: Target
    drafter: Drafter | LoadedHead | None
    tree: TreeConfig | TreeTable | None
    adaptive: bool
    sampling: SamplingConfig
    format: PromptFormat
    grammar: "CompiledGrammar | None" = None
    mirror: MirrorConfig | None = None

    def steps_per_update(self, most: int) -> int:
        """Return the steps between two updates: 1 if stop strings can end a row, else `most`."""
        return 1 if self.format.stop_strings else most

    def stream(
        self,
        prompts: list[list[int]],
        max_new_tokens: int | list[int],
        seeds: list[int],
        *,
        steps_per_yield: int = 1,
        kept_cache: KeptCache | None = None,
    ) -> Generator[Update]:
        """Decode prompts of token ids, one row for each; see `redrafter_jax.stream`."""
        return stream(
            self.target,
            self.drafter,
            prompts,
            max_new_tokens=max_new_tokens,
            tree=self.tree,
            adaptive=self.adaptive,
            sampling=self.sampling,
            seeds=seeds,
            eos_token_ids=self.format.stop_tokens,
            detokenize=self.format.tokenizer.decode,
            stop_strings=self.format.stop_strings,
            steps_per_yield=steps_per_yield,
            kept_cache=kept_cache,
            grammars=self.grammar,
            mirror=self.mirror,
        )


def open_decoder(
    arguments: argparse.Namespace, files: TargetFiles, texts: Sequence[str], batch_size: int = 1
) -> TextDecoder:
    """Load the models and settings that the options name, and check them before any compilation.

    Args:
      arguments: the command's options.
      files: the target's files.
      texts: messages or prompts. The first one that the chat template accepts shows how an answer
        ends.
      batch_size: number of rows that will be decoded together.

    Raises:
      InputError: a value, a file or a folder cannot be used, or two options contradict each other.
    """
    sampling, mirror = config_of(SamplingConfig, arguments), mirror_of(arguments)
    found, tree = find_drafting(arguments, files)
    tree = _tree_for(tree, batch_size, sampling.temperature)
    stops = arguments.stop or ()
    prompt_format = load_prompt_format(arguments, files, texts, stops)
    if arguments.ignore_eos:
        ends, _ = split_stops(prompt_format.tokenizer, stops)
        prompt_format = prompt_format._replace(stop_tokens=ends)
    grammar = _grammar_of(arguments, files, prompt_format)
    target, model, tree = load_models(arguments, files, found, tree)
    drafter, _ = bind_models(target, model, tree)
    adaptive = adaptive_of(arguments)
    return TextDecoder(target, drafter, tree, adaptive, sampling, prompt_format, grammar, mirror)


def _grammar_of(
    arguments: argparse.Namespace, files: TargetFiles, form: PromptFormat
) -> "CompiledGrammar | None":
    if arguments.json_schema is None and arguments.regex is None:
        return None
    from redrafter_jax.text.grammars import GrammarCompiler  # only needed with a grammar

    compiler = GrammarCompiler(form.tokenizer, files.config.vocab_size, form.stop_tokens)
    return compiler.compile(Grammar(read_schema(arguments), arguments.regex))


def read_schema(arguments: argparse.Namespace) -> Any:
    """Read the JSON Schema of `--json-schema`; return None if the option is not given."""
    if arguments.json_schema is None:
        return None
    try:
        return json.loads(arguments.json_schema.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--json-schema {arguments.json_schema}: {error}") from None
    except RecursionError:
        raise InputError(
            f"--json-schema {arguments.json_schema} is nested too deeply; give a flatter schema."
        ) from None


def load_prompt_format(
    arguments: argparse.Namespace,
    files: TargetFiles,
    texts: Sequence[str],
    stops: Sequence[str] = (),
) -> PromptFormat:
    """Load the target's tokenizer and the chat template, and find what ends an answer.

    Args:
      arguments: the command's options.
      files: the target's files.
      texts: messages. The first one that the chat template accepts shows how an answer ends.
      stops: strings that also end a continuation.

    Raises:
      InputError: a file cannot be used, or an option contradicts the template.
    """
    config = files.config  # first, because it refuses files that are not a target
    tokenizer = files.tokenizer
    template, opening = _template_of(arguments, files), []
    if arguments.system is not None:
        require_text(arguments.system, "--system")
        opening = [{"role": "system", "content": arguments.system}]
    ends, strings = split_stops(tokenizer, stops)
    asked = ([*opening, user_turn(text)] for text in texts)
    stop_tokens = end_tokens(template, tokenizer, (*config.eos_token_ids, *ends), asked)
    return PromptFormat(tokenizer, template, opening, stop_tokens, strings)


def _template_of(arguments: argparse.Namespace, files: TargetFiles) -> ChatTemplate:
    name, option = arguments.chat_template, option_of("chat_template") + " "
    if arguments.chat and name == NONE:
        raise InputError(
            "--chat-template is none, but a conversation needs a chat template; name a template, "
            "or leave the option out."
        )
    asked = OWN if arguments.chat and name is None else name
    template = find_template(asked, files, option, arguments.template_arguments)
    if template is NO_TEMPLATE and arguments.system is not None:
        raise InputError(
            "--system needs a chat template, but the prompt is continued as it is; give "
            "--chat-template, or leave --system out."
        )
    return template


def find_drafting(
    arguments: argparse.Namespace, files: TargetFiles
) -> tuple["FoundDrafter | None", TreeConfig | TreeTable]:
    """Find the drafter that the options name, and its tree or table of trees; load no weights.

    The tree comes from the options, or else from the drafter's table. If neither states a setting
    of the tree, the setting has the drafter's default.

    Returns:
      The drafter, or None with --no-drafter, and the tree or the table.

    Raises:
      InputError: an option, the table or one of the drafter's files cannot be used.
    """
    given = given_options(TreeConfig, arguments)
    idle = ", ".join(option_of(name) for name in given if name != "lookup_tokens")
    if idle and arguments.no_drafter:
        raise InputError(f"Only a drafter's trees use {idle}; give --drafter, or leave {idle} out.")
    if arguments.no_drafter:
        return None, config_of(TreeConfig, arguments)
    from redrafter_jax.files.drafter_files import find_drafter  # all kinds' modules

    found = find_drafter(arguments.drafter, files)
    drafter = outline(found.config)
    tree = config_of(TreeConfig, arguments, drafter.default_tree)
    check_drafting(files.config, drafter, tree)
    return found, tree if given else find_tree_table(arguments.drafter) or tree


def adaptive_of(arguments: argparse.Namespace) -> bool:
    """Return whether drafting stops while a tree costs more time than it saves.

    `--adaptive` decides. Without this option the result is True, unless options set the tree or
    `--mirror-layer` is given.
    """
    if arguments.adaptive is not None:
        return arguments.adaptive == "on"
    return not given_options(TreeConfig, arguments) and mirror_of(arguments) is None


def mirror_of(arguments: argparse.Namespace) -> MirrorConfig | None:
    """Return the settings for drafting the next trees while the target verifies.

    The result is None without `--mirror-layer`: trees are then drafted after verification.

    Raises:
      InputError: a value is outside its limits, or another mirror option is given without
        `--mirror-layer`.
    """
    given = [option_of(MIRROR + name) for name in given_options(MirrorConfig, arguments, MIRROR)]
    layer = option_of(MIRROR + "layer")
    if given and layer not in given:
        verb, them = ("are", "them") if len(given) > 1 else ("is", "it")
        raise InputError(
            f"{' and '.join(given)} {verb} for drafting while the target verifies; give {layer} "
            f"too, or leave {them} out."
        )
    return config_of(MirrorConfig, arguments, prefix=MIRROR) if given else None


def _tree_for(
    tree: TreeConfig | TreeTable, batch_size: int, temperature: float
) -> TreeConfig | TreeTable | None:
    """Return the tree, or a table with only the nearest tree, and log it; None for no drafting."""
    if isinstance(tree, TreeConfig):
        return tree
    tuned = tree.nearest(batch_size, temperature)
    place = f"batch size {tuned.batch_size} at temperature {tuned.temperature:g} on {tree.device}"
    if tuned.tree is None:
        log(f"{TREE_TABLE}: no tree beats the baseline for {place}; the drafter is not used")
        return None
    words = ", ".join(
        f"{name}={value}"
        for name, value in vars(tuned.tree).items()
        if value != getattr(TreeConfig, name)
    )
    speedup = f"{tuned.measured_speedup:.2f} times the baseline"
    log(f"{TREE_TABLE}: {words or 'the default tree'}, {speedup} for {place}")
    return replace(tree, trees=(tuned,))


def load_models(
    arguments: argparse.Namespace,
    files: TargetFiles,
    found: "FoundDrafter | None",
    tree: TreeConfig | TreeTable | None,
) -> tuple[Target, LoadedHead | Drafter | None, TreeConfig | TreeTable | None]:
    """Load the target and its drafter on the mesh that the options name, and choose the trees.

    Args:
      arguments: the command's options.
      files: the target's files.
      found: the drafter, as `find_drafting` returned it.
      tree: the shape of the trees, or a table of shapes; None for no drafter.

    Returns:
      The target; the drafter, which may be prompt lookup; and the trees. Drafter and trees are None
      if nothing is drafted.

    Raises:
      InputError: a file cannot be used, or there are too few devices.
    """
    parts = arguments.mesh_model
    if not 1 <= parts <= jax.device_count():
        raise InputError(
            f"--mesh-model is {parts}; it must be from 1 to {jax.device_count()}, the number of "
            "devices."
        )
    if parts < jax.device_count() and jax.process_count() > 1:
        raise InputError(
            f"--mesh-model is {parts}, but the {jax.process_count()} processes of this job have "
            f"{jax.device_count()} devices; give --mesh-model {jax.device_count()}, or start fewer "
            "processes."
        )
    mesh = None if parts == 1 else make_mesh(model=parts)
    dtype = dtype_of(arguments)
    target = files.load(dtype, mesh)
    if tree is None:
        return target, None, None
    if found is not None:
        from redrafter_jax.files.drafter_files import load_found  # all kinds' modules

        return target, load_found(found, dtype, mesh, target), tree
    assert isinstance(tree, TreeConfig), "tables are of drafters"
    if not tree.lookup_tokens:
        return target, None, None
    from redrafter_jax.drafters.lookup import PromptLookup

    return target, PromptLookup(), TreeConfig(beam_width=1, draft_rounds=tree.lookup_tokens)


def dtype_of(arguments: argparse.Namespace) -> str:
    """Return the dtype that the options name, or the default of the device."""
    return arguments.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
