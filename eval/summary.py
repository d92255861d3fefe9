"""The summary of one sampling for `python -m eval compare`, from the runs of all methods."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from redrafter_jax.config import TreeConfig
from redrafter_jax.text.prompts import EncodedPrompts
from redrafter_jax.types import LOOKUP
from redrafter_jax.verdict import MeasuredWay, Texts, Verdict, judge

from . import metrics
from .benchmark import Run, TimedTurn
from .metrics import count_accepted, describe_answers, quartiles

BASELINE = "baseline"
_RESAMPLES, _LEVEL = 9999, 0.95
DEFINITIONS = metrics.DEFINITIONS | {
    "tokens_per_second": "median over all runs of new tokens / wall time of the whole call, "
    "including prefill and the transfer to the host, without compilation; for a prompt or "
    "category, its own tokens / the time of its whole batch; all times are null with clock=false",
    "speedup": "median over all (batch, repeat) turns of the ratio to the baseline's tokens per "
    "second; the runs of a turn directly follow each other",
    "speedup_quartiles": "25% and 75% quartiles of the ratios of which `speedup` is the median",
    "timed_turns": "number of timed turns in which both methods decoded at least one token",
    "timed_turns_faster": "number of these turns in which the method was faster than the baseline",
    "speedup_interval": f"{_LEVEL:.0%} percentile interval of the median speed-up by a paired "
    f"bootstrap of {_RESAMPLES} samples. Batches, which are single prompts at batch size 1, are "
    "resampled with the runs of all methods in them. So the interval shows how far other prompts "
    "of this kind may differ",
    "acceptance_interval": "interval of the acceptance length, by a bootstrap over prompts",
    "decode_only": "the same measures without prefill and the first token, which prefill decides",
    "milliseconds_per_target_call": "median over runs of decode time / decode steps of the batch; "
    "includes drafting",
    "verdict": "verdict on the fastest drafting method, and whether the head or prompt lookup "
    "gains; with clock=false, the method with the largest acceptance length",
}
# Advice for each kind of verdict.
_NEXT = {
    "faster": "`eval tune` finds the fastest tree for this device",
    "slower": "decode without drafting, train the head on more tokens, or search for a smaller "
    "tree with `eval tune`",
    "no difference": "measure with more prompts or repeats, or search for a better tree with `eval "
    "tune`",
    "too little data": "give more prompts or repeats, or smaller batches, with answers of more "
    "tokens that do not repeat themselves",
}
_NO_TREE = (
    "By the drafter's table, decoding without drafting is fastest; measure the table again with "
    "`eval tune`, or state a tree as drafters.NAME.tree."
)
# Fields of every run in the report.
_RUN = ("new_tokens", "prefill_seconds", "decode_seconds")


class Way(NamedTuple):
    """A drafting method: a drafter and a tree.

    Attributes:
      drafter: folder or hub id of the drafter; None for prompt lookup alone, or for the baseline.
      tree: draft tree; None for the baseline, which a drafter's table of trees may also choose.
    """

    drafter: str | None
    tree: TreeConfig | None


def summarize(asked: EncodedPrompts, batch_size: int, turns: Sequence[TimedTurn]) -> dict[str, Any]:
    """Compute the measures of every method: over all prompts, per category and per prompt.

    Args:
      asked: the encoded prompts.
      batch_size: number of prompts in a batch; the last batch may be smaller.
      turns: the timed turns of all batches.
    """
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
            | {field: getattr(run, field) for field in _RUN}
            for turn in turns
            for name, run in turn.runs.items()
        ],
    }


def _restrict(
    turns: Sequence[TimedTurn], indices: Sequence[int], batch_size: int
) -> Iterator[TimedTurn]:
    """Restrict turns to the rows of these prompts."""
    for turn in turns:
        rows = [index % batch_size for index in indices if index // batch_size == turn.batch]
        yield turn._replace(runs={name: run.select(rows) for name, run in turn.runs.items()})


def _measure(name: str, turns: Sequence[TimedTurn], whole: Sequence[TimedTurn]) -> dict[str, Any]:
    """Compute the measures of a method; see `DEFINITIONS`.

    `turns` has only the reported prompts; `whole` has all prompts of their batches, which share the
    decode steps.
    """
    calls = _rates(name, whole, lambda run: max(run.steps), lambda run: run.decode_seconds)
    milliseconds = quartiles(1000 / calls)
    texts = [
        pair
        for turn in turns
        for pair in zip(turn.runs[name].tokens, turn.runs[BASELINE].tokens, strict=True)
    ]
    first = [turn.runs[name] for turn in turns if turn.repeat == 0]
    counts = np.concatenate([run.accept_counts for run in first])
    tokens = counts @ np.arange(1.0, counts.shape[1] + 1)
    return {
        **count_accepted(first),
        "acceptance_interval": _interval(
            [tokens, counts.sum(axis=1).astype(float)], _ratio_of_sums
        ),
        "identical": float(np.mean([ours == theirs for ours, theirs in texts])),
        **_speeds(name, turns, lambda run: run.new_tokens, lambda run: run.seconds),
        "decode_only": {
            **_speeds(name, turns, lambda run: run.decoded_tokens, lambda run: run.decode_seconds),
            "milliseconds_per_target_call": milliseconds and milliseconds[1],
        },
    }


def _ratio_of_sums(tokens: Any, calls: Any, axis: int) -> Any:
    return tokens.sum(axis) / np.where((total := calls.sum(axis)) > 0, total, np.nan)


def _speeds(
    name: str,
    turns: Sequence[TimedTurn],
    amount: Callable[[Run], int],
    seconds: Callable[[Run], float],
) -> dict[str, Any]:
    ours, theirs = (_rates(one, turns, amount, seconds) for one in (name, BASELINE))
    ratios = ours / theirs
    speeds, ends = quartiles(ours), quartiles(ratios)
    by_batch: dict[int, list[float]] = {}
    for turn, ratio in zip(turns, ratios.tolist(), strict=True):
        if not np.isnan(ratio):
            by_batch.setdefault(turn.batch, []).append(ratio)
    medians = np.asarray([np.median(each) for each in by_batch.values()])
    return {
        "tokens_per_second": speeds and speeds[1],
        "speedup": ends and ends[1],
        "speedup_quartiles": ends and [ends[0], ends[2]],
        "timed_turns": int(np.isfinite(ratios).sum()),
        "timed_turns_faster": int((ratios > 1).sum()),
        "speedup_interval": _interval([medians], np.median),
    }


def _rates(
    name: str,
    turns: Sequence[TimedTurn],
    amount: Callable[[Run], int],
    seconds: Callable[[Run], float],
) -> Float[np.ndarray, " turns"]:
    """Amounts per second; NaN if the amount is 0, or the run was not timed."""
    runs = [turn.runs[name] for turn in turns]
    return np.asarray(
        [amount(run) / seconds(run) if amount(run) and seconds(run) else np.nan for run in runs]
    )


def _interval(samples: Sequence[Float[np.ndarray, " n"]], statistic: Any) -> list[float] | None:
    """Percentile interval of a paired bootstrap; None for fewer than two samples."""
    if len(samples[0]) < 2:
        return None
    from scipy.stats import bootstrap  # slow to import

    if len({tuple(row) for row in np.stack(samples, axis=1).tolist()}) == 1:
        one = float(statistic(*samples, axis=0))
        return None if np.isnan(one) else [one, one]
    found = bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=_LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    return None if np.isnan(low) or np.isnan(high) else [float(low), float(high)]


def judge_case(case: Mapping[str, Any], ways: Mapping[str, Way], timed: bool) -> dict[str, Any]:
    """Judge the drafting methods under one sampling, for the report.

    Args:
      case: the measures, from `summarize`.
      ways: the methods by name.
      timed: whether the runs were timed.
    """
    ways = {name: way for name, way in ways.items() if way.tree is not None}
    if not ways:
        return {"kind": "no tree", "method": BASELINE, "sentence": _NO_TREE}
    if not timed:
        return _most_accepted({name: case["methods"][name]["acceptance_length"] for name in ways})
    measured = []
    for name, way in ways.items():
        own = case["methods"][name]
        middle, ends = own["speedup"], own["speedup_quartiles"]
        speedup = None if ends is None else (ends[0], middle, ends[1])
        has_head = way.drafter is not None
        counts = own["accepted_by"], own["timed_turns"], own["timed_turns_faster"]
        measured.append(MeasuredWay(name, way.tree, has_head, speedup, *counts))
    said = case["answers"]
    verdict = judge(measured, Texts(len(case["prompts"]), said["repeating"], said["short"]))
    sentence = verdict.then(_next_step(verdict))
    return {"kind": verdict.kind, "method": verdict.way.name, "sentence": sentence}


def _next_step(verdict: Verdict) -> str:
    tree = verdict.way.tree
    if verdict.kind == "faster" and not verdict.way.is_heads_own and tree is not None:
        return f"it needs no head: --no-drafter --lookup-tokens {tree.lookup_tokens}"
    return _NEXT[verdict.kind]


def _most_accepted(lengths: Mapping[str, float]) -> dict[str, Any]:
    """The result if nothing is timed: the method with the largest acceptance length."""
    best = max(lengths, key=lambda name: lengths[name])
    sentence = (
        f"Most accepted: {best!r} gains {lengths[best]:.2f} tokens per target call; measure with "
        "clock=true whether it is faster."
    )
    return {"kind": "not timed", "method": best, "sentence": sentence}


def lookup_lines(case: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each method with a head for which prompt lookup proposed most tokens."""
    for name, way in case["ways"].items():
        accepted = case["methods"][name]["accepted_by"]
        share = accepted.get(LOOKUP, 0) / max(sum(accepted.values()), 1)
        if way["drafter"] is not None and share > 0.5:
            yield (
                f"Warning: prompt lookup proposed {share:.0%} of the accepted tokens of {name!r}: "
                "the gain is not the head's; measure the head alone with "
                "drafters.NAME.tree.lookup_tokens=0, and state a tree if it is auto."
            )
