"""Compare with Apple's PyTorch ReDrafter on one CPU: same weights, same prompts, same trees.

    python -m tools.apple decode --torch-python TORCHENV/bin/python \
        --repository ml-recurrent-drafter \
        --target TARGET --drafter DRAFTER --prompts prompts.json --output comparison.json

`--torch-python` is a Python with PyTorch and the packages that worker.py names;
`--repository` is a clone of https://github.com/apple/ml-recurrent-drafter. Both sides decode
greedily in float32, one prompt at a time, with a tree of Apple's making (`final_beams_only`, all
nodes), and never stop before `--max-new-tokens`. The two take turns on the same CPU cores, so
that a slow minute of the machine hits both, and whoever is not measured waits for input.

Both drafters normalise scores over a beam's 50 best tokens, as Apple's code does; with
`--full-vocabulary` both take all tokens. PyTorch's threads wait for each other asleep
(OMP_WAIT_POLICY=PASSIVE); `--wait-policies PASSIVE ACTIVE` measures both ways of waiting.
"""

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from redrafter_jax.errors import InputError
from redrafter_jax.text.tokenizer import load_tokenizer, require_text
from tools.apple.arguments import add_shared, at_least, check_layout, check_shared
from tools.apple.compare import compare_prompts, summarize
from tools.apple.process import commit_of, share_cpus, start
from tools.apple.sides import APPLE_CANDIDATES, apple_side, decode_command, load_ours
from tools.apple.table import make_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `decode`."""
    add_shared(parser)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: id lists, or strings")
    parser.add_argument("--beam-width", type=int, default=4, help="W")
    parser.add_argument("--draft-rounds", type=int, default=4, help="R; Apple's beam length less 1")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs after one warm-up")
    parser.add_argument(
        "--full-vocabulary",
        action="store_true",
        help="normalise draft scores over all tokens on both sides, not over the 50 best",
    )
    parser.add_argument("--threads", type=int, help="CPUs for both sides (default: all)")


def check(arguments: argparse.Namespace) -> None:
    """Refuse what neither side could do, before anything is loaded."""
    # with one token Apple's loop still makes a target call, for a token that is cut off again
    at_least(arguments, beam_width=1, draft_rounds=1, max_new_tokens=2, repeats=1)
    if arguments.beam_width > APPLE_CANDIDATES and not arguments.full_vocabulary:
        raise InputError(
            f"--beam-width is {arguments.beam_width}; the most is {APPLE_CANDIDATES}, the tokens "
            "that scores are normalised over, unless --full-vocabulary takes all."
        )
    check_shared(arguments)


def read_prompts(path: Path, target: Path) -> list[list[int]]:
    """Token ids from a JSON list of id lists, or of strings for the target's tokenizer."""
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read --prompts {path}: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"--prompts {path} is not JSON: {error}.") from error
    if not (isinstance(prompts, list) and prompts and all(prompts)):
        raise InputError(f"--prompts {path} must be a list of prompts, none of them empty.")
    if all(isinstance(prompt, str) for prompt in prompts):
        for i, prompt in enumerate(prompts):
            require_text(prompt, f"--prompts {path}: prompt {i}")
        tokenizer = load_tokenizer(target)
        return [tokenizer.encode(prompt).ids for prompt in prompts]
    for i, prompt in enumerate(prompts):
        if not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
            raise InputError(
                f"--prompts {path}: prompt {i} is not a list of token ids like the others; "
                "use only id lists or only strings."
            )
    return prompts


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole comparison as one report."""
    check(arguments)
    check_layout(arguments)
    cpus = share_cpus(arguments.threads)
    load_average = os.getloadavg()[0]
    prompts = read_prompts(arguments.prompts, arguments.target)
    ours, command = load_ours(arguments), decode_command(arguments, cpus)
    runs = {}
    about: dict[str, Any] = {}
    for policy in arguments.wait_policies:
        with start("Apple's side", command, policy) as apple:
            about = apple.about
            side = apple_side(apple, arguments)
            rows = compare_prompts(prompts, ours, side, arguments.repeats)
        runs[policy] = {"summary": summarize(rows), "prompts": rows}
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "device": cpu_model(),
        "threads": {"cpus": cpus, "torch": about["threads"]},
        # what else the machine was doing: speeds mean little where this is not near 0
        "load_average_before": load_average,
        "versions": {
            "ours": {"python": platform.python_version()} | {p: version(p) for p in packages},
            "apple": about["versions"] | {"commit": commit_of(arguments.repository)},
        },
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
        },
        # by OMP_WAIT_POLICY of Apple's side
        "runs": runs,
    }


def main(arguments: argparse.Namespace) -> None:
    """Compare, write the report, show a table for each wait policy."""
    report = compare(arguments)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    for policy in report["runs"]:
        Console().print(make_table(report, policy))
