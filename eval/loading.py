"""What a command that decodes prompts begins with: both models, and the prompts as tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from eval.config import AcceptanceSettings, EvalSettings, RanksSettings
from redrafter_jax.command_line import load_tokenizer, make_folder
from redrafter_jax.config import DraftConfig
from redrafter_jax.drafter import Drafter
from redrafter_jax.hub import load_drafter, load_target
from redrafter_jax.prompts import Prompt, read_prompts, tokenize
from redrafter_jax.requests import check_pair
from redrafter_jax.target import Target


class Loaded(NamedTuple):
    """A target, a drafter for it, and prompts with their tokens."""

    target: Target
    drafter: Drafter
    prompts: list[Prompt]
    token_rows: list[list[int]]


def load(
    settings: EvalSettings | AcceptanceSettings | RanksSettings, drafts: Sequence[DraftConfig]
) -> Loaded:
    """Read and check everything that the settings name, and make the folder of the report.

    Args:
      settings: the command's.
      drafts: every way in which trees will be drafted.

    Raises:
      InputError: a file or a prompt cannot be used, or the two models do not fit.
    """
    mesh = None if isinstance(settings, RanksSettings) else settings.mesh.build()
    prompts = read_prompts(settings.prompts, settings.prompt_count)
    tokenizer = load_tokenizer(settings.target)
    make_folder(settings.report_dir, "report_dir")
    target = load_target(settings.target, settings.dtype, mesh)
    drafter = load_drafter(settings.drafter, settings.dtype, mesh)
    for draft in drafts:
        check_pair(target.config, drafter.config, draft)
    positions = target.config.position_limit
    token_rows = tokenize(prompts, tokenizer, settings.max_new_tokens, positions)
    return Loaded(target, drafter, prompts, token_rows)
