"""Loading of the target's files and encoding of the prompts, for commands that decode."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from jax.sharding import Mesh

from redrafter_jax.config import SamplingConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import TargetFiles, open_target
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_rows, data_shards
from redrafter_jax.progress import track
from redrafter_jax.text.chat_template import ChatTemplate, find_template
from redrafter_jax.text.prompts import (
    EncodedPrompts,
    PromptEncoding,
    encode_later_turns,
    encode_prompts,
    read_prompts,
    rows_decoded,
    tokenize_to_length,
)

from .benchmark import baseline, decode_batch, make_batches
from .config import RowSettings, TargetSettings

Texts = Sequence[Sequence[int]]
Answer = Callable[[EncodedPrompts], Texts]


class FoundTarget(NamedTuple):
    """A target whose weights are not loaded yet.

    Attributes:
      settings: settings of the command.
      mesh: mesh of devices; None for a single device.
      files: files of the target.
      template: the chat template of the prompts.
    """

    settings: TargetSettings
    mesh: Mesh | None
    files: TargetFiles
    template: ChatTemplate


def find_target(settings: TargetSettings) -> FoundTarget:
    """Read the target's files, except its weights.

    Raises:
      InputError: a file cannot be used, or there are too few devices.
    """
    mesh, files = settings.mesh.build(), open_target(settings.target)
    files.match()  # first, for its error on folders of another kind
    template = find_template(settings.chat_template, files, "chat_template=")
    return FoundTarget(settings, mesh, files, template)


class Questions(NamedTuple):
    """The encoded first turns of all prompts, and the settings for encoding later turns.

    Attributes:
      how: how turns are encoded.
      rows: settings with the limits of the answers.
      batch_size: number of rows that are decoded together; None for all rows.
      first: the encoded first turns.
    """

    how: PromptEncoding
    rows: RowSettings
    batch_size: int | None
    first: EncodedPrompts

    def encode_turns(
        self,
        target: Target,
        sampling: SamplingConfig,
        recall: Callable[[Answer, EncodedPrompts], Texts] | None = None,
    ) -> EncodedPrompts:
        """Encode all turns; a later turn follows the baseline's answers to earlier turns.

        Args:
          target: the loaded target, which writes these answers.
          sampling: sampling settings of the answers.
          recall: `recall(answer, asked)` returns the answers to the turn `asked`: stored answers,
            or `answer(asked)`, which decodes them. None: all answers are decoded.

        Raises:
          InputError: a later turn does not fit after the earlier answers.
        """

        def answer(asked: EncodedPrompts) -> Texts:
            batches = make_batches(asked, self.batch_size, sampling, self.rows)
            work = track(batches, len(batches), f"answer turn {asked.turns[0]} for the next")
            return [row for batch in work for row in decode_batch(baseline(target), batch).tokens]

        answer_turn = answer if recall is None else partial(recall, answer)
        encoded = encode_later_turns(self.how, self.first, answer_turn)
        return encoded._replace(stop_tokens=()) if self.rows.stop == "never" else encoded


def read_questions(
    found: FoundTarget,
    rows: RowSettings,
    batch_size: int | None,
    lengths: Sequence[int] | None = None,
) -> Questions:
    """Read the prompts, encode their first turns, and check that they fit the target and the mesh.

    Args:
      found: the target.
      rows: which prompts are decoded, and the limits of their answers.
      batch_size: number of rows that are decoded together; None for all rows.
      lengths: exact prompt lengths, which the rows use in turn; prompts are then plain texts. None
        leaves prompts as they are.

    Raises:
      InputError: the prompts cannot be used, or do not fit.
    """
    path, positions = found.settings.prompts, found.files.config.position_limit
    prompts = read_prompts(path, rows.prompt_count, rows.turns if lengths is None else 1)
    for count in rows_decoded(prompts):
        _check_batches(count, batch_size, found.mesh)
    limit, stops = rows.max_new_tokens, found.files.config.eos_token_ids
    how = PromptEncoding(found.template, found.files.tokenizer, stops, limit, positions)
    if lengths is None:
        return Questions(how, rows, batch_size, encode_prompts(how, prompts))
    if max(lengths) + limit > positions:
        raise InputError(
            f"prompt_tokens={max(lengths)} and max_new_tokens={limit} make {max(lengths) + limit} "
            f"tokens, but the target has {positions} positions; lower one of the two."
        )
    # Read the whole file, so that the last prompts can be joined with further ones too.
    source = read_prompts(path)
    token_rows = [
        tokenize_to_length(source, found.files.tokenizer, row, lengths[row % len(lengths)])
        for row in range(len(prompts))
    ]
    asked = EncodedPrompts(prompts, [1] * len(prompts), token_rows, "none", stops)
    return Questions(how, rows, batch_size, asked)


def _check_batches(count: int, batch_size: int | None, mesh: Mesh | None) -> None:
    """Refuse batches, including the last one, that the mesh does not divide evenly."""
    size = min(batch_size or count, count)
    check_rows(size, mesh, "batch_size" if size < count else "The number of prompts")
    parts, last = data_shards(mesh), count % size
    if last % parts:
        raise InputError(
            f"{count} prompts in batches of {size} leave {last} for the last batch, which "
            f"mesh.data={parts} does not divide; change prompt_count or batch_size."
        )
