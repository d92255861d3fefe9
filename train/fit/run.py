"""`redrafter fit TARGET OUTPUT --minutes M`: from a checkpoint and nothing else to a draft head.

Four stages, each of them a command with a file of settings that can be run by hand: the target
writes conversations, its hidden states are kept, a head is trained on them and tried, and the head
is measured beside the baseline. A short probe of the device decides the sizes, once. A killed run
goes on where it was, to the same head.
"""

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
import yaml
from rich.console import Console

from redrafter_jax.checkpoints.huggingface import load_target, load_target_config
from redrafter_jax.command_line import call_program, make_folder
from redrafter_jax.config import Dtype, TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.settings.files import load_settings
from redrafter_jax.text.chat_template import NO_TEMPLATE, load_template
from redrafter_jax.text.tokenizer import read_tokenizer

from ..config import TrainSettings
from ..data.report import print_line
from ..features import features
from ..loop import train
from ..regenerate.__main__ import regenerate
from ..regenerate.output import format_rows, read_rows
from .plan import EPOCHS, FitPlan, FitRequest, make_plan, read_plan, write_plan
from .probe import measure_rates

# In a wheel the packages `train` and `eval` are inside `redrafter_jax`.
_PROGRAMS = __name__.removesuffix("train.fit.run")
# Rows that the target writes together.
_CPU_ROWS, _GPU_ROWS = 48, 256
# Of training data, unless the target has fewer positions.
_ROW_TOKENS = 512
_TOP_K = 64
_DRAFT_VOCAB_SIZE = 8192
_TREE = {"beam_width": 4, "draft_rounds": 4}
_LOOKUP_TOKENS = 6
_BATCH_SIZE = 4
# The beginning of a text that is no conversation, as its prompt.
_PROMPT_TOKENS = 16


def fit(target: str, output: Path, minutes: float, dtype: Dtype | None) -> None:
    """Fit a head to a target, a folder, hub id or GGUF file, in about the time that is given.

    Without a dtype its parameters are bfloat16 on a GPU, else float32.

    Raises:
      InputError: the target cannot be used, the folder holds another fit, or there is too little
        time.
    """
    on_cpu = jax.default_backend() == "cpu"
    asked = FitRequest(target, dtype or ("float32" if on_cpu else "bfloat16"), minutes)
    console = Console(stderr=True)
    make_folder(output, "the output folder")
    config = load_target_config(target)
    plan = read_plan(output, asked)
    if plan is None:
        plan = _probe(asked, output, config, console)
    else:
        print_line(console, f"going on with the plan in {output / 'plan.json'}")
    _run_stages(plan, output, config, console)


def _probe(asked: FitRequest, folder: Path, config: TargetConfig, console: Console) -> FitPlan:
    """Measure the device and decide the sizes."""
    print_line(console, "measuring how fast this device writes, reads and trains: a minute or two")
    started = time.perf_counter()
    rows = _CPU_ROWS if jax.default_backend() == "cpu" else _GPU_ROWS
    settings = TrainSettings.model_validate(train_settings(asked, folder, config, steps=1))
    rates = measure_rates(load_target(asked.target, asked.target_dtype), settings, rows, _TOP_K)
    spent = (time.perf_counter() - started) / 60
    plan = make_plan(asked, spent, rows, rates, new_tokens=min(96, row_length(config) // 4))
    write_plan(plan, folder)
    return plan


def _run_stages(plan: FitPlan, folder: Path, config: TargetConfig, console: Console) -> None:
    stages = ["write", "read", "train", "measure"]
    started = time.perf_counter()

    def write_settings(name: str, values: dict[str, Any]) -> list[str]:
        """Write a command's settings to a file; the arguments that name it."""
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return ["--config", str(path)]

    def announce(stage: str, what: str, *words: str) -> None:
        index = stages.index(stage)
        left = sum(plan.seconds[each] for each in stages[index:]) / 60
        print_line(console, f"\n{index + 1} of 4: {what}; about {max(left, 1):.0f} min left in all")
        print_line(console, f"  by hand: python -m {_PROGRAMS}{shlex.join(words)}")

    length = row_length(config)
    words = write_settings("regenerate", _regenerate_settings(plan, folder, length))
    written = f"the target writes {plan.tokens:,} tokens of its own"
    announce("write", written, "train", "regenerate", *words)
    regenerate(words)
    tokens = _hold_out(plan, folder)

    steps = max(1, EPOCHS * tokens // (_BATCH_SIZE * length))
    words = write_settings("train", train_settings(plan.asked, folder, config, steps))
    kept = [*words, f"top_k={_TOP_K}"]
    announce(
        "read", "one forward pass keeps the target's hidden states", "train", "features", *kept
    )
    features(kept)

    announce("train", f"{steps} steps of training", "train", *words)
    outcome = train(load_settings(TrainSettings, folder / "train.yaml"), console)
    if outcome.stopped_by is not None:
        print_line(console, f"stopped by {outcome.stopped_by.name}; the same command goes on")
        sys.exit(128 + outcome.stopped_by)

    words = ["compare", *write_settings("compare", _compare_settings(plan, folder))]
    announce("measure", f"{plan.prompts} prompts that it was not trained on", "eval", *words)
    call_program("eval", "commands:evaluate", words)
    minutes = (time.perf_counter() - started) / 60
    head = folder / "run" / "drafter"
    print_line(console, f"the head: {head}, {minutes:.1f} min after the probe; to try it:")
    target = plan.asked.target
    chats = load_template(None, target, read_tokenizer(target), "") is not NO_TEMPLATE
    command = ["chat"] if chats else ["generate", "--prompt", "Once upon a time"]
    models = ["--target", target, "--drafter", str(head)]
    words = [*command, *models, "--beam-width", str(_TREE["beam_width"])]
    print_line(console, f"  python -m redrafter_jax {shlex.join(words)}")
    tuning = _decode_settings(plan, folder, "tune") | {"drafter": str(head), "batch_sizes": [1]}
    words = ["eval", "tune", *write_settings("tune", tuning)]
    print_line(
        console, "to find the fastest tree on this device, which is taken without --beam-width:"
    )
    print_line(console, f"  python -m {_PROGRAMS}{shlex.join(words)}")


def row_length(config: TargetConfig) -> int:
    """Tokens of a row of training data."""
    return min(_ROW_TOKENS, config.position_limit)


def _regenerate_settings(plan: FitPlan, folder: Path, length: int) -> dict[str, Any]:
    """Settings of `train regenerate`: half of the answers greedy, half sampled."""
    return {
        "target": plan.asked.target,
        "target_dtype": plan.asked.target_dtype,
        "data": {"sequence_length": length},
        "prompts": "self",
        "user_openings": "varied",
        "tokens": plan.tokens,
        "batch_size": plan.rows,
        "temperatures": [0.0, 1.0],
        "output": str(folder / "written.jsonl"),
    }


def train_settings(
    asked: FitRequest, folder: Path, config: TargetConfig, steps: int
) -> dict[str, Any]:
    """Settings of training: the recurrent head of the paper, over the most frequent tokens."""
    return {
        "target": asked.target,
        "target_dtype": asked.target_dtype,
        "drafter": {
            "exit_dim": config.hidden_size,
            "num_draft_layers": 2,
            "draft_vocab_size": min(_DRAFT_VOCAB_SIZE, config.vocab_size),
            "initial_head": "target",
        },
        "draft_rounds": _TREE["draft_rounds"],
        "data": {
            "sources": [{"files": [str(folder / "training.jsonl")]}],
            "sequence_length": row_length(config),
            "pack": True,
        },
        "features": str(folder / "features"),
        "loss": {"soft": 1.0},
        "acceptance": {
            "every": max(1, steps // 4),
            "prompts": str(folder / "held_out.jsonl"),
            "max_new_tokens": min(64, row_length(config) // 4),
            "draft": _TREE,
        },
        "optimizer": {"rule": "muon", "learning_rate": 4e-3, "batch_size": _BATCH_SIZE},
        "steps": steps,
        "checkpoint_every": 50,
        "output_dir": str(folder / "run"),
    }


def _decode_settings(plan: FitPlan, folder: Path, report: str) -> dict[str, Any]:
    """Settings of whatever decodes the held-out prompts."""
    return {
        "target": plan.asked.target,
        "dtype": plan.asked.target_dtype,
        "prompts": str(folder / "held_out.jsonl"),
        "samplings": [{"temperature": 0.0}, {"temperature": 0.7}],
        "max_new_tokens": plan.new_tokens,
        "report_dir": str(folder / report),
    }


def _compare_settings(plan: FitPlan, folder: Path) -> dict[str, Any]:
    """Settings of `eval compare`."""
    drafter = str(folder / "run" / "drafter")
    return _decode_settings(plan, folder, "report") | {
        "drafters": {
            "head": {"drafter": drafter, "draft": _TREE},
            "head and lookup": {
                "drafter": drafter,
                "draft": _TREE | {"lookup_tokens": _LOOKUP_TOKENS},
            },
        },
    }


def _hold_out(plan: FitPlan, folder: Path) -> int:
    """Hold out the first conversations for measuring; returns how many tokens the others have."""
    rows = read_rows(folder / "written.jsonl")
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    held_out = set(seeds[: plan.prompts])
    tokenizer = read_tokenizer(plan.asked.target)
    prompts = [
        row["questions"][0]
        if row.get("questions")
        else tokenizer.decode(row["input_ids"][:_PROMPT_TOKENS])
        for row in rows
        if row["seed"] in held_out and row.get("row", 0) == 0
    ]
    left = [row for row in rows if row["seed"] not in held_out]
    if not left:
        raise InputError(
            f"The target wrote {len(seeds)} texts, no more than the {plan.prompts} that are held "
            "out; give more --minutes."
        )
    lines = format_rows({"prompt": prompt} for prompt in prompts)
    (folder / "held_out.jsonl").write_text(lines, encoding="utf-8")
    (folder / "training.jsonl").write_text(format_rows(left), encoding="utf-8")
    return sum(len(row["input_ids"]) for row in left)
