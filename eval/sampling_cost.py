"""`python -m eval sampling`: what sampling and its filters add to a decode step.

The models have the shape of a real pair and random weights: what is said means nothing, what it
costs does not depend on it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from redrafter_jax.command_line import make_folder
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.generation import start
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.program import program
from redrafter_jax.requests import prepare
from redrafter_jax.sampling import draw_noise
from redrafter_jax.settings.arguments import parse_settings

from .progress import make_progress
from .random_weights import random_drafter, random_target
from .report import describe_run, write_report
from .shape_config import SamplingCostSettings
from .table import describe_sampling, render_sampling_cost

DEFINITIONS = {
    "plain_milliseconds": "one-node decode step, median over repeats",
    "speculative_milliseconds": "decode step with drafting, median over repeats",
    "plain_share": "median over repeats of (step - greedy step) / greedy step, both of the same "
    "repeat",
    "speculative_share": "the same of the speculative step",
    "noise_milliseconds": "the noise alone, of the P positions of a speculative step and of "
    "the one position of a plain step",
}


def measure_sampling(arguments: Sequence[str] | None = None) -> None:
    """Time decode steps under each sampling in turn, greedy ones among them, over and over.

    Args:
      arguments: of the command line; None takes the process's own.

    Raises:
      InputError: a setting cannot be used.
    """
    settings = parse_settings(
        SamplingCostSettings,
        "What sampling and its filters add to a decode step.",
        arguments,
        command="sampling",
    )
    make_folder(settings.report_dir, "report_dir")
    draft = settings.draft
    target_config, drafter_config = settings.target.build(), settings.drafter_config()
    check_pair(target_config, drafter_config, draft)
    dtype = jnp.dtype(settings.dtype)
    target = random_target(target_config, dtype)
    drafter = random_drafter(drafter_config, dtype)
    samplings = [SamplingConfig(), *settings.samplings]

    timers: dict[str, Callable[[], float]] = {}
    for sampling in samplings:
        name = describe_sampling(sampling)
        timers[f"plain {name}"] = partial(_time_steps, settings, target, None, None, sampling)
        timers[f"speculative {name}"] = partial(
            _time_steps, settings, target, drafter, draft, sampling
        )
    timers["plain noise"] = partial(_time_noise, settings, target, 1)
    timers["speculative noise"] = partial(_time_noise, settings, target, draft.max_path)

    console = Console()
    times: dict[str, list[float]] = {name: [] for name in timers}
    with make_progress(console) as progress:
        for repeat in progress.track(range(settings.repeats + 1), description="measure"):
            for name, timer in timers.items():
                seconds = timer()
                if repeat:  # the first one compiles
                    times[name].append(1000 * seconds)

    rows = [_row(describe_sampling(sampling), times) for sampling in samplings]
    noise = {kind: float(np.median(times[f"{kind} noise"])) for kind in ("plain", "speculative")}
    report = {
        "rows": rows,
        "noise_milliseconds": noise,
        **describe_run(),
        "config": settings.model_dump(mode="json"),
        "target": asdict(target_config),
        "drafter": asdict(drafter_config),
        "definitions": DEFINITIONS,
    }
    path = settings.report_dir / "sampling.json"
    write_report(report, path)
    console.print(render_sampling_cost(rows))
    for kind, middle in noise.items():
        share = middle / rows[0][f"{kind}_milliseconds"]
        print(f"noise of a {kind} step: {middle:.2f} ms, {share:.1%} of the greedy one")
    print(f"The report: {path}")


def _time_steps(
    settings: SamplingCostSettings,
    target: Target,
    drafter: DraftModel | None,
    draft: DraftConfig | None,
    sampling: SamplingConfig,
) -> float:
    """Seconds per decode step."""
    max_path = draft.max_path if draft else 1
    prompts = [[1] * settings.prompt_tokens] * settings.batch_size
    # No row ends before the last step, however many tokens it gains.
    limit = settings.steps * max_path + 1
    layers = context_layers_of(drafter)
    state, _ = start(
        target, prompts, limit, sampling, None, (), max_path=max_path, context_layers=layers
    )
    state = jax.block_until_ready(state)
    started = time.perf_counter()
    jax.block_until_ready(decode(target, drafter, state, settings.steps, draft=draft))
    return (time.perf_counter() - started) / settings.steps


_noise = program(static_argnames=("count", "vocab_size"))(draw_noise)


def _time_noise(settings: SamplingCostSettings, target: Target, count: int) -> float:
    prompts = [[1]] * settings.batch_size
    requests, _ = prepare(target.config, prompts, 1, SamplingConfig(1.0), None, (), 1)
    started = time.perf_counter()
    jax.block_until_ready(
        _noise(
            requests.sampling, requests.lengths, count=count, vocab_size=target.config.vocab_size
        )
    )
    return time.perf_counter() - started


def _row(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"sampling": name}
    for kind in ("plain", "speculative"):
        ours, greedy = np.asarray(times[f"{kind} {name}"]), np.asarray(times[f"{kind} greedy"])
        row[f"{kind}_milliseconds"] = float(np.median(ours))
        row[f"{kind}_share"] = float(np.median(ours / greedy)) - 1
    return row
