"""From timed runs to the numbers of `report.json`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float

from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.text.prompts import Prompt

from .benchmark import Method, Run, Turn, sum_accepted
from .metrics import count_accepted, first_divergence, quartiles

DEFINITIONS = {
    "acceptance_length": "mean tokens gained per target call after prefill, bonus token included; "
    "1.0 for the baseline",
    "acceptance_rate_per_depth": "share of drafts accepted at depth 1, 2, ... given that their "
    "parent was accepted; a call cut short by a row's limit counts as a rejection",
    "calls_per_depth": "entry d: target calls that accepted a draft at depth d, entry 0 all of "
    "them; the rate at depth d is entry d / entry d - 1",
    "accept_counts": "entry c - 1: target calls that gained exactly c tokens",
    "accepted_by": "accepted tokens by the source that proposed them; a token that several "
    "proposed counts for the first, and a call's last token is its bonus token",
    "target_calls": "target calls after prefill, summed over prompts, in one pass over them",
    "identical": "share of prompts whose text equals the baseline's, token for token, in every "
    "repeat",
    "tokens_per_second": "median over all runs of new tokens / wall time of the whole call, "
    "prefill and the way to the host included, compilation not",
    "speedup": "median over all (batch, repeat) turns of the ratio of the two tokens per second; "
    "a turn's two runs follow each other at once",
    "decode_only": "the same without prefill and the first token, which prefill decides",
    "milliseconds_per_target_call": "median over runs of decode time / decode steps of the batch; "
    "in speculative decoding it includes drafting",
    "quartiles": "25% and 75%",
}


def build_report(
    batch_size: int,
    method: Method,
    prompts: Sequence[Prompt],
    token_rows: Sequence[list[int]],
    turns: Sequence[Turn],
) -> dict[str, Any]:
    """The measures of `report.json`; `DEFINITIONS` says what they mean.

    Args:
      batch_size: prompts decoded together.
      method: the speculative method that was measured.
      prompts: the prompts in their order.
      token_rows: their tokens.
      turns: from `eval.benchmark.measure`, of "speculative" and "baseline".
    """
    rows = _prompt_rows(batch_size, prompts, token_rows, turns)
    first_pass = [turn.runs["speculative"] for turn in turns if turn.repeat == 0]
    return {
        **count_accepted(np.concatenate([run.accept_counts for run in first_pass])),
        "identical": float(np.mean([row["identical"] for row in rows])),
        **_speeds(turns, lambda run: run.new_tokens, lambda run: run.seconds),
        "decode_only": {
            **_speeds(turns, lambda run: run.decoded_tokens, lambda run: run.decode_seconds),
            **_call_times(turns),
        },
        "target_calls": sum(row["target_calls"] for row in rows),
        "autoregressive_target_calls": sum(row["autoregressive_target_calls"] for row in rows),
        "new_tokens": sum(row["new_tokens"] for row in rows),
        "accepted_by": sum_accepted(first_pass),
        "num_nodes": method.drafter.num_nodes,
        "target": asdict(method.target.config),
        "drafter": next((asdict(model.config) for model in method.drafter.models), None),
        "categories": _categories(rows),
        "prompts": rows,
        "runs": [_run_row(turn) for turn in turns],
    }


def _prompt_rows(
    batch_size: int,
    prompts: Sequence[Prompt],
    token_rows: Sequence[list[int]],
    turns: Sequence[Turn],
) -> list[dict[str, Any]]:
    rows = []
    for index, (prompt, tokens) in enumerate(zip(prompts, token_rows, strict=True)):
        batch, row = divmod(index, batch_size)
        own = [turn for turn in turns if turn.batch == batch]
        ours, theirs = _runs(own, "speculative"), _runs(own, "baseline")
        divergences = [
            first_divergence(run.tokens[row], other.tokens[row])
            for run, other in zip(ours, theirs, strict=True)
        ]
        divergence = next((place for place in divergences if place is not None), None)
        rows.append(
            {
                "id": prompt.name,
                "category": prompt.category,
                "batch": batch,
                "prompt_tokens": len(tokens),
                "new_tokens": len(ours[0].tokens[row]),
                "target_calls": ours[0].steps[row],
                "autoregressive_target_calls": theirs[0].steps[row],
                "acceptance_length": acceptance_length(ours[0].accept_counts[row]),
                "accept_counts": ours[0].accept_counts[row].tolist(),
                "accepted_by": {name: of[row] for name, of in ours[0].accepted_by.items()},
                "identical": divergence is None,
                "first_divergence": divergence,
                # Of the prompt's whole batch, median over repeats.
                "batch_seconds": float(np.median([run.seconds for run in ours])),
                "autoregressive_batch_seconds": float(np.median([run.seconds for run in theirs])),
                "batch_speedup": _speeds(own, lambda run: run.new_tokens, lambda run: run.seconds)[
                    "speedup"
                ],
            }
        )
    return rows


def _categories(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same measures per category, where rows state one; speedup: median of their batches'."""
    categories: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["category"] for row in rows if row["category"] is not None):
        members = [row for row in rows if row["category"] == name]
        counts = np.asarray([row["accept_counts"] for row in members])
        categories[name] = {
            "prompts": len(members),
            "acceptance_length": acceptance_length(counts),
            "identical": float(np.mean([row["identical"] for row in members])),
            "speedup": float(np.median([row["batch_speedup"] for row in members])),
        }
    return categories


def _runs(turns: Sequence[Turn], name: str) -> list[Run]:
    return [turn.runs[name] for turn in turns]


def _speeds(
    turns: Sequence[Turn], amount: Callable[[Run], int], seconds: Callable[[Run], float]
) -> dict[str, Any]:
    ours = _rates(_runs(turns, "speculative"), amount, seconds)
    theirs = _rates(_runs(turns, "baseline"), amount, seconds)
    ratio = quartiles(ours / theirs)
    return {
        "tokens_per_second": _median(ours),
        "autoregressive_tokens_per_second": _median(theirs),
        "speedup": ratio and ratio[1],
        "speedup_quartiles": ratio and [ratio[0], ratio[2]],
    }


def _call_times(turns: Sequence[Turn]) -> dict[str, float | None]:
    prefixes = {"": "speculative", "autoregressive_": "baseline"}
    return {
        f"{prefix}milliseconds_per_target_call": _median(
            1000
            / _rates(_runs(turns, name), lambda run: max(run.steps), lambda run: run.decode_seconds)
        )
        for prefix, name in prefixes.items()
    }


def _rates(
    runs: Sequence[Run], amount: Callable[[Run], int], seconds: Callable[[Run], float]
) -> Float[np.ndarray, " n"]:
    """Amounts per second; NaN where there was nothing to do."""
    return np.asarray([amount(run) / seconds(run) if amount(run) else np.nan for run in runs])


def _median(values: Float[np.ndarray, " n"]) -> float | None:
    found = quartiles(values)
    return None if found is None else found[1]


def _run_row(turn: Turn) -> dict[str, Any]:
    prefixes = {"": turn.runs["speculative"], "autoregressive_": turn.runs["baseline"]}
    return {"batch": turn.batch, "repeat": turn.repeat} | {
        f"{prefix}{name}": getattr(run, name)
        for prefix, run in prefixes.items()
        for name in ("new_tokens", "prefill_seconds", "decode_seconds")
    }
