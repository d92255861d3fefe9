"""Compare with Apple's PyTorch ReDrafter on one CPU: same weights, same prompts, same trees.

    python -m tools.apple decode --torch-python TORCHENV/bin/python \
        --repository ml-recurrent-drafter \
        --target TARGET --drafter DRAFTER --prompts prompts.json --output comparison.json

`--torch-python` is a Python with PyTorch and the packages that worker.py names;
`--repository` is a clone of https://github.com/apple/ml-recurrent-drafter. Both sides decode
greedily in float32, one prompt at a time, with a tree of Apple's making (`final_beams_only`, all
nodes), and never stop before `--max-new-tokens`. Both drafters normalise scores over a beam's 50
best tokens, as Apple's code does. The two take turns on the same CPU cores, so that a slow minute
of the machine hits both, and whoever is not measured waits for input. PyTorch's threads wait for
each other asleep (OMP_WAIT_POLICY=PASSIVE); `--wait-policies PASSIVE ACTIVE` measures both ways.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from redrafter_jax import generate, generate_autoregressive, load_drafter, load_target
from redrafter_jax.errors import InputError
from redrafter_jax.text.tokenizer import load_tokenizer
from tools.apple.process import Process, apple_command, start, versions_of
from tools.apple.traces import apple_tree, same_prefix

MODES = ("speculative", "autoregressive")
NAMES = ("ours", "apple")
# Both runtimes' thread pools spin for some milliseconds after their last task; let that pass, or
# the side that has just finished takes cycles from the side being timed.
SETTLE_SECONDS = 0.05


class Run(NamedTuple):
    """One generation: its new tokens, target calls after prefill, wall time with prefill."""

    tokens: list[int]
    target_calls: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the whole wall time."""
        return len(self.tokens) / self.seconds


# Decodes one prompt in one of the modes.
type Side = Callable[[str, list[int]], Run]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `decode`."""
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: a list of strings")
    parser.add_argument("--beam-width", type=int, default=4, help="W")
    parser.add_argument("--draft-rounds", type=int, default=4, help="R; Apple's beam length less 1")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs after one warm-up")
    parser.add_argument(
        "--wait-policies",
        nargs="+",
        choices=("PASSIVE", "ACTIVE"),
        default=["PASSIVE"],
        help="OMP_WAIT_POLICY of PyTorch's threads, each measured in turn (%(default)s)",
    )


def our_side(arguments: argparse.Namespace) -> Side:
    """Our two models in float32 on the CPU."""
    target = load_target(arguments.target, dtype="float32")
    drafter = load_drafter(arguments.drafter, dtype="float32")
    draft = apple_tree(target, arguments.beam_width, arguments.draft_rounds)
    limits: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "eos_token_ids": ()}

    def run(mode: str, prompt: list[int]) -> Run:
        start = time.perf_counter()
        if mode == "speculative":
            result = generate(target, drafter, [prompt], draft=draft, **limits)
        else:
            result = generate_autoregressive(target, [prompt], **limits)
        tokens = [int(token) for token in result.tokens[0]]
        return Run(tokens, int(result.steps[0]), time.perf_counter() - start)

    return run


def apple_side(apple: Process, arguments: argparse.Namespace) -> Side:
    """Apple's decoders."""
    names = ("beam_width", "draft_rounds", "max_new_tokens")
    settings = {name: getattr(arguments, name) for name in names}

    def run(mode: str, prompt: list[int]) -> Run:
        reply = apple.ask({"mode": mode, "prompt": prompt} | settings)
        return Run(*(reply[name] for name in Run._fields))

    return run


def compare_prompt(
    mode: str, prompt: list[int], ours: Side, apple: Side, repeats: int
) -> dict[str, Any]:
    """Warm both sides up on this very prompt, then time them in turns."""
    sides = {"ours": ours, "apple": apple}
    first = {name: side(mode, prompt) for name, side in sides.items()}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for repeat in range(repeats):
        # Whoever goes first changes each time: neither always follows the other's heat.
        for name in sorted(sides, reverse=repeat % 2 == 0):
            time.sleep(SETTLE_SECONDS)
            runs[name].append(sides[name](mode, prompt))
    for name, repeated in runs.items():
        if any(run.tokens != first[name].tokens for run in repeated):
            raise InputError(f"{name}: two {mode} runs of the same prompt differ.")
    speeds = {name: [run.tokens_per_second for run in runs[name]] for name in NAMES}
    return {
        "prompt_tokens": len(prompt),
        "same_text": first["ours"].tokens == first["apple"].tokens,
        "shared_tokens": same_prefix(first["ours"].tokens, first["apple"].tokens),
        "target_calls": {name: run.target_calls for name, run in first.items()},
        "tokens_per_second": {name: statistics.median(speeds[name]) for name in NAMES},
        "seconds": {name: [run.seconds for run in runs[name]] for name in NAMES},
        "ratio": statistics.median(
            mine / theirs for mine, theirs in zip(speeds["ours"], speeds["apple"], strict=True)
        ),
        "tokens": {name: run.tokens for name, run in first.items()},
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over prompts; medians of speeds and of their ratios."""
    calls = [row["target_calls"] for row in rows]
    speeds = [row["tokens_per_second"] for row in rows]
    return {
        "prompts": len(rows),
        "same_texts": sum(row["same_text"] for row in rows),
        "target_calls": {name: sum(c[name] for c in calls) for name in NAMES},
        "same_target_calls": sum(c["ours"] == c["apple"] for c in calls),
        "tokens_per_second": {name: statistics.median(s[name] for s in speeds) for name in NAMES},
        "ratio": statistics.median(row["ratio"] for row in rows),
    }


def make_table(runs: dict[str, Any]) -> Table:
    """One line per wait policy and way of decoding."""
    table = Table("OMP_WAIT_POLICY", "decoding", "same texts", "target calls, ours / Apple's")
    for name in ("tokens/s, ours", "Apple's", "ratio"):
        table.add_column(name, justify="right")
    for policy, modes in runs.items():
        for mode, of_mode in modes.items():
            total = of_mode["summary"]
            table.add_row(
                policy,
                mode,
                f"{total['same_texts']} of {total['prompts']}",
                " / ".join(str(total["target_calls"][name]) for name in NAMES),
                *(f"{total['tokens_per_second'][name]:.1f}" for name in NAMES),
                f"{total['ratio']:.2f}",
            )
    return table


def main(arguments: argparse.Namespace) -> None:
    """Compare, write the report, show the table."""
    jax.config.update("jax_platforms", "cpu")  # Apple's side runs there as well
    load_average = os.getloadavg()[0]
    tokenizer = load_tokenizer(arguments.target)
    prompts = [tokenizer.encode(text).ids for text in json.loads(arguments.prompts.read_text())]
    ours = our_side(arguments)
    folders = arguments.target, arguments.drafter
    command = apple_command(arguments.torch_python, arguments.repository, "decode", *folders)
    runs, versions = {}, {}
    for policy in arguments.wait_policies:
        with start(command, policy) as process:
            versions = versions_of(process, arguments.repository)
            apple = apple_side(process, arguments)
            rows = {mode: [] for mode in MODES}
            for prompt in track(prompts, policy, console=Console(stderr=True)):
                for mode in MODES:
                    row = compare_prompt(mode, prompt, ours, apple, arguments.repeats)
                    rows[mode].append(row)
        runs[policy] = {m: {"summary": summarize(r), "prompts": r} for m, r in rows.items()}
    report = {
        # What else the machine was doing: speeds mean little where this is not near 0.
        "load_average_before": load_average,
        "cpus": len(os.sched_getaffinity(0)),
        "versions": versions,
        "settings": vars(arguments),
        "runs": runs,
    }
    arguments.output.write_text(json.dumps(report, indent=1, default=str) + "\n")
    Console().print(make_table(runs))
