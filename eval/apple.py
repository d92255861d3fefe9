"""Compare with Apple's PyTorch ReDrafter on one CPU: same weights, same prompts, same trees.

    python -m eval.apple --torch-python TORCHENV/bin/python --repository ml-recurrent-drafter \
        --target TARGET --drafter DRAFTER --prompts prompts.json --output comparison.json

`--torch-python` is a Python with PyTorch and the packages that apple_worker.py names;
`--repository` is a clone of https://github.com/apple/ml-recurrent-drafter. Both sides decode
greedily in float32, one prompt at a time, with a tree of Apple's making (`final_beams_only`, all
nodes), and never stop before `--max-new-tokens`. The two take turns on the same CPU cores, so
that a slow minute of the machine hits both, and whoever is not measured waits for input.

Apple's drafter normalises scores over its 50 best tokens, ours over all of them, so that trees
and with them the number of target calls differ here and there; `--full-vocabulary` drops that cut.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console
from rich.progress import track
from rich.table import Table

from redrafter_jax.command_line import load_tokenizer
from redrafter_jax.command_line import run as run_command
from redrafter_jax.errors import InputError

Mode = Literal["speculative", "autoregressive"]
MODES: tuple[Mode, ...] = ("speculative", "autoregressive")
NAMES = ("ours", "apple")

# Both runtimes' thread pools spin for some milliseconds after their last task; let that pass, or
# the side that has just finished takes cycles from the side being timed.
SETTLE_SECONDS = 0.05


@dataclass(frozen=True)
class Run:
    """One generation: its new tokens, target calls after prefill, wall time with prefill."""

    tokens: list[int]
    target_calls: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the whole wall time."""
        return len(self.tokens) / self.seconds


type Side = Callable[[Mode, list[int]], Run]


class Apple:
    """Apple's code in its own process, idle except while it answers."""

    def __init__(self, arguments: argparse.Namespace, threads: int) -> None:
        self._arguments = arguments
        # transformers warns at length on stderr; kept aside for the case that the worker dies
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        worker = Path(__file__).with_name("apple_worker.py")
        command = [arguments.torch_python, str(worker), "--threads", str(threads)]
        for name in ("repository", "target", "drafter"):
            command += [f"--{name}", str(getattr(arguments, name))]
        if arguments.full_vocabulary:
            command.append("--full-vocabulary")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},  # both models are folders
                text=True,
            )
        except OSError as error:
            raise InputError(
                f"cannot start --torch-python {arguments.torch_python}: {error.strerror}."
            ) from error
        self.about = self._read()

    def __call__(self, mode: Mode, prompt: list[int]) -> Run:
        """Decode one prompt."""
        request = {
            "mode": mode,
            "prompt": prompt,
            "max_new_tokens": self._arguments.max_new_tokens,
            "beam_width": self._arguments.beam_width,
            "beam_length": self._arguments.draft_rounds + 1,  # Apple counts the root
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise InputError(self._last_words()) from error
        reply = self._read()
        return Run(reply["tokens"], reply["target_calls"], reply["seconds"])

    def close(self) -> None:
        """End the worker: it leaves when its input does."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
        self._stderr.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InputError(self._last_words())
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise InputError(f"Apple's worker wrote {line.strip()!r}, not JSON.") from error
        if "error" in reply:
            raise InputError(f"Apple's side: {reply['error']}.")
        return reply

    def _last_words(self) -> str:
        self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "it wrote nothing"
        return f"Apple's worker ended with code {self._process.returncode}: {reason}"


def load_ours(arguments: argparse.Namespace) -> Side:
    """Our two models in float32 on the CPU, as a function that decodes one prompt."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # Apple's worker runs there as well
    from redrafter_jax import (
        DraftConfig,
        generate,
        generate_autoregressive,
        load_drafter,
        load_target,
    )

    target = load_target(str(arguments.target), dtype="float32")
    drafter = load_drafter(str(arguments.drafter), dtype="float32")
    draft = DraftConfig(
        beam_width=arguments.beam_width,
        draft_rounds=arguments.draft_rounds,
        num_nodes=None,
        final_beams_only=True,
    )
    limits: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "eos_token_ids": ()}

    def run(mode: Mode, prompt: list[int]) -> Run:
        start = time.perf_counter()
        if mode == "speculative":
            result = generate(target, drafter, [prompt], draft=draft, **limits)
        else:
            result = generate_autoregressive(target, [prompt], **limits)
        tokens = [int(token) for token in result.tokens[0]]
        return Run(tokens, int(result.steps[0]), time.perf_counter() - start)

    return run


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
        tokenizer = load_tokenizer(target)
        return [tokenizer.encode(prompt).ids for prompt in prompts]
    for i, prompt in enumerate(prompts):
        if not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
            raise InputError(
                f"--prompts {path}: prompt {i} is not a list of token ids like the others; "
                "use only id lists or only strings."
            )
    return prompts


def same_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens two texts share."""
    pairs = zip(ours, theirs, strict=False)
    differences = (i for i, (a, b) in enumerate(pairs) if a != b)
    return next(differences, min(len(ours), len(theirs)))


def compare_prompts(
    prompts: list[list[int]], ours: Side, apple: Side, repeats: int
) -> list[dict[str, Any]]:
    """Every prompt with both ways of decoding, one row of results each."""
    console = Console(stderr=True)
    rows = []
    for prompt in track(prompts, "comparing", console=console, disable=not console.is_terminal):
        results = {mode: compare_mode(mode, prompt, ours, apple, repeats) for mode in MODES}
        rows.append({"prompt_tokens": len(prompt), **results})
    return rows


def compare_mode(
    mode: Mode, prompt: list[int], ours: Side, apple: Side, repeats: int
) -> dict[str, Any]:
    """Warm both sides up on this very prompt, then time them in turns."""
    sides = {"ours": ours, "apple": apple}
    first = {name: side(mode, prompt) for name, side in sides.items()}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for repeat in range(repeats):
        # whoever goes first changes each time: neither always follows the other's heat
        for name in sorted(sides, reverse=repeat % 2 == 0):
            time.sleep(SETTLE_SECONDS)
            runs[name].append(sides[name](mode, prompt))
    for name, repeated in runs.items():
        if any(run.tokens != first[name].tokens for run in repeated):
            raise InputError(f"{name}: two {mode} runs of the same prompt differ.")
    pairs = zip(runs["ours"], runs["apple"], strict=True)
    shared = same_prefix(first["ours"].tokens, first["apple"].tokens)
    same = first["ours"].tokens == first["apple"].tokens
    return {
        "same_text": same,
        "first_difference": None if same else shared,
        "target_calls": {name: run.target_calls for name, run in first.items()},
        "tokens_per_second": {
            name: statistics.median(run.tokens_per_second for run in repeated)
            for name, repeated in runs.items()
        },
        "seconds": {name: [run.seconds for run in repeated] for name, repeated in runs.items()},
        "ratio": statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs),
        "tokens": {name: run.tokens for name, run in first.items()},
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the prompts say together, for each way of decoding."""
    return {mode: summarize_mode([row[mode] for row in rows]) for mode in MODES}


def summarize_mode(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Fractions and sums over prompts; medians of speeds and of their ratios."""
    calls = [result["target_calls"] for result in results]
    apart = [abs(c["ours"] - c["apple"]) for c in calls]
    speeds = [result["tokens_per_second"] for result in results]
    return {
        "same_text": fraction([result["same_text"] for result in results]),
        "target_calls": {name: sum(c[name] for c in calls) for name in NAMES},
        "same_target_calls": fraction([difference == 0 for difference in apart]),
        "target_calls_within_one": fraction([difference <= 1 for difference in apart]),
        "tokens_per_second": {name: statistics.median(s[name] for s in speeds) for name in NAMES},
        "median_ratio": statistics.median(result["ratio"] for result in results),
    }


def fraction(outcomes: list[bool]) -> float:
    """The share that is true."""
    return sum(outcomes) / len(outcomes)


def make_table(report: dict[str, Any]) -> Table:
    """One line per prompt and way of decoding, then the medians."""
    settings = report["settings"]
    table = Table(
        title=f"ours and Apple's, W={settings['beam_width']} R={settings['draft_rounds']}, "
        f"{settings['max_new_tokens']} new tokens, {report['device']}, "
        f"{report['threads']['cpus']} CPUs, load before {report['load_average_before']:.1f}"
    )
    table.add_column("prompt")
    table.add_column("decoding", no_wrap=True)
    for name in ("same text", "calls ours", "calls Apple", "tok/s ours", "tok/s Apple", "ratio"):
        table.add_column(name, justify="right")
    for i, row in enumerate(report["prompts"]):
        for mode in MODES:
            result = row[mode]
            same = "yes" if result["same_text"] else f"to {result['first_difference']}"
            add_row(table, f"{i} ({row['prompt_tokens']})", mode, same, result, result["ratio"])
    table.add_section()
    for mode in MODES:
        total = report["summary"][mode]
        add_row(table, "all", mode, f"{total['same_text']:.0%}", total, total["median_ratio"])
    return table


def add_row(
    table: Table, prompt: str, mode: Mode, same: str, result: dict[str, Any], ratio: float
) -> None:
    """One line; `result` is a prompt's or the summary's."""
    calls, speeds = result["target_calls"], result["tokens_per_second"]
    cells = [
        prompt,
        "plain" if mode == "autoregressive" else mode,
        same,
        str(calls["ours"]),
        str(calls["apple"]),
    ]
    table.add_row(*cells, f"{speeds['ours']:.1f}", f"{speeds['apple']:.1f}", f"{ratio:.2f}")


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


def commit_of(repository: Path) -> str | None:
    """The clone's commit; None where git cannot tell."""
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole comparison as one report."""
    check(arguments)
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


def check(arguments: argparse.Namespace) -> None:
    """Refuse what neither side could do, before anything is loaded."""
    # with one token Apple's loop still makes a target call, for a token that is cut off again
    least = {"beam_width": 1, "draft_rounds": 1, "max_new_tokens": 2, "repeats": 1}
    for name, minimum in least.items():
        value = getattr(arguments, name)
        if value < minimum:
            raise InputError(f"--{name.replace('_', '-')} is {value}; the least is {minimum}.")
    for name in ("repository", "target", "drafter"):
        if not getattr(arguments, name).is_dir():
            raise InputError(f"--{name} {getattr(arguments, name)} is not a folder.")
    if not (arguments.repository / "recurrent_drafting").is_dir():
        raise InputError(
            f"--repository {arguments.repository} holds no recurrent_drafting folder; "
            "clone https://github.com/apple/ml-recurrent-drafter."
        )
    if arguments.output.is_dir() or not arguments.output.resolve().parent.is_dir():
        raise InputError(f"--output {arguments.output} is not a file in an existing folder.")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.apple",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--torch-python", required=True, help="a Python that has PyTorch")
    parser.add_argument("--repository", type=Path, required=True, help="clone of Apple's code")
    parser.add_argument("--target", type=Path, required=True, help="Llama in Hugging Face layout")
    parser.add_argument("--drafter", type=Path, required=True, help="drafter in Apple's layout")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: id lists, or strings")
    parser.add_argument("--output", type=Path, required=True, help="where the JSON report goes")
    parser.add_argument("--beam-width", type=int, default=4, help="W")
    parser.add_argument("--draft-rounds", type=int, default=4, help="R; Apple's beam length less 1")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs after one warm-up")
    parser.add_argument(
        "--full-vocabulary",
        action="store_true",
        help="drop Apple's top-50 cut on draft scores, so that both sides draft the same trees",
    )
    parser.add_argument("--threads", type=int, help="CPUs for both sides (default: all)")
    return parser.parse_args()


def main() -> None:
    """Compare, write the report, show the table."""
    arguments = parse_arguments()
    report = compare(arguments)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    Console().print(make_table(report))


if __name__ == "__main__":
    run_command(main)
