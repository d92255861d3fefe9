"""Decode beside Apple's PyTorch ReDrafter on one CPU: same weights, same prompts, same trees.

    python -m tools.apple decode --torch-python TORCHENV/bin/python \
        --repository ml-recurrent-drafter --target TARGET --drafter DRAFTER \
        --prompts configs/demo_prompts.jsonl --output report.json

`--torch-python` is a Python with PyTorch and the packages that worker.py names;
`--repository` is a clone of https://github.com/apple/ml-recurrent-drafter. Both sides decode
greedily in float32, one prompt at a time, with every beam width and number of draft rounds and a
tree of Apple's making (`final_beams_only`, all nodes), and never stop before `--max-new-tokens`.
Both drafters normalise scores over a beam's 50 best tokens, as Apple's code does.

Of each target call the beams after every round (tokens, order, log-probabilities) and the packed
tree are compared. A difference is a tie where the scores that decided it are within 1e-4 nats.
Then both are timed `--repeats` times, in turns on the same CPU cores, so that a slow minute of the
machine hits both, and whoever is not measured waits for input. The report is written after every
tree; one with differences that are no ties ends with exit code 1.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import track

from redrafter_jax import generate, load_drafter
from redrafter_jax.command_line import make_folder_of
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.target import Target
from redrafter_jax.text.chat_template import NO_TEMPLATE
from redrafter_jax.text.prompts import PromptEncoding, encode_prompts, read_prompts
from tools.apple.process import SIDES, apple_command, in_turns, start, versions_of
from tools.apple.traces import Decoded, apple_tree, compare_traces, read_apple, trace_ours

SUMS = ("same_text", "same_calls", "steps", "same_beams", "same_trees", "ties", "unexplained")
# Both runtimes' thread pools spin for some milliseconds after their last task. Without a pause the
# side that has just finished takes cycles from the side being timed.
SETTLE_SECONDS = 0.05


class Job(NamedTuple):
    """One prompt and one tree; a `beam_width` of 0 is the autoregressive baseline."""

    prompt: list[int]
    beam_width: int
    draft_rounds: int
    max_new_tokens: int


# Decodes; the flag asks for the steps.
type Side = Callable[[Job, bool], Decoded]


def decode_ours(target: Target, drafter: LoadedHead, job: Job, trace: bool) -> Decoded:
    """Decode on our side."""
    started = time.perf_counter()
    if job.beam_width and trace:
        return trace_ours(target, drafter, **job._asdict())
    tree = apple_tree(target, job.beam_width, job.draft_rounds) if job.beam_width else None
    result = generate(
        target,
        drafter if tree else None,
        [job.prompt],
        max_new_tokens=job.max_new_tokens,
        tree=tree,
        eos_token_ids=(),
    )
    return Decoded(result.tokens[0], result.steps[0], time.perf_counter() - started, [])


def time_sides(job: Job, sides: dict[str, Side], repeats: int) -> dict[str, Any]:
    """Warm both sides up on this very prompt, then time them in turns."""
    texts = {name: sides[name](job, False).tokens for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for _, name in in_turns(repeats):
        time.sleep(SETTLE_SECONDS)
        decoded = sides[name](job, False)
        seconds[name].append(decoded.seconds)
        if decoded.tokens != texts[name]:
            raise InputError(f"{name}: two runs of the same prompt differ.")
    pairs = zip(seconds["ours"], seconds["apple"], strict=True)
    return {
        "seconds": seconds,
        "tokens_per_second": {name: len(texts[name]) / median(seconds[name]) for name in SIDES},
        "ratio": median(apple / ours for ours, apple in pairs),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the prompts of a tree, medians of speeds and of their ratios, and the prompts."""
    summary: dict[str, Any] = {"prompts": len(rows)}
    summary |= {name: sum(row[name] for row in rows) for name in SUMS}
    calls = [row["target_calls"] for row in rows]
    summary["target_calls"] = {name: sum(pair[name] for pair in calls) for name in SIDES}
    summary["largest_error"] = max(row["largest_error"] for row in rows)
    if "ratio" in rows[0]:
        speeds = [row["tokens_per_second"] for row in rows]
        summary["tokens_per_second"] = {n: median(pair[n] for pair in speeds) for n in SIDES}
        summary["ratio"] = median(row["ratio"] for row in rows)
    return summary | {"rows": rows}


def describe(result: dict[str, Any]) -> str:
    """A tree's summary in a line; pairs are ours and Apple's."""
    prompts, steps, calls = result["prompts"], result["steps"], result["target_calls"]
    line = (
        f"W={result['beam_width']} R={result['draft_rounds']}: {result['same_text']} of {prompts} "
        f"texts the same; {calls['ours']} and {calls['apple']} target calls; of {steps} compared, "
        f"{result['same_beams']} with the same beams and {result['same_trees']} with the same tree"
        f"; largest score difference {result['largest_error']:.1e} nats; {result['ties']} ties, "
        f"{result['unexplained']} unexplained"
    )
    if "ratio" not in result:
        return line
    ours, apple = (result["tokens_per_second"][name] for name in SIDES)
    return f"{line}; {ours:.1f} and {apple:.1f} tokens/s, ratio {result['ratio']:.2f}"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options of `decode`."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tools.apple decode", description=__doc__, formatter_class=layout
    )
    add = parser.add_argument
    add("--torch-python", required=True, help="a Python that has PyTorch")
    add("--repository", type=Path, required=True, help="clone of Apple's code")
    add("--target", type=Path, required=True, help="Llama in Hugging Face layout")
    add("--drafter", type=Path, required=True, help="drafter in Apple's layout")
    add("--prompts", type=Path, required=True, help='JSONL of {"prompt": ...}')
    add("--output", type=Path, required=True, help="where the JSON report goes")
    add("--beam-widths", type=int, nargs="+", default=[0, 4], help="W, 0: baseline (%(default)s)")
    add("--draft-rounds", type=int, nargs="+", default=[4], help="R; Apple's beam length less 1")
    add("--max-new-tokens", type=int, default=160)
    add("--repeats", type=int, default=3, help="timed runs after one warm-up; 0 times nothing")
    add(
        "--wait-policy",
        choices=("PASSIVE", "ACTIVE"),
        default="PASSIVE",
        help="OMP_WAIT_POLICY of PyTorch's threads (%(default)s)",
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Compare; write the report and a line for each tree as they come."""
    arguments = parse(words)
    make_folder_of(arguments.output, "--output")
    jax.config.update("jax_platforms", "cpu")  # Apple's side runs there as well
    # What else the machine was doing: speeds mean little where this is not near 0.
    load_average = os.getloadavg()[0]
    files = open_target(arguments.target)
    target = files.load("float32")
    drafter = load_drafter(arguments.drafter, "float32")
    tokens = arguments.max_new_tokens
    tokenizer, positions = files.tokenizer, target.config.position_limit
    how = PromptEncoding(NO_TEMPLATE, tokenizer, (), tokens, positions)
    prompts = encode_prompts(how, read_prompts(arguments.prompts, turns=1)).rows
    pairs = itertools.product(arguments.beam_widths, arguments.draft_rounds)
    trees = dict.fromkeys((width, rounds if width else 0) for width, rounds in pairs)
    folders = arguments.target, arguments.drafter
    command = apple_command(arguments.torch_python, arguments.repository, "decode", *folders)
    results: list[dict[str, Any]] = []
    with start(command, arguments.wait_policy) as process:
        report = {
            "load_average_before": load_average,
            "cpus": len(os.sched_getaffinity(0)),
            "versions": versions_of(process, arguments.repository),
            "settings": vars(arguments),
            "results": results,
        }
        sides: dict[str, Side] = {
            "ours": partial(decode_ours, target, drafter),
            "apple": lambda job, trace: read_apple(process.ask(trace=trace, **job._asdict())),
        }
        for width, rounds in trees:
            rows, title = [], f"W={width} R={rounds}"
            for prompt in track(prompts, title, console=Console(stderr=True)):
                job = Job(prompt, width, rounds, tokens)
                ours, apples = sides["ours"](job, True), sides["apple"](job, True)
                row = compare_traces(ours, apples, len(prompt))
                if arguments.repeats:
                    row |= time_sides(job, sides, arguments.repeats)
                rows.append(row)
            results.append({"beam_width": width, "draft_rounds": rounds} | summarize(rows))
            arguments.output.write_text(json.dumps(report, indent=1, default=str) + "\n")
            print(describe(results[-1]))
    if any(result["unexplained"] for result in results):
        sys.exit(1)
