"""Compare with Apple's PyTorch ReDrafter on one CPU: same weights, same prompts, same trees.

    python -m tools.apple_decoding --torch-python TORCHENV/bin/python \
        --repository ml-recurrent-drafter \
        --target TARGET --drafter DRAFTER --prompts prompts.json --output comparison.json

`--torch-python` is a Python with PyTorch and the packages that worker.py names;
`--repository` is a clone of https://github.com/apple/ml-recurrent-drafter. Both sides decode
greedily in float32, one prompt at a time, with a tree of Apple's making (`final_beams_only`, all
nodes), and never stop before `--max-new-tokens`. The two take turns on the same CPU cores, so
that a slow minute of the machine hits both, and whoever is not measured waits for input.

Both drafters normalise scores over a beam's 50 best tokens, as Apple's code does; with
`--full-vocabulary` both take all tokens.
"""

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from redrafter_jax.checkpoints.config_files import read_drafter_config, require_apple_layout
from redrafter_jax.command_line import run as run_command
from redrafter_jax.errors import InputError
from redrafter_jax.text.tokenizer import load_tokenizer, require_text
from tools.apple_decoding.arguments import add_shared, check_folders, commit_of
from tools.apple_decoding.compare import compare_prompts, summarize
from tools.apple_decoding.sides import APPLE_CANDIDATES, Apple, load_ours
from tools.apple_decoding.table import make_table


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.apple_decoding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> None:
    """Refuse what neither side could do, before anything is loaded."""
    # with one token Apple's loop still makes a target call, for a token that is cut off again
    least = {"beam_width": 1, "draft_rounds": 1, "max_new_tokens": 2, "repeats": 1}
    for name, minimum in least.items():
        value = getattr(arguments, name)
        if value < minimum:
            raise InputError(f"--{name.replace('_', '-')} is {value}; the least is {minimum}.")
    if arguments.beam_width > APPLE_CANDIDATES and not arguments.full_vocabulary:
        raise InputError(
            f"--beam-width is {arguments.beam_width}; the most is {APPLE_CANDIDATES}, the tokens "
            "that scores are normalised over, unless --full-vocabulary takes all."
        )
    check_folders(arguments)


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


def share_cpus(limit: int | None) -> int:
    """Restrict this process, and with it the worker, to `limit` CPUs; return how many it has.

    An affinity mask is the one limit that XLA's and PyTorch's thread pools both follow.
    """
    if not hasattr(os, "sched_setaffinity"):
        if limit is not None:
            raise InputError("--threads needs CPU affinity, which this system does not have.")
        return os.cpu_count() or 1
    available = sorted(os.sched_getaffinity(0))
    if limit is None:
        return len(available)
    if not 1 <= limit <= len(available):
        raise InputError(f"--threads is {limit}; this process may use 1 to {len(available)}.")
    os.sched_setaffinity(0, available[:limit])
    return limit


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
    require_apple_layout(read_drafter_config(arguments.drafter), arguments.drafter)
    cpus = share_cpus(arguments.threads)
    load_average = os.getloadavg()[0]
    prompts = read_prompts(arguments.prompts, arguments.target)
    apple = Apple(arguments, cpus)
    try:
        rows = compare_prompts(prompts, load_ours(arguments), apple, arguments.repeats)
    finally:
        apple.close()
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "device": cpu_model(),
        "threads": {"cpus": cpus, "torch": apple.about["threads"]},
        # what else the machine was doing: speeds mean little where this is not near 0
        "load_average_before": load_average,
        "versions": {
            "ours": {"python": platform.python_version()} | {p: version(p) for p in packages},
            "apple": apple.about["versions"] | {"commit": commit_of(arguments.repository)},
        },
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
        },
        "summary": summarize(rows),
        "prompts": rows,
    }


def main() -> None:
    """Compare, write the report, show the table."""
    arguments = parse_arguments()
    report = compare(arguments)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    Console().print(make_table(report))


if __name__ == "__main__":
    run_command(main)
