"""The settings of a fit's stages, and the held-out prompts."""

from pathlib import Path
from typing import Any

import jax

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target

from ..regenerate.output import format_rows, read_rows
from .ending import SAMPLINGS
from .plan import FitPlan, FitRequest

# Rows that the target writes together, and rows per optimizer step.
_CPU_ROWS, _GPU_ROWS = 32, 256
_CPU_BATCH, _GPU_BATCH = 2, 4
# Number of tokens in a training row, unless the target has fewer positions.
_ROW_TOKENS = 512
TOP_K = 64
_DRAFT_VOCAB_SIZE = 8192
_DRAFT_ROUNDS = 4
# Candidate trees of the tuner; a node is costly on a CPU and nearly free on a GPU.
_CPU_TREES = [
    {"beam_width": 1, "draft_rounds": [1, 2, 3, 4]},
    {"beam_width": 1, "draft_rounds": [1, 2], "num_nodes": [3, 4], "rerank": True},
    {"beam_width": 2, "draft_rounds": [2, 3], "num_nodes": [4, 5]},
    {"beam_width": 4, "draft_rounds": 4, "num_nodes": 9},
]
_GPU_TREES = [
    *_CPU_TREES,
    {"beam_width": 4, "draft_rounds": 4},
    {"beam_width": 8, "draft_rounds": 4, "num_nodes": [17, None]},
]
# The tuner's batch sizes: one per `TUNING_SECONDS` of its time, and at least the first.
BATCH_SIZES, TUNING_SECONDS = (1, 8, 4, 2), 180
# Prompt length of held-out texts that are not conversations.
_PROMPT_TOKENS = 16


def on_cpu() -> bool:
    """Whether JAX's default backend is the CPU."""
    return jax.default_backend() == "cpu"


def rows_written() -> int:
    """Number of rows that the target writes together."""
    return _CPU_ROWS if on_cpu() else _GPU_ROWS


def trees() -> list[dict[str, Any]]:
    """The candidate trees of the tuner, as grids for `eval tune`."""
    return _CPU_TREES if on_cpu() else _GPU_TREES


def batch_size() -> int:
    """Number of rows per optimizer step."""
    return _CPU_BATCH if on_cpu() else _GPU_BATCH


def row_length(config: TargetConfig) -> int:
    """Length of a row of training data, in tokens."""
    return min(_ROW_TOKENS, config.position_limit)


def regenerate_settings(plan: FitPlan, folder: Path, length: int) -> dict[str, Any]:
    """Settings of `train regenerate`; half of the answers are greedy, half are sampled.

    `length` is the number of tokens in a row of training data.
    """
    return {
        "target": plan.asked.target,
        "target_dtype": plan.asked.target_dtype,
        "data": {"sequence_length": length} | _template(plan.asked),
        "prompts": "self",
        "user_openings": "varied",
        "tokens": plan.tokens,
        "batch_size": plan.rows,
        "max_new_tokens": plan.answer_tokens,
        "temperatures": [0.0, 1.0],
        "output": str(folder / "written.jsonl"),
    }


def train_settings(
    asked: FitRequest, folder: Path, config: TargetConfig, steps: int
) -> dict[str, Any]:
    """Settings of training: ReDrafter's recurrent head, with a reduced draft vocabulary."""
    return {
        "target": asked.target,
        "target_dtype": asked.target_dtype,
        "drafter": {
            "exit_dim": config.hidden_size,
            "num_draft_layers": 2,
            "draft_vocab_size": min(_DRAFT_VOCAB_SIZE, config.vocab_size),
            "initial_head": "target",
        },
        "draft_rounds": _DRAFT_ROUNDS,
        "data": {
            "sources": [{"files": [str(folder / "training.jsonl")]}],
            "sequence_length": row_length(config),
            "pack": True,
        }
        | _template(asked),
        "features": str(folder / "features"),
        "loss": {"soft": 1.0},
        "optimizer": {"rule": "muon", "learning_rate": 4e-3, "batch_size": batch_size()},
        "steps": steps,
        "checkpoint_every": min(50, max(1, steps // 10)),
        "output_dir": str(folder / "run"),
    }


def decode_settings(plan: FitPlan, folder: Path, report: str, prompts: str) -> dict[str, Any]:
    """Common settings of `eval tune` and `eval compare`, for one file of held-out prompts.

    Args:
      plan: the plan of the fit.
      folder: folder of the fit.
      report: name of the output folder in `folder`.
      prompts: name of the prompt file in `folder`, without its suffix.
    """
    return {
        "target": plan.asked.target,
        "dtype": plan.asked.target_dtype,
        "prompts": str(folder / f"{prompts}.jsonl"),
        "samplings": SAMPLINGS,
        "max_new_tokens": plan.new_tokens,
        "report_dir": str(folder / report),
    } | _template(plan.asked)


def _template(asked: FitRequest) -> dict[str, Any]:
    """The setting of the chat template; empty for the default, which differs between commands."""
    return {} if asked.chat_template is None else {"chat_template": asked.chat_template}


def hold_out(plan: FitPlan, folder: Path) -> int:
    """Write three files: prompts for the tuner, prompts for the report, and the training data.

    The prompts are from conversations whose questions are of about median length. These
    conversations are left out of the training data.

    Returns:
      Number of tokens of the training data.

    Raises:
      InputError: no conversation is left for training.
    """
    rows = read_rows(folder / "written.jsonl")
    openings = {row["seed"]: row["loss_mask"].index(1) for row in rows if row.get("row", 0) == 0}
    tuning = plan.prompts // 2
    count = tuning + plan.prompts
    # Choose similar lengths, since every array length compiles another program.
    first = max(0, len(openings) - count) // 2
    seeds = sorted(openings, key=lambda seed: (openings[seed], seed))[first : first + count]
    held_out = {"tuning_prompts": seeds[1::3], "held_out": [*seeds[::3], *seeds[2::3]]}
    left = [row for row in rows if row["seed"] not in seeds]
    if not left:
        raise InputError(
            f"The target wrote {len(openings)} texts, but {count} are held out, so none is left "
            "for training; give more --minutes, and another folder."
        )
    tokenizer = open_target(plan.asked.target).tokenizer
    for name, own in held_out.items():
        prompts = [
            row["questions"][0]
            if row.get("questions")
            else tokenizer.decode(row["input_ids"][:_PROMPT_TOKENS])
            for row in rows
            if row["seed"] in own and row.get("row", 0) == 0
        ]
        lines = format_rows({"prompt": prompt} for prompt in prompts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "training.jsonl").write_text(format_rows(left), encoding="utf-8")
    return sum(len(row["input_ids"]) for row in left)
