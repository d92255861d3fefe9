r"""Compare Apple's PyTorch ReDrafter with this library: same weights, prompts and trees.

    python -m tools.apple --torch-python TORCHENV/bin/python \
        --repository ml-recurrent-drafter --target TARGET --drafter DRAFTER \
        --prompts configs/demo_prompts.jsonl --output report.json

`--repository` is an unmodified clone of https://github.com/apple/ml-recurrent-drafter.
`--torch-python` is a Python with PyTorch, transformers 4.47.1 (Apple's code does not run with
release 5), jsonlines and tabulate. That Python runs this file in a separate process, so the top
level of the file imports neither the project nor PyTorch.

Both sides, "ours" and "apple", decode greedily in float32 on one CPU, one prompt at a time, for
every beam width and number of draft rounds. Trees are built as in Apple's code (`final_beams_only`,
all nodes, scores normalised over a beam's 50 best tokens), and decoding never stops before
`--max-new-tokens`. Texts and numbers of target calls are compared. Then both sides are timed in
turns, so that a slow minute of the machine affects both. While one side is timed, the other side
waits for input. The exit code is 1 if a text or a number of calls differs.
"""

# pyright: reportMissingImports=false

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

SIDES = ("ours", "apple")
# A padding and stop id that no token equals: Apple's code detects left padding by the padding id,
# and its baseline always compares with the stop id.
NO_TOKEN = -1


class Job(NamedTuple):
    """A prompt and the sizes of a tree; `beam_width` 0 is the autoregressive baseline."""

    prompt: list[int]
    beam_width: int
    draft_rounds: int
    max_new_tokens: int


class Decoded(NamedTuple):
    """New tokens, number of target calls after prefill, and wall seconds including prefill."""

    tokens: list[int]
    target_calls: int
    seconds: float


Side = Callable[[Job], Decoded]


def load_apple(target: Path, drafter: Path) -> Any:
    """Load Apple's decoder; exit if it cannot compute the same as this library."""
    import transformers
    from recurrent_drafting.modeling_drafter import Drafter
    from recurrent_drafting.modeling_llama import LlamaForCausalLM
    from recurrent_drafting.recurrent_drafting import RecurrentDrafting

    raw = json.loads((target / "config.json").read_text())
    width = raw["hidden_size"] // raw["num_attention_heads"]
    rotary = raw.get("rope_parameters") or {"rope_theta": raw["rope_theta"]}
    scaling = raw.get("rope_scaling") or rotary
    scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
    if raw["model_type"] != "llama" or (raw.get("head_dim") or width) != width or scaled:
        sys.exit(
            "Apple's code needs a Llama with unscaled RoPE and head_dim = width / heads; give such "
            "a --target."
        )
    config = transformers.LlamaConfig.from_pretrained(target)
    # transformers 4 ignores `rope_parameters` and would silently fall back to 10000.
    config.rope_theta = float(rotary["rope_theta"])
    # The default dtype is float32.
    told: dict[str, Any] = {"output_loading_info": True}
    llm, of_target = LlamaForCausalLM.from_pretrained(target, config=config, **told)
    head, of_drafter = Drafter.from_pretrained(drafter, **told)
    # Rotary tables are computed, not stored; a tied head is the embedding.
    computed = {name for name, _ in llm.named_buffers()}
    computed |= {"lm_head.weight"} if config.tie_word_embeddings else set()
    for info in (of_target, of_drafter):
        # transformers only warns when names do not match.
        if wrong := {*info["missing_keys"], *info["unexpected_keys"]} - computed:
            sys.exit(f"The weights do not fit Apple's model: {', '.join(sorted(wrong))}.")
    return RecurrentDrafting(llm=llm.eval(), drafter=head.eval())


def decode_apple(model: Any, job: Job) -> Decoded:
    """Decode a prompt greedily with Apple's code."""
    import torch
    from recurrent_drafting import autoregressive, modeling_drafter
    from recurrent_drafting.recurrent_drafting import SamplingArgs, SpecialTokens

    started = time.perf_counter()
    prompt = torch.tensor([job.prompt], dtype=torch.long)
    limit = len(job.prompt) + job.max_new_tokens
    # Each item is the text after one more target call; the last is cut to the limit.
    if job.beam_width:
        items = model.generate(
            types.SimpleNamespace(post=lambda record: None),  # Apple's writes to a file
            prompt,
            max_length=limit,
            beam_shape=modeling_drafter.BeamShape(job.beam_width, job.draft_rounds + 1),
            sampling_args=SamplingArgs(temperature=1.0, greedy=True),
            special_tokens=SpecialTokens(pad=NO_TOKEN, eos=None),
        )
        texts = [prompt, *items]
    else:  # the first item is from prefill
        tokens = SpecialTokens(pad=NO_TOKEN, eos=NO_TOKEN)
        texts = list(autoregressive.generate(model, prompt, limit, special_tokens=tokens))
    new = texts[-1][0, len(job.prompt) : limit].tolist()
    return Decoded(new, len(texts) - 1, time.perf_counter() - started)


def serve_apple(repository: str, target: str, drafter: str) -> None:
    """Answer `Job`s with `Decoded`s, as JSON lines; the first output line has the versions."""
    # Modules of this folder must not shadow the imports of Apple's code.
    sys.path[0] = str(Path(repository).resolve())
    import torch
    import transformers

    # Redirect all other output to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = load_apple(Path(target), Path(drafter))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(decode_apple(model, Job(*json.loads(line)))), file=answers, flush=True)


@contextmanager
def start_apple(command: Sequence[str]) -> Generator[tuple[dict[str, str], Side]]:
    """Start Apple's side; yield the versions of both sides and a function that decodes a job."""
    # Let PyTorch's waiting threads sleep, unless the environment overrides this.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
    except OSError as error:
        sys.exit(
            f"Cannot start {command[0]}: {error.strerror}; give the path of a Python as "
            "--torch-python."
        )

    def read() -> Any:
        assert process.stdout is not None
        if line := process.stdout.readline():
            return json.loads(line)
        sys.exit(f"{command[0]} ended with code {process.wait()}; see its message above.")

    def ask(job: Job) -> Decoded:
        print(json.dumps(job), file=process.stdin, flush=True)
        return Decoded(*read())

    with process:
        yield read() | {"jax": version("jax")}, ask


def load_ours(target_folder: Path, drafter_folder: Path) -> Side:
    """Load this library's side: greedy decoding with trees as in Apple's code."""
    from redrafter_jax import TreeConfig, generate, load_drafter, load_target

    target = load_target(target_folder, "float32")
    drafter = load_drafter(drafter_folder, "float32")
    best = min(50, target.config.vocab_size)  # tokens per beam that Apple's `warp_logits` keeps

    def decode(job: Job) -> Decoded:
        started = time.perf_counter()
        shape = job.beam_width, job.draft_rounds
        result = generate(
            target,
            drafter if job.beam_width else None,
            [job.prompt],
            max_new_tokens=job.max_new_tokens,
            tree=TreeConfig(*shape, final_beams_only=True, candidates=best) if shape[0] else None,
            eos_token_ids=(),
        )
        return Decoded(result.tokens[0], result.steps[0], time.perf_counter() - started)

    return decode


def compare(job: Job, sides: dict[str, Side], repeats: int) -> dict[str, Any]:
    """Compare texts and target calls of both sides on one job, and time each side `repeats` times.

    The first, untimed decoding warms up both sides on this prompt. The side that is timed first
    alternates from turn to turn.
    """
    first = {name: sides[name](job) for name in SIDES}
    ours, apple = (first[name] for name in SIDES)
    row: dict[str, Any] = {
        "same_text": ours.tokens == apple.tokens,
        "same_calls": ours.target_calls == apple.target_calls,
        "target_calls": {name: first[name].target_calls for name in SIDES},
    }
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for turn in range(repeats):
        for name in SIDES if turn % 2 == 0 else reversed(SIDES):
            time.sleep(0.05)  # the other side's threads may still spin for a few milliseconds
            decoded = sides[name](job)
            seconds[name].append(decoded.seconds)
            if decoded.tokens != first[name].tokens:
                sys.exit(f"{name}: two runs of the same prompt differ, so they cannot be compared.")
    if repeats:
        speeds = {name: len(first[name].tokens) / median(seconds[name]) for name in SIDES}
        pairs = zip(seconds["ours"], seconds["apple"], strict=True)
        ratio = median(theirs / mine for mine, theirs in pairs)
        row |= {"seconds": seconds, "tokens_per_second": speeds, "ratio": ratio}
    return row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the rows of a tree: sums over prompts, and medians of speeds and ratios."""

    def both(combine: Callable[[list[Any]], Any], name: str) -> dict[str, Any]:
        return {side: combine([row[name][side] for row in rows]) for side in SIDES}

    summary: dict[str, Any] = {"prompts": len(rows), "target_calls": both(sum, "target_calls")}
    summary |= {name: sum(row[name] for row in rows) for name in ("same_text", "same_calls")}
    if "ratio" in rows[0]:
        summary["tokens_per_second"] = both(median, "tokens_per_second")
        summary["ratio"] = median(row["ratio"] for row in rows)
    return summary | {"rows": rows}


def describe(tree: dict[str, Any]) -> str:
    """Describe a tree in a line; in pairs of numbers, this library's number comes first."""
    line = (
        f"W={tree['beam_width']} R={tree['draft_rounds']}: of {tree['prompts']} prompts "
        f"{tree['same_text']} with the same text, {tree['same_calls']} with equal target calls "
        "({ours} and {apple})".format(**tree["target_calls"])
    )
    if speeds := tree.get("tokens_per_second"):
        pair = "{ours:.1f} and {apple:.1f} tokens/s".format(**speeds)
        line += f"; {pair}, ratio {tree['ratio']:.2f}"
    return line


def main(words: Sequence[str] | None = None) -> None:
    """Run the comparison; write the report and print a line after each tree."""
    import jax

    from redrafter_jax.command_line import make_folder_of
    from redrafter_jax.files.target_files import open_target
    from redrafter_jax.progress import track
    from redrafter_jax.text.prompts import read_prompts

    parser = argparse.ArgumentParser(
        prog="python -m tools.apple",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--torch-python", required=True, help="Python with PyTorch")
    add("--repository", type=Path, required=True, help="clone of Apple's code")
    add("--target", type=Path, required=True, help="Llama in Hugging Face layout")
    add("--drafter", type=Path, required=True, help="drafter in Apple's layout")
    add("--prompts", type=Path, required=True, help='JSONL of {"prompt": ...}')
    add("--output", type=Path, required=True, help="JSON report to write")
    add("--beam-widths", type=int, nargs="+", default=[0, 4], help="W; 0: baseline (%(default)s)")
    add("--draft-rounds", type=int, nargs="+", default=[4], help="R; Apple's beam length minus 1")
    add("--max-new-tokens", type=int, default=160)
    add("--repeats", type=int, default=3, help="timed runs after one warm-up; 0 disables timing")
    arguments = parser.parse_args(words)
    make_folder_of(arguments.output, "--output")
    jax.config.update("jax_platforms", "cpu")  # Apple's side runs on the CPU too
    folders = arguments.target, arguments.drafter
    tokenizer, ours = open_target(arguments.target).tokenizer, load_ours(*folders)
    texts = [prompt.turns[0] for prompt in read_prompts(arguments.prompts, turns=1)]
    prompts = [tokenizer.encode(text).ids for text in texts]
    pairs = itertools.product(arguments.beam_widths, arguments.draft_rounds)
    trees = dict.fromkeys((width, rounds if width else 0) for width, rounds in pairs)
    command = [arguments.torch_python, __file__, "--apple", arguments.repository, *folders]
    results: list[dict[str, Any]] = []
    with start_apple([str(word) for word in command]) as (versions, apple):
        report = {"versions": versions, "settings": vars(arguments), "trees": results}
        for width, rounds in trees:
            jobs = [Job(prompt, width, rounds, arguments.max_new_tokens) for prompt in prompts]
            rows = [
                compare(job, {"ours": ours, "apple": apple}, arguments.repeats)
                for job in track(jobs, len(jobs), f"W={width} R={rounds}")
            ]
            results.append({"beam_width": width, "draft_rounds": rounds} | summarize(rows))
            arguments.output.write_text(json.dumps(report, indent=1, default=str) + "\n")
            print(describe(results[-1]))
    if any(min(one["same_text"], one["same_calls"]) < one["prompts"] for one in results):
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--apple"]:
        serve_apple(*sys.argv[2:])
    else:
        from redrafter_jax.command_line import run

        run(main)
