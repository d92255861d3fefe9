"""What a command that decodes prompts begins with: both models, and the prompts as tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from redrafter_jax.checkpoints.huggingface import load_drafter, load_target
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.settings.sections import check_batch
from redrafter_jax.text.prompts import Prompt, read_prompts, tokenize
from redrafter_jax.text.tokenizer import load_tokenizer

from .config import AcceptanceSettings, EvalSettings


class Loaded(NamedTuple):
    """A target, a drafter for it, and prompts with their tokens."""

    target: Target
    drafter: DraftModel
    prompts: list[Prompt]
    token_rows: list[list[int]]


def load(settings: EvalSettings | AcceptanceSettings, drafts: Sequence[DraftConfig]) -> Loaded:
    """Read and check everything that the settings name, and make the folder of the report.

    Args:
      settings: the command's.
      drafts: every way in which trees will be drafted.

    Raises:
      InputError: a file or a prompt cannot be used, or the two models do not fit.
    """
    prompts = read_prompts(settings.prompts, settings.prompt_count)
    mesh = settings.mesh.build()
    check_batches(len(prompts), settings.batch_size, mesh)
    tokenizer = load_tokenizer(settings.target)
    if is_first():
        make_folder(settings.report_dir, "report_dir")
    target = load_target(settings.target, settings.dtype, mesh)
    drafter = load_drafter(settings.drafter, settings.dtype, mesh)
    for draft in drafts:
        check_pair(target.config, drafter.config, draft)
    positions = target.config.position_limit
    token_rows = tokenize(prompts, tokenizer, settings.max_new_tokens, positions)
    return Loaded(target, drafter, prompts, token_rows)


def check_batches(count: int, batch_size: int | None, mesh: Mesh | None) -> None:
    """Refuse batches of so many prompts that the mesh does not divide, the last one among them.

    Raises:
      InputError: one is no multiple of the mesh's `data`.
    """
    size = min(batch_size or count, count)
    check_batch("batch_size" if size < count else "the number of prompts", size, mesh)
    parts, last = data_shards(mesh), count % size
    if last % parts:
        raise InputError(
            f"{count} prompts in batches of {size} leave {last} for the last one, which "
            f"mesh.data={parts} does not divide; change prompt_count or batch_size."
        )
