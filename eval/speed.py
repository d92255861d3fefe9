"""Speculative decoding beside the autoregressive baseline: how much faster, with which texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import RenderableType
from rich.text import Text

from redrafter_jax.config import SamplingConfig
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.files.drafter_files import load_drafter
from redrafter_jax.files.tree_table import load_tree
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import EncodedPrompts

from . import metrics
from .benchmark import Method, Run, TimedTurn, make_batches, measure, warm_up
from .config import EvalSettings
from .loading import bind, load
from .metrics import (
    answer_lines,
    count_accepted,
    describe_answers,
    judge_case,
    lookup_lines,
    quartiles,
)
from .report import describe_sampling, make_table, number, show, write_report

BASELINE = "baseline"
_NO_TREE = (
    "By the drafter's table no drafting is the fastest: `eval tune` makes it anew, or tree names "
    "a tree."
)
_TIMES = ("new_tokens", "prefill_seconds", "decode_seconds")

DEFINITIONS = metrics.DEFINITIONS | {
    "tokens_per_second": "median over all runs of new tokens / wall time of the whole call, "
    "prefill and the way to the host included, compilation not; of a prompt or category its own "
    "tokens / the time of its whole batch",
    "speedup": "median over all (batch, repeat) turns of the ratio to the baseline's tokens per "
    "second; a turn's runs follow each other at once",
    "decode_only": "the same without prefill and the first token, which prefill decides",
    "milliseconds_per_target_call": "median over runs of decode time / decode steps of the batch; "
    "in speculative decoding it includes drafting",
    "quartiles": "25% and 75%",
}
LEGEND = {
    "speedup": "Median of the pairs. Below 1 where a call over the tree, its draft included, costs "
    "more baseline calls than the tokens it gains: a small target on a CPU, say.",
    "acceptance length": "Tokens per target call, 1.00 for the baseline. Published ReDrafter "
    "heads for 7B chat models reach 2.2 with one beam and about 4 with wide ones. Near 1 after a "
    "training that went well: the drafter belongs to another target, or prompts are tokenised or "
    "templated otherwise than in training. Prompt lookup gains where the text repeats itself, "
    "whatever the drafter: tree.lookup_tokens=0 measures the drafter alone.",
    "acceptance rate": "Of drafts whose parent was accepted. Flat or slowly falling is normal; "
    "a steep fall after depth 1 means that later rounds are poorly trained. With prompt lookup it "
    "may rise with the depth: deep nodes are looked up, and a text that repeats itself goes on so.",
    "identical texts": "All of them in float32; in bfloat16 a near tie may fall either way.",
}


def measure_speed(settings: EvalSettings) -> None:
    """Load the pair, compile and warm up, time it beside the baseline, report.

    Raises:
      InputError: a file or a prompt cannot be used.
    """
    from .charts import write_speed_chart  # matplotlib is slow to import

    tree, name = settings.tree, settings.drafter
    if tree == "auto":
        assert name is not None
        tree = load_tree(name, settings.batch_size, settings.sampling.temperature)
    target, ask = load(settings, [tree] if tree else [], settings.batch_size)
    drafter = None if name is None else load_drafter(name, settings.dtype, target.mesh)
    bound = RootOnly() if tree is None else bind(target.config, drafter, tree)
    asked = ask(settings.sampling)
    methods = {BASELINE: Method(target, RootOnly()), "speculative": Method(target, bound)}
    timed = time_methods(
        methods, asked, settings.sampling, settings.batch_size, settings, "measure"
    )
    if not is_first():
        return
    verdict = None
    if tree is not None:
        verdict = judge_case(timed, {"speculative": (tree, drafter is not None)})
    measures = {
        **timed,
        "verdict": verdict,
        "tree": tree and asdict(tree),
        "num_nodes": bound.num_nodes,
        "target": asdict(target.config),
        "drafter": drafter and asdict(drafter.config),
    }
    path = settings.report_dir / "report.json"
    report = write_report(path, measures, settings, DEFINITIONS)
    setting = _describe(settings, report)
    chart = path.with_suffix(".png")
    write_speed_chart(report, setting, chart)
    said = [*answer_lines(report["answers"]), *(lookup_lines(verdict) if verdict else ())]
    show(path, setting, *said, *_tables(report), f"The chart: {chart}")
    print(verdict["sentence"] if verdict else _NO_TREE)


def time_methods(
    methods: Mapping[str, Method],
    asked: EncodedPrompts,
    sampling: SamplingConfig,
    batch_size: int,
    settings: EvalSettings,
    name: str,
) -> dict[str, Any]:
    """Compile and warm up every method, time all of them in turns, and summarize."""
    batches = make_batches(asked, batch_size, sampling, settings)
    warm_up(methods, batches, settings.warm_ups, name)
    turns = measure(methods, batches, settings.repeats)
    timed = list(track(turns, len(batches) * settings.repeats, name))
    return summarize(asked, batch_size, timed)


def summarize(asked: EncodedPrompts, batch_size: int, turns: Sequence[TimedTurn]) -> dict[str, Any]:
    """The measures of every method: over all prompts, per category, and of each prompt."""
    prompts = asked.prompts

    def measures(indices: Sequence[int]) -> dict[str, dict[str, Any]]:
        batches = {index // batch_size for index in indices}
        whole = [turn for turn in turns if turn.batch in batches]
        own = list(_restrict(whole, indices, batch_size))
        return {name: _measure(name, own, whole) for name in turns[0].runs}

    def all_of(category: str) -> list[int]:
        return [index for index, prompt in enumerate(prompts) if prompt.category == category]

    categories = dict.fromkeys(prompt.category for prompt in prompts if prompt.category is not None)
    texts = [text for turn in turns if turn.repeat == 0 for text in turn.runs[BASELINE].tokens]
    return {
        "answers": describe_answers(asked, texts),
        "methods": measures(range(len(prompts))),
        "categories": {
            name: {"prompts": len(all_of(name)), "methods": measures(all_of(name))}
            for name in categories
        },
        "prompts": [
            {
                "id": prompt.name,
                "turn": asked.turns[index],
                "category": prompt.category,
                "batch": index // batch_size,
                "prompt_tokens": len(tokens),
                "methods": measures([index]),
            }
            for index, (prompt, tokens) in enumerate(zip(prompts, asked.rows, strict=True))
        ],
        "runs": [
            {"method": name, "batch": turn.batch, "repeat": turn.repeat}
            | {field: getattr(run, field) for field in _TIMES}
            for turn in turns
            for name, run in turn.runs.items()
        ],
    }


def _restrict(
    turns: Sequence[TimedTurn], indices: Sequence[int], batch_size: int
) -> Iterator[TimedTurn]:
    """The turns as if only these prompts had been in their batches."""
    for turn in turns:
        rows = [index % batch_size for index in indices if index // batch_size == turn.batch]
        yield turn._replace(runs={name: run.select(rows) for name, run in turn.runs.items()})


def _measure(name: str, turns: Sequence[TimedTurn], whole: Sequence[TimedTurn]) -> dict[str, Any]:
    """What the report says of a method; `DEFINITIONS` explains it.

    `turns` have only the prompts that are reported; `whole` has all prompts of their batches, which
    share the decode steps.
    """
    calls = _rates(name, whole, lambda run: max(run.steps), lambda run: run.decode_seconds)
    milliseconds = quartiles(1000 / calls)
    texts = [
        pair
        for turn in turns
        for pair in zip(turn.runs[name].tokens, turn.runs[BASELINE].tokens, strict=True)
    ]
    return {
        **count_accepted([turn.runs[name] for turn in turns if turn.repeat == 0]),
        "identical": float(np.mean([ours == theirs for ours, theirs in texts])),
        **_speeds(name, turns, lambda run: run.new_tokens, lambda run: run.seconds),
        "decode_only": {
            **_speeds(name, turns, lambda run: run.decoded_tokens, lambda run: run.decode_seconds),
            "milliseconds_per_target_call": milliseconds and milliseconds[1],
        },
    }


def _speeds(
    name: str,
    turns: Sequence[TimedTurn],
    amount: Callable[[Run], int],
    seconds: Callable[[Run], float],
) -> dict[str, Any]:
    ours, theirs = (_rates(one, turns, amount, seconds) for one in (name, BASELINE))
    speeds, ratios = quartiles(ours), quartiles(ours / theirs)
    return {
        "tokens_per_second": speeds and speeds[1],
        "speedup": ratios and ratios[1],
        "speedup_quartiles": ratios and [ratios[0], ratios[2]],
    }


def _rates(
    name: str,
    turns: Sequence[TimedTurn],
    amount: Callable[[Run], int],
    seconds: Callable[[Run], float],
) -> Float[np.ndarray, " turns"]:
    """Amounts per second; NaN where the amount is 0."""
    runs = [turn.runs[name] for turn in turns]
    return np.asarray([amount(run) / seconds(run) if amount(run) else np.nan for run in runs])


def _describe(settings: EvalSettings, report: Mapping[str, Any]) -> str:
    """Models, tree, sampling and device in three lines."""
    tree = (report["tree"] or {}) | {"num_nodes": report["num_nodes"]}
    described = ", ".join(f"{name} {value}" for name, value in tree.items() if value)
    sampling = describe_sampling(settings.sampling)
    return (
        f"{settings.target} with {settings.drafter or 'prompt lookup'}\n"
        f"{described}; {sampling}; {settings.dtype}, batch {settings.batch_size}\n"
        f"{len(report['prompts'])} prompts, up to {settings.max_new_tokens} new tokens; "
        f"{report['device']}"
    )


def _tables(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Measures side by side, categories if there are several, and how to read them."""
    methods, categories = report["methods"], report["categories"]
    columns = {name: dict(_column(name, report)) for name in methods}
    lines = dict.fromkeys(line for column in columns.values() for line in column)
    rows = [[line, *(column.get(line, "") for column in columns.values())] for line in lines]
    yield make_table("", ["", *methods], rows)
    if len(categories) > 1:
        yield make_table(
            "",
            ["category", "method", "prompts", "speedup", "acceptance length", "identical"],
            [
                [
                    category,
                    name,
                    str(measures["prompts"]),
                    number(one["speedup"], ".2f"),
                    number(one["acceptance_length"], ".2f"),
                    number(one["identical"], ".0%"),
                ]
                for category, measures in categories.items()
                for name, one in measures["methods"].items()
                if name != BASELINE
            ],
            text_columns=2,
        )
    yield from (Text(f"{name}: {meaning}", style="dim") for name, meaning in LEGEND.items())


def _column(method: str, report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the table says of one method, in the order of its rows."""
    measures, prompts = report["methods"][method], report["prompts"]
    decode_only = measures["decode_only"]
    for name, speeds in {"": measures, ", decode only": decode_only}.items():
        yield f"tokens/s{name}", number(speeds["tokens_per_second"], ".1f")
        middle, ends = speeds["speedup"], speeds["speedup_quartiles"]
        spread = "" if ends is None else f" [{ends[0]:.2f} to {ends[1]:.2f}]"
        yield f"speedup{name}", number(middle, ".2f") + spread
    yield "ms per target call", number(decode_only["milliseconds_per_target_call"], ".2f")
    yield "target calls", str(measures["target_calls"])
    same = [row["methods"][method]["identical"] == 1 for row in prompts]
    yield "identical texts", f"{sum(same)} of {len(same)}"
    yield "acceptance length", number(measures["acceptance_length"], ".2f")
    if len(measures["accepted_by"]) > 1:
        calls = max(measures["target_calls"], 1)
        yield "  of it bonus", "1.00"
        for name, accepted in measures["accepted_by"].items():
            yield f"  of it {name}", f"{accepted / calls:.2f}"
    reached = measures["calls_per_depth"]
    for depth, rate in enumerate(measures["acceptance_rate_per_depth"], start=1):
        counts = f" ({reached[depth]} of {reached[depth - 1]})"
        yield f"acceptance rate at depth {depth}", number(rate, ".2f") + counts
