"""Do both sides draft the same beams and trees, and decode the same texts in as many calls?

    python -m tools.apple.agreement --torch-python TORCHENV/bin/python \
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
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from redrafter_jax.checkpoints.huggingface import load_drafter, load_target
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.text.prompts import read_prompts, tokenize
from redrafter_jax.text.tokenizer import load_tokenizer
from tools.apple.arguments import add_shared, at_least, check_layout, check_shared
from tools.apple.differences import TOLERANCE, compare_traces
from tools.apple.process import Process, commit_of, start
from tools.apple.sides import APPLE_CANDIDATES, decode_command
from tools.apple.traces import choice_gap, read_apple, trace_ours

# The most by which two libraries' logits of one token differ in float32, for these purposes.
LOGIT_TOLERANCE = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `agreement`."""
    add_shared(parser)
    parser.add_argument("--prompts", type=Path, required=True, help='JSONL of {"prompt": ...}')
    parser.add_argument("--beam-widths", type=int, nargs="+", default=[1, 4, 16, 45], help="W")
    parser.add_argument("--draft-rounds", type=int, nargs="+", default=list(range(1, 8)), help="R")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (%(default)s)")
    parser.set_defaults(full_vocabulary=False)


def check(arguments: argparse.Namespace) -> None:
    """Refuse what neither side could do, before anything is loaded."""
    at_least(arguments, beam_widths=1, draft_rounds=1, max_new_tokens=2)
    if max(arguments.beam_widths) > APPLE_CANDIDATES:
        raise InputError(
            f"--beam-widths holds {max(arguments.beam_widths)}; the most is {APPLE_CANDIDATES}, "
            "the tokens that Apple's code scores."
        )
    check_shared(arguments)
    check_layout(arguments)


def compare_prompt(
    target: Target, drafter: DraftModel, apple: Process, prompt: list[int], settings: dict[str, int]
) -> dict[str, Any]:
    """One prompt on both sides; a text that differs is explained by the target's own scores."""
    ours = trace_ours(target, drafter, prompt, **settings)
    reply = apple.ask(
        {
            "mode": "trace",
            "prompt": prompt,
            "max_new_tokens": settings["max_new_tokens"],
            "beam_width": settings["beam_width"],
            "beam_length": settings["draft_rounds"] + 1,  # Apple counts the root
        }
    )
    theirs = read_apple(reply)
    result = compare_traces(ours, theirs, len(prompt))
    place = result["first_difference"]
    if place is not None and place < min(len(ours.tokens), len(theirs.tokens)):
        text = prompt + ours.tokens[:place]
        gap = choice_gap(target, text, ours.tokens[place], theirs.tokens[place])
        result["text_gap"] = gap
        result["text_tie"] = abs(gap) <= LOGIT_TOLERANCE
    return result


def summarize(beam_width: int, draft_rounds: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the prompts say together; every difference is kept."""
    differences = [
        {"prompt": index, **difference}
        for index, row in enumerate(rows)
        for difference in row["differences"]
    ]
    texts = [
        {"prompt": index, "token": row["first_difference"], "gap": row.get("text_gap")}
        for index, row in enumerate(rows)
        if not row["same_text"]
    ]
    parted = {difference["prompt"] for difference in differences} | {t["prompt"] for t in texts}
    other_calls = [
        index
        for index, row in enumerate(rows)
        if row["target_calls"]["ours"] != row["target_calls"]["apple"]
    ]
    unexplained = (
        sum(not difference["tie"] for difference in differences)
        + sum(not row["same_text"] and not row.get("text_tie", False) for row in rows)
        # Without any other tree or text the calls can only be as many.
        + sum(index not in parted for index in other_calls)
    )
    return {
        "beam_width": beam_width,
        "draft_rounds": draft_rounds,
        "prompts": len(rows),
        "same_texts": sum(row["same_text"] for row in rows),
        "target_calls": {
            side: sum(row["target_calls"][side] for row in rows) for side in ("ours", "apple")
        },
        "same_target_calls": len(rows) - len(other_calls),
        "steps": sum(row["steps"]["compared"] for row in rows),
        "same_beams": sum(row["same_beams"] for row in rows),
        "same_trees": sum(row["same_trees"] for row in rows),
        "largest_error": max(row["largest_error"] for row in rows),
        "unexplained": unexplained,
        "differences": differences,
        "texts": texts,
    }


def make_table(results: list[dict[str, Any]]) -> Table:
    """One line per beam width and number of draft rounds."""
    table = Table(title="ours and Apple's")
    for name in ("W", "R", "texts", "calls", "ours / Apple's", "steps", "beams", "trees"):
        table.add_column(name, justify="right")
    for name in ("largest score difference", "ties", "unexplained"):
        table.add_column(name, justify="right")
    for result in results:
        calls = result["target_calls"]
        ties = sum(difference["tie"] for difference in result["differences"])
        table.add_row(
            str(result["beam_width"]),
            str(result["draft_rounds"]),
            f"{result['same_texts']} of {result['prompts']}",
            f"{result['same_target_calls']} of {result['prompts']}",
            f"{calls['ours']} / {calls['apple']}",
            str(result["steps"]),
            str(result["same_beams"]),
            str(result["same_trees"]),
            f"{result['largest_error']:.1e}",
            str(ties),
            str(result["unexplained"]),
        )
    return table


def main(arguments: argparse.Namespace) -> None:
    """Compare, write the report as it grows, show the table."""
    check(arguments)
    jax.config.update("jax_platforms", "cpu")  # Apple's side runs there as well
    target = load_target(arguments.target, "float32")
    drafter = load_drafter(arguments.drafter, "float32")
    prompts = tokenize(
        read_prompts(arguments.prompts),
        load_tokenizer(arguments.target),
        arguments.max_new_tokens,
        target.config.position_limit,
    )
    console = Console(stderr=True)
    results = []
    command = decode_command(arguments, arguments.threads)
    with start("Apple's side", command, arguments.wait_policies[0]) as apple:
        report = {
            "versions": {
                "ours": {name: version(name) for name in ("jax", "flax", "numpy")},
                "apple": apple.about["versions"] | {"commit": commit_of(arguments.repository)},
                "python": platform.python_version(),
            },
            "max_new_tokens": arguments.max_new_tokens,
            "tolerance": TOLERANCE,
            "results": results,
        }
        for width, rounds in itertools.product(arguments.beam_widths, arguments.draft_rounds):
            settings = {
                "beam_width": width,
                "draft_rounds": rounds,
                "max_new_tokens": arguments.max_new_tokens,
            }
            rows = [compare_prompt(target, drafter, apple, row, settings) for row in prompts]
            results.append(summarize(width, rounds, rows))
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
            console.print(f"W={width} R={rounds}: {results[-1]['unexplained']} unexplained")
    Console().print(make_table(results))
    if any(result["unexplained"] for result in results):
        sys.exit(1)
