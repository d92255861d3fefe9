"""`redrafter fit TARGET OUTPUT --minutes M`: from a checkpoint and nothing else to a draft head.

Four stages, each of them a command with a file of settings that can be run by hand: the target
writes conversations, its hidden states are kept, a head is trained on them and tried, and the head
is measured beside the baseline. A short probe of the device decides the sizes, once; a run that was
killed goes on where it was, to the same head.
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
from redrafter_jax.text.tokenizer import load_tokenizer

from ..config import TrainSettings
from ..data.report import print_line
from ..features import features
from ..loop import train
from ..regenerate.__main__ import regenerate
from ..regenerate.output import format_rows, read_rows
from .plan import EPOCHS, FitPlan, FitRequest, make_plan, read_plan, write_plan
from .probe import measure_rates

# In a wheel the programs `train` and `eval` lie below `redrafter_jax`.
_PROGRAMS = __name__.removesuffix("train.fit.run")
# Rows that the target writes together.
_ROWS = {"cpu": 48}
_ROWS_ELSEWHERE = 256
# Of a row of the training data, unless the target has fewer positions.
_LENGTH = 512
_TOP_K = 64
_DRAFTED = 8192
_TREE = {"beam_width": 4, "draft_rounds": 4}
_LOOKUP = 6
_BATCH = 4
# Of a text that is no conversation, the part that it is asked to go on from.
_BEGINNING = 16


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
    rows = _ROWS.get(jax.default_backend(), _ROWS_ELSEWHERE)
    settings = TrainSettings.model_validate(training_settings(asked, folder, config, steps=1))
    rates = measure_rates(load_target(asked.target, asked.target_dtype), settings, rows, _TOP_K)
    spent = (time.perf_counter() - started) / 60
    plan = make_plan(asked, spent, rows, rates, new_tokens=min(96, length_of(config) // 4))
    write_plan(plan, folder)
    return plan


def _run_stages(plan: FitPlan, folder: Path, config: TargetConfig, console: Console) -> None:
    stages = ["write", "read", "train", "measure"]
    started = time.perf_counter()

    def settle(name: str, values: dict[str, Any]) -> list[str]:
        """Write the settings of a command; the words that give it them."""
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return ["--config", str(path)]

    def announce(stage: str, what: str, *words: str) -> None:
        left = sum(plan.seconds[each] for each in stages[stages.index(stage) :]) / 60
        number = stages.index(stage) + 1
        print_line(console, f"\n{number} of 4: {what}; about {max(left, 1):.0f} min left in all")
        print_line(console, f"  by hand: python -m {_PROGRAMS}{shlex.join(words)}")

    length = length_of(config)
    words = settle("regenerate", _regeneration(plan, folder, length))
    written = f"the target writes {plan.tokens:,} tokens of its own"
    announce("write", written, "train", "regenerate", *words)
    regenerate(words)
    tokens = _hold_out(plan, folder)

    steps = max(1, EPOCHS * tokens // (_BATCH * length))
    words = settle("train", training_settings(plan.asked, folder, config, steps))
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

    words = ["compare", *settle("compare", _comparison(plan, folder))]
    announce("measure", f"{plan.prompts} prompts that it was not trained on", "eval", *words)
    call_program("eval", "commands:evaluate", words)
    minutes = (time.perf_counter() - started) / 60
    head = folder / "run" / "drafter"
    print_line(console, f"the head: {head}, {minutes:.1f} min after the probe; to try it:")
    target = plan.asked.target
    chats = load_template(None, target, load_tokenizer(target), "") is not NO_TEMPLATE
    command = ["chat"] if chats else ["generate", "--prompt", "Once upon a time"]
    models = ["--target", target, "--drafter", str(head)]
    words = [*command, *models, "--beam-width", str(_TREE["beam_width"])]
    print_line(console, f"  python -m redrafter_jax {shlex.join(words)}")
    tuning = _measuring(plan, folder, "tune") | {"drafter": str(head)}
    words = ["eval", "tune", *settle("tune", tuning)]
    print_line(
        console, "to find the fastest tree on this device, which is taken without --beam-width:"
    )
    print_line(console, f"  python -m {_PROGRAMS}{shlex.join(words)}")


def length_of(config: TargetConfig) -> int:
    """Tokens of a row of training data."""
    return min(_LENGTH, config.position_limit)


def _regeneration(plan: FitPlan, folder: Path, length: int) -> dict[str, Any]:
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


def training_settings(
    asked: FitRequest, folder: Path, config: TargetConfig, steps: int
) -> dict[str, Any]:
    """Settings of training: the recurrent head of the paper, over the most frequent tokens."""
    return {
        "target": asked.target,
        "target_dtype": asked.target_dtype,
        "drafter": {
            "exit_dim": config.hidden_size,
            "num_draft_layers": 2,
            "draft_vocab_size": min(_DRAFTED, config.vocab_size),
            "initial_head": "target",
        },
        "draft_rounds": _TREE["draft_rounds"],
        "data": {
            "sources": [{"files": [str(folder / "training.jsonl")]}],
            "sequence_length": length_of(config),
            "pack": True,
        },
        "features": str(folder / "features"),
        "loss": {"soft": 1.0},
        "acceptance": {
            "every": max(1, steps // 4),
            "prompts": str(folder / "held_out.jsonl"),
            "max_new_tokens": min(64, length_of(config) // 4),
            "draft": _TREE,
        },
        "optimizer": {"rule": "muon", "learning_rate": 4e-3, "batch_size": _BATCH},
        "steps": steps,
        "checkpoint_every": 50,
        "output_dir": str(folder / "run"),
    }


def _measuring(plan: FitPlan, folder: Path, report: str) -> dict[str, Any]:
    """Settings of everything that decodes the held-out prompts."""
    return {
        "target": plan.asked.target,
        "dtype": plan.asked.target_dtype,
        "prompts": str(folder / "held_out.jsonl"),
        "samplings": [{"temperature": 0.0}, {"temperature": 0.7}],
        "max_new_tokens": plan.new_tokens,
        "report_dir": str(folder / report),
    }


def _comparison(plan: FitPlan, folder: Path) -> dict[str, Any]:
    """Settings of `eval compare`."""
    drafter = str(folder / "run" / "drafter")
    return _measuring(plan, folder, "report") | {
        "drafters": {
            "head": {"drafter": drafter, "draft": _TREE},
            "head and lookup": {
                "drafter": drafter,
                "draft": _TREE | {"lookup_tokens": _LOOKUP},
            },
        },
    }


def _hold_out(plan: FitPlan, folder: Path) -> int:
    """Keep the first conversations for measuring; how many tokens the others have."""
    rows = read_rows(folder / "written.jsonl")
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    held = set(seeds[: plan.prompts])
    tokenizer = load_tokenizer(plan.asked.target)
    prompts = [
        row["questions"][0]
        if row.get("questions")
        else tokenizer.decode(row["input_ids"][:_BEGINNING])
        for row in rows
        if row["seed"] in held and row.get("row", 0) == 0
    ]
    left = [row for row in rows if row["seed"] not in held]
    if not left:
        raise InputError(
            f"The target wrote {len(seeds)} texts, no more than the {plan.prompts} that are held "
            "out; give more --minutes."
        )
    held_out = format_rows({"prompt": prompt} for prompt in prompts)
    (folder / "held_out.jsonl").write_text(held_out, encoding="utf-8")
    (folder / "training.jsonl").write_text(format_rows(left), encoding="utf-8")
    return sum(len(row["input_ids"]) for row in left)
