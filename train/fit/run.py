"""`redrafter fit TARGET OUTPUT --minutes M`: train a draft head without other data.

There are five stages: the target writes conversations; its hidden states on them are stored; a head
is trained on these; `eval tune` searches for the fastest tree; and `eval compare` measures the head
with this tree. Each stage is a command with a settings file and can also be run by hand. A short
benchmark of the device decides the sizes. A stage that is late leaves less time to the next stages.
A killed run resumes where it stopped.
"""

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import yaml
from rich.console import Console

from redrafter_jax.command_line import call_program, make_folder
from redrafter_jax.config import Dtype, TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import TargetFiles, open_target
from redrafter_jax.settings.files import load_settings
from redrafter_jax.text.chat_template import NONE, OWN, find_template

from ..card import write_card
from ..config import TrainSettings
from ..data.report import print_line
from ..features import features
from ..loop import train
from ..regenerate.output import read_rows
from ..regenerate.run import regenerate
from .ending import finalists, obey_report, verdict
from .plan import (
    STAGES,
    FitPlan,
    FitRequest,
    Pace,
    Stage,
    is_enough,
    make_plan,
    plan_measuring,
    plan_training,
    read_plan,
    write_plan,
)
from .probe import measure_rates
from .settings import (
    BATCH_SIZES,
    TOP_K,
    TUNING_SECONDS,
    batch_size,
    decode_settings,
    hold_out,
    on_cpu,
    regenerate_settings,
    row_length,
    rows_written,
    train_settings,
    trees,
)

# In a wheel, the packages `train` and `eval` are inside `redrafter_jax`.
_PROGRAMS = __name__.removesuffix("train.fit.run")
# Seconds between two updates of the plan's elapsed time.
_KEEPING = 5.0


def fit(
    target: str,
    output: Path,
    minutes: float,
    dtype: Dtype | None,
    chat_template: str | None = None,
) -> None:
    """Train a head for a target and measure it, in about `minutes` minutes.

    Args:
      target: folder, hub id or GGUF file of the target.
      output: folder of all output; the fit that it holds is continued.
      minutes: approximate time limit in minutes.
      dtype: dtype of the target's parameters; None: bfloat16 on a GPU, and float32 on a CPU.
      chat_template: built-in chat template, or path of a Jinja file, for the conversations that the
        target writes; None for the tokenizer's own template.

    Raises:
      InputError: the target or the template cannot be used, the folder holds another fit, or the
        time is too short.
    """
    started = time.perf_counter()
    files = open_target(target)
    config = files.config  # first, because it refuses files that are not a target
    template = _template_named(chat_template, files)
    dtype = dtype or ("float32" if on_cpu() else "bfloat16")
    asked = FitRequest(target, dtype, minutes, template)
    console = Console(stderr=True)
    make_folder(output, "the output folder")
    # The stages, and a resumed run, compile the same programs as the probe.
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(output / "programs"))
    plan, before = read_plan(output, asked), 0.0
    if plan is None:
        plan = _probe(asked, output, files, console, started)
    else:
        before = plan.spent
        print_line(console, f"continuing with the plan in {output / 'plan.json'}")
    _Fit(plan, output, config, console, started, before).run()


def _template_named(name: str | None, files: TargetFiles) -> str | None:
    """Check the template that `--chat-template` names; return None for the tokenizer's own."""
    if name is None:
        return None
    if name == NONE:
        raise InputError(
            "--chat-template is none, but a head is fitted on conversations, which need a chat "
            "template; name a template, or leave the option out."
        )
    find_template(name, files, "--chat-template ")
    return None if name == OWN else name


def _probe(
    asked: FitRequest, folder: Path, files: TargetFiles, console: Console, started: float
) -> FitPlan:
    """Measure the device and make the plan."""
    print_line(console, "measuring how fast this device writes, reads and trains: a minute or two")
    config, rows = files.config, rows_written()
    settings = TrainSettings.model_validate(train_settings(asked, folder, config, steps=1))

    def load() -> Any:
        return files.load(asked.target_dtype)

    rates = measure_rates(load, settings, rows, TOP_K)
    length = row_length(config)
    spent = time.perf_counter() - started
    plan = make_plan(asked, spent, rows, rates, min(96, length // 4), length)
    write_plan(plan, folder)
    return plan


class _Fit:
    """A running fit: the current plan, and a clock that includes earlier runs."""

    def __init__(
        self,
        plan: FitPlan,
        folder: Path,
        config: TargetConfig,
        console: Console,
        started: float,
        before: float,
    ) -> None:
        self.plan, self._folder, self._config, self._console = plan, folder, config, console
        self._began, self._before = started, before
        self._kept = 0.0
        self._length = row_length(config)
        self._step_tokens = batch_size() * self._length

    def used(self) -> float:
        """The seconds that all runs of the fit have taken; saved in the plan every few seconds."""
        used = self._before + time.perf_counter() - self._began
        if used - self._kept >= _KEEPING:
            self._keep(spent=used)
            self._kept = used
        return used

    def run(self) -> None:
        """Run all unfinished stages and print the result."""
        stages: dict[Stage, Callable[[], None]] = {
            "write": self._write,
            "read": self._read,
            "train": self._train,
            "tune": self._tune,
            "measure": self._measure,
        }
        for name, stage in stages.items():
            if name not in self.plan.done:
                stage()
                self._keep(spent=self.used(), done=(*self.plan.done, name))
        self._end()

    def _keep(self, **changes: Any) -> None:
        self.plan = self.plan.model_copy(update=changes)
        write_plan(self.plan, self._folder)

    def _settings(self, name: str, values: dict[str, Any]) -> list[str]:
        """Write a command's settings to a file and return the arguments that name it."""
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return ["--config", str(path)]

    def _announce(self, stage: Stage, what: str, *words: str) -> None:
        self.used()
        left = max(sum(self.plan.expected(self._step_tokens).values()), self.plan.left) / 60
        place = f"{STAGES.index(stage) + 1} of {len(STAGES)}"
        minutes = f"about {max(left, 1):.0f} of {self.plan.asked.minutes:g} min left in all"
        print_line(self._console, f"\n{place}: {what}; {minutes}")
        print_line(self._console, f"  by hand: python -m {_PROGRAMS}{shlex.join(words)}")

    def _write(self) -> None:
        plan = self.plan
        words = self._settings("regenerate", regenerate_settings(plan, self._folder, self._length))
        what = f"the target writes {plan.tokens:,} tokens of training data"
        self._announce("write", what, "train", "regenerate", *words)
        regenerate(words, is_late=lambda written: is_enough(plan, self.used(), written))
        tokens = sum(sum(row["loss_mask"]) for row in read_rows(self._folder / "written.jsonl"))
        if tokens < plan.tokens:
            late = (
                f"late: {tokens:,} of {plan.tokens:,} tokens are written; training on them takes "
                "the time that is left"
            )
            print_line(self._console, late)
        # With this count, the same command run by hand finds its output complete.
        self._keep(tokens=min(plan.tokens, tokens))
        self._settings("regenerate", regenerate_settings(self.plan, self._folder, self._length))

    def _read(self) -> None:
        tokens = hold_out(self.plan, self._folder)
        values = train_settings(self.plan.asked, self._folder, self._config, 1)
        kept = [*self._settings("train", values), f"top_k={TOP_K}"]
        self._announce(
            "read", "one forward pass stores the target's hidden states", "train", "features", *kept
        )
        features(kept)
        self._keep(spent=self.used())
        self._keep(steps=plan_training(self.plan, tokens, self._step_tokens).steps)

    def _train(self) -> None:
        while True:
            steps = self.plan.steps
            assert steps is not None
            values = train_settings(self.plan.asked, self._folder, self._config, steps)
            words = self._settings("train", values)
            self._announce("train", f"{steps} steps of training", "train", *words)
            pace, fewer = Pace(self.plan, self.used()), steps

            def is_late(step: int, pace: Pace = pace) -> bool:
                nonlocal fewer
                fewer = pace.steps(step, self.used()) or fewer
                return fewer < (self.plan.steps or 0)

            settings = load_settings(TrainSettings, self._folder / "train.yaml")
            outcome = train(settings, self._console, is_late)
            if outcome.stopped_by is not None:
                name = outcome.stopped_by.name
                print_line(self._console, f"stopped by {name}; the same command continues the fit")
                sys.exit(128 + outcome.stopped_by)
            if outcome.exported is not None:
                return
            print_line(self._console, f"late: {fewer} steps of training instead of {steps}")
            self._keep(steps=fewer, spent=self.used())

    def _tune(self) -> None:
        self._keep(spent=self.used())
        plan, seconds = plan_measuring(self.plan)
        self._keep(prompts=plan.prompts, new_tokens=plan.new_tokens)
        count = max(1, min(len(BATCH_SIZES), int(seconds / TUNING_SECONDS)))
        decoding = decode_settings(self.plan, self._folder, "tune", "tuning_prompts")
        prompts = len(read_rows(self._folder / "tuning_prompts.jsonl"))
        sizes = [size for size in BATCH_SIZES[:count] if size <= prompts]
        words = self._settings(
            "tune",
            decoding
            | {
                "drafter": str(self._drafter),
                "trees": trees(),
                "batch_sizes": sizes,
                "entrants": 6,
                "minutes": round(seconds / 60, 2),
            },
        )
        self._announce("tune", "search for the fastest tree", "eval", "tune", *words)
        call_program("eval", "commands:evaluate", ["tune", *words])

    def _measure(self) -> None:
        self._keep(spent=self.used())
        drafters = {
            name: {"drafter": str(self._drafter), "tree": tree}
            for name, tree in finalists(self._folder).items()
        }
        values = decode_settings(self.plan, self._folder, "report", "held_out")
        words = ["compare", *self._settings("compare", values | {"drafters": drafters})]
        what = f"{self.plan.prompts} prompts that neither training nor the tuner saw"
        self._announce("measure", what, "eval", *words)
        call_program("eval", "commands:evaluate", words)
        # The table is updated only once, because a later `eval tune` writes its own table.
        obey_report(self._folder)
        settings = load_settings(TrainSettings, self._folder / "train.yaml")
        write_card(settings, self._folder / "report" / "compare.json")

    @property
    def _drafter(self) -> Path:
        return self._folder / "run" / "drafter"

    def _end(self) -> None:
        """Print the command that uses the fastest method, and the verdict."""
        target, template = self.plan.asked.target, self.plan.asked.template_option
        pays, sentence = verdict(self._folder, self.plan)
        chats = bool(template) or open_target(target).template is not None
        command = ["chat"] if chats else ["generate", "--prompt", "Once upon a time"]
        with_head = ["--drafter", str(self._drafter)] if pays else ["--no-drafter"]
        # Commands decode greedily by default.
        heat = ["--temperature", f"{pays[0]:g}"] if pays and pays[0] else []
        words = [*command, "--target", target, *with_head, *heat, *template]
        minutes = self.plan.spent / 60
        print_line(
            self._console,
            f"\nthe fit took {minutes:.1f} of {self.plan.asked.minutes:g} minutes; the recommended "
            "command:",
        )
        print_line(self._console, f"  python -m redrafter_jax {shlex.join(words)}")
        print_line(self._console, sentence)
