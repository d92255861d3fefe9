"""Do both sides draft the same beams and trees, and decode the same texts in as many calls?

    python -m tools.apple agreement --torch-python TORCHENV/bin/python \
        --repository ml-recurrent-drafter --target TARGET --drafter DRAFTER \
        --prompts configs/demo_prompts.jsonl --output agreement.json

`--torch-python` and `--repository` are those of `python -m tools.apple decode`. Every prompt is
decoded by both sides with every beam width and number of draft rounds, greedily and in float32, and
of each target call the beams after every round (tokens, order, log-probabilities) and the packed
tree are compared. A difference is a tie where the scores that decided it are within 1e-4 nats. The
report is written after every pair of beam width and draft rounds; one with differences that are no
ties ends with exit code 1.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from redrafter_jax import load_drafter, load_target
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target
from redrafter_jax.text.prompts import read_prompts, tokenize
from redrafter_jax.text.tokenizer import load_tokenizer
from tools.apple.differences import TOLERANCE, compare_traces
from tools.apple.process import Process, apple_command, start, versions_of
from tools.apple.traces import choice_gap, read_apple, trace_ours

# The most by which two libraries' logits of one token differ in float32, for these purposes.
LOGIT_TOLERANCE = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `agreement`."""
    parser.add_argument("--prompts", type=Path, required=True, help='JSONL of {"prompt": ...}')
    parser.add_argument("--beam-widths", type=int, nargs="+", default=[1, 4, 16, 45], help="W")
    parser.add_argument("--draft-rounds", type=int, nargs="+", default=list(range(1, 8)), help="R")
    parser.add_argument("--max-new-tokens", type=int, default=48)


def compare_prompt(
    target: Target, drafter: DraftModel, apple: Process, prompt: list[int], settings: dict[str, int]
) -> dict[str, Any]:
    """One prompt on both sides; a text that differs is explained by the target's own scores."""
    ours = trace_ours(target, drafter, prompt, **settings)
    theirs = read_apple(apple.ask({"mode": "trace", "prompt": prompt} | settings))
    result = compare_traces(ours, theirs, len(prompt))
    place = result["shared_tokens"]
    if place < min(len(ours.tokens), len(theirs.tokens)):
        text = prompt + ours.tokens[:place]
        gap = choice_gap(target, text, ours.tokens[place], theirs.tokens[place])
        result |= {"text_gap": gap, "text_tie": abs(gap) <= LOGIT_TOLERANCE}
    return result


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the prompts say together; every difference is kept."""
    differences = [
        {"prompt": index, **difference}
        for index, row in enumerate(rows)
        for difference in row["differences"]
    ]
    same_calls = [row["target_calls"]["ours"] == row["target_calls"]["apple"] for row in rows]
    unexplained = (
        sum(not difference["tie"] for difference in differences)
        + sum(not row["same_text"] and not row.get("text_tie", False) for row in rows)
        # Without any other tree or text the calls can only be as many.
        + sum(
            not same and row["same_text"] and not row["differences"]
            for row, same in zip(rows, same_calls, strict=True)
        )
    )
    counts = {
        name: sum(row[name] for row in rows)
        for name in ("same_text", "steps", "same_beams", "same_trees")
    }
    return counts | {
        "prompts": len(rows),
        "target_calls": {
            side: sum(row["target_calls"][side] for row in rows) for side in ("ours", "apple")
        },
        "same_target_calls": sum(same_calls),
        "largest_error": max(row["largest_error"] for row in rows),
        "ties": sum(difference["tie"] for difference in differences),
        "unexplained": unexplained,
        "differences": differences,
        "texts": [
            {"prompt": index, "token": row["shared_tokens"], "gap": row.get("text_gap")}
            for index, row in enumerate(rows)
            if not row["same_text"]
        ],
    }


def make_table(results: list[dict[str, Any]]) -> Table:
    """One line per beam width and number of draft rounds."""
    table = Table(title="ours and Apple's")
    for name in ("W", "R", "same texts", "same calls", "calls, ours / Apple's", "steps", "beams"):
        table.add_column(name, justify="right")
    for name in ("trees", "largest score difference", "ties", "unexplained"):
        table.add_column(name, justify="right")
    for result in results:
        calls = result["target_calls"]
        cells = (
            result["beam_width"],
            result["draft_rounds"],
            f"{result['same_text']} of {result['prompts']}",
            f"{result['same_target_calls']} of {result['prompts']}",
            f"{calls['ours']} / {calls['apple']}",
            *(result[name] for name in ("steps", "same_beams", "same_trees")),
            f"{result['largest_error']:.1e}",
            result["ties"],
            result["unexplained"],
        )
        table.add_row(*map(str, cells))
    return table


def main(arguments: argparse.Namespace) -> None:
    """Compare, write the report as it grows, show the table."""
    jax.config.update("jax_platforms", "cpu")  # Apple's side runs there as well
    target = load_target(arguments.target, "float32")
    drafter = load_drafter(arguments.drafter, "float32")
    prompts = tokenize(
        read_prompts(arguments.prompts),
        load_tokenizer(arguments.target),
        arguments.max_new_tokens,
        target.config.position_limit,
    )
    results = []
    folders = arguments.target, arguments.drafter
    command = apple_command(arguments.torch_python, arguments.repository, "decode", *folders)
    with start(command) as apple:
        report = {
            "versions": versions_of(apple, arguments.repository),
            "max_new_tokens": arguments.max_new_tokens,
            "tolerance": TOLERANCE,
            "results": results,
        }
        for width, rounds in itertools.product(arguments.beam_widths, arguments.draft_rounds):
            tree = {"beam_width": width, "draft_rounds": rounds}
            settings = tree | {"max_new_tokens": arguments.max_new_tokens}
            rows = [compare_prompt(target, drafter, apple, row, settings) for row in prompts]
            results.append(tree | summarize(rows))
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
            print(f"W={width} R={rounds}: {results[-1]['unexplained']} unexplained")
    Console().print(make_table(results))
    if any(result["unexplained"] for result in results):
        sys.exit(1)
