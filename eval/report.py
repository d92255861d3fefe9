"""From timed pairs to the numbers of `report.json`."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from redrafter_jax.acceptance import acceptance_length, acceptance_rate_per_depth
from redrafter_jax.text.prompts import Prompt

from .benchmark import Method, Pair, Run
from .config import EvalSettings
from .metrics import (
    first_divergence,
    identical_fraction,
    rates,
    spread,
)

DEFINITIONS = {
    "acceptance_length": "mean tokens gained per target call after prefill, bonus token included; "
    "plain decoding has 1.0",
    "acceptance_rate_per_depth": "share of drafts accepted at depth 1, 2, ... given that their "
    "parent was accepted; a call cut short by a row's limit counts as rejecting",
    "accept_counts": "entry c - 1: target calls that gained exactly c tokens",
    "copied_tokens": "accepted tokens that were copied (draft.lookup_tokens), in the same calls; "
    "what the beams had as well is the drafter's, and a call's last token its bonus token",
    "target_calls": "target calls after prefill, summed over prompts, in one pass over them",
    "identical": "share of prompts whose text equals plain decoding's, token for token, in every "
    "repeat",
    "tokens_per_second": "median over all runs of new tokens / wall time of the whole call, "
    "prefill and the way to the host included, compilation not",
    "speedup": "median over all (batch, repeat) pairs of the ratio of the two tokens per second; "
    "a pair's two runs follow each other at once",
    "decode_only": "the same without prefill and the first token, which prefill decides",
    "milliseconds_per_target_call": "median over runs of decode time / decode steps of the batch; "
    "in speculative decoding it includes drafting",
    "quartiles": "25% and 75%",
}


def build_report(
    settings: EvalSettings,
    method: Method,
    prompts: Sequence[Prompt],
    token_rows: Sequence[list[int]],
    pairs: Sequence[Pair],
) -> dict[str, Any]:
    """Everything that `report.json` holds; `DEFINITIONS`, which it includes, says how.

    Args:
      settings: the resolved settings.
      method: the speculative method that was measured.
      prompts: the prompts in their order.
      token_rows: their tokens.
      pairs: from `eval.benchmark.measure`.
    """
    rows = _prompt_rows(settings.batch_size, prompts, token_rows, pairs)
    first_pass = [pair for pair in pairs if pair.repeat == 0]
    accept_counts = np.concatenate([pair.speculative.accept_counts for pair in first_pass])
    return {
        "acceptance_length": acceptance_length(accept_counts),
        "acceptance_rate_per_depth": [
            None if np.isnan(rate) else float(rate)
            for rate in acceptance_rate_per_depth(accept_counts)
        ],
        "identical": identical_fraction([row["first_divergence"] for row in rows]),
        **_speeds(pairs, lambda run: run.new_tokens, lambda run: run.seconds),
        "decode_only": {
            **_speeds(pairs, lambda run: run.decoded_tokens, lambda run: run.decode_seconds),
            **_call_times(pairs),
        },
        "target_calls": sum(row["target_calls"] for row in rows),
        "autoregressive_target_calls": sum(row["autoregressive_target_calls"] for row in rows),
        "new_tokens": sum(row["new_tokens"] for row in rows),
        "accept_counts": accept_counts.sum(axis=0).tolist(),
        "copied_tokens": sum(row["copied_tokens"] for row in rows),
        **describe_run(),
        "config": settings.model_dump(mode="json"),
        "num_nodes": method.draft.budget if method.draft else 1,
        "target": asdict(method.target.config),
        "drafter": asdict(method.drafter.config) if method.drafter else None,
        "definitions": DEFINITIONS,
        "categories": _categories(rows),
        "prompts": rows,
        "runs": [_run_row(pair) for pair in pairs],
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    """The report as JSON, for programs."""
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def describe_run() -> dict[str, Any]:
    """Where, when and with which versions it was measured."""
    return {
        "device": describe_device(),
        "peak_memory_bytes": _peak_memory(),
        "versions": describe_versions(),
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_device() -> str:
    """The accelerator's name, or the processor's and how many of its cores may be used."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return f"{_processor()}, {cores} cores"


def _prompt_rows(
    batch_size: int,
    prompts: Sequence[Prompt],
    token_rows: Sequence[list[int]],
    pairs: Sequence[Pair],
) -> list[dict[str, Any]]:
    rows = []
    for index, (prompt, tokens) in enumerate(zip(prompts, token_rows, strict=True)):
        batch, row = divmod(index, batch_size)
        own = [pair for pair in pairs if pair.batch == batch]
        speculative, plain = own[0].speculative, own[0].plain
        divergences = [
            first_divergence(pair.speculative.tokens[row], pair.plain.tokens[row]) for pair in own
        ]
        divergence = next((place for place in divergences if place is not None), None)
        speeds = _speeds(own, lambda run: run.new_tokens, lambda run: run.seconds)
        rows.append(
            {
                "id": prompt.name,
                "category": prompt.category,
                "batch": batch,
                "prompt_tokens": len(tokens),
                "new_tokens": len(speculative.tokens[row]),
                "target_calls": speculative.steps[row],
                "autoregressive_target_calls": plain.steps[row],
                "acceptance_length": acceptance_length(speculative.accept_counts[row]),
                "accept_counts": speculative.accept_counts[row].tolist(),
                "copied_tokens": speculative.copied_tokens[row],
                "identical": divergence is None,
                "first_divergence": divergence,
                # Of the prompt's whole batch, median over repeats.
                "batch_seconds": float(np.median([pair.speculative.seconds for pair in own])),
                "autoregressive_batch_seconds": float(
                    np.median([pair.plain.seconds for pair in own])
                ),
                "batch_speedup": speeds["speedup"],
            }
        )
    return rows


def _categories(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same measures per category, where rows state one; speedup: median of their batches'."""
    categories: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["category"] for row in rows if row["category"] is not None):
        members = [row for row in rows if row["category"] == name]
        speedups = [row["batch_speedup"] for row in members]
        categories[name] = {
            "prompts": len(members),
            "acceptance_length": acceptance_length(
                np.asarray([row["accept_counts"] for row in members])
            ),
            "identical": identical_fraction([row["first_divergence"] for row in members]),
            "speedup": float(np.median(speedups)),
        }
    return categories


def _speeds(
    pairs: Sequence[Pair], amount: Callable[[Run], int], seconds: Callable[[Run], float]
) -> dict[str, Any]:
    speculative = _rates([pair.speculative for pair in pairs], amount, seconds)
    plain = _rates([pair.plain for pair in pairs], amount, seconds)
    ours, theirs, ratio = spread(speculative), spread(plain), spread(speculative / plain)
    return {
        "tokens_per_second": ours.median if ours else None,
        "autoregressive_tokens_per_second": theirs.median if theirs else None,
        "speedup": ratio.median if ratio else None,
        "speedup_quartiles": [ratio.lower, ratio.upper] if ratio else None,
    }


def _call_times(pairs: Sequence[Pair]) -> dict[str, float | None]:
    times = {}
    for prefix, runs in {
        "": [pair.speculative for pair in pairs],
        "autoregressive_": [pair.plain for pair in pairs],
    }.items():
        calls = _rates(runs, lambda run: max(run.steps), lambda run: run.decode_seconds)
        middle = spread(1000 / calls)
        times[f"{prefix}milliseconds_per_target_call"] = middle.median if middle else None
    return times


def _rates(
    runs: Sequence[Run], amount: Callable[[Run], int], seconds: Callable[[Run], float]
) -> Float[np.ndarray, " n"]:
    return rates(
        np.asarray([amount(run) for run in runs]), np.asarray([seconds(run) for run in runs])
    )


def _run_row(pair: Pair) -> dict[str, Any]:
    return {
        "batch": pair.batch,
        "repeat": pair.repeat,
        "new_tokens": pair.speculative.new_tokens,
        "prefill_seconds": pair.speculative.prefill_seconds,
        "decode_seconds": pair.speculative.decode_seconds,
        "autoregressive_new_tokens": pair.plain.new_tokens,
        "autoregressive_prefill_seconds": pair.plain.prefill_seconds,
        "autoregressive_decode_seconds": pair.plain.decode_seconds,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _peak_memory() -> int | None:
    """Of the whole process on the first device; None where the platform does not count."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


def describe_versions() -> dict[str, str | None]:
    """Of Python and of the packages that decode."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("redrafter-jax", "jax", "jaxlib", "flax", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = None
    return found
