"""`python -m eval drafters`: what drafting costs with one kind of drafter and with another.

All have random weights and one target's shape, and are timed in turns on the same state. What a
kind brings in acceptance is seen on a trained one, by `python -m eval acceptance`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from pallas_kernels.timing import interleave
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import DraftConfig, DrafterConfig
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.types import TokenTree

from .abstract import abstract_state, bytes_of
from .progress import make_progress
from .random_weights import random_drafter, random_target
from .report import describe_run, write_report
from .shape_config import DraftersSettings
from .step_parts import fill_state, make_noise, run_draft
from .table import render_drafters
from .traffic import draft_weight_bytes

DEFINITIONS = {
    "weight_bytes": "all of the drafter's own weights",
    "bytes_per_step": "weights that drafting one tree reads: each of R rounds all of the "
    "drafter's, and the target's vocabulary projection of the tokens that can be drafted where it "
    "has none; what projects the context is read once. Computed from shapes",
    "milliseconds": "lower quartile, median and upper quartile over repeats, of the beam search "
    "and the tree of one step",
    "relative": "quartiles over repeats of the time / the first drafter's of the same repeat",
}


def compare_drafters(arguments: Sequence[str] | None = None) -> None:
    """Time every kind of drafter on every tree; a table and a JSON file.

    Args:
      arguments: of the command line; None takes the process's own.

    Raises:
      InputError: a setting cannot be used.
    """
    settings = parse_settings(
        DraftersSettings, "What drafters of other kinds cost.", arguments, command="drafters"
    )
    drafts = [draft for sizes in settings.trees for draft in sizes.build()]
    target_config = settings.target.build()
    configs = {
        name: shape.build_for(target_config, name=f"drafters.{name}")
        for name, shape in settings.drafters.items()
    }
    for config in configs.values():
        for draft in drafts:
            check_pair(target_config, config, draft)
    make_folder(settings.report_dir, "report_dir")
    target = random_target(target_config, settings.dtype)
    console = Console()
    with make_progress(console) as progress:
        rows = [
            row
            for draft in progress.track(drafts, description="measure")
            for row in measure(target, configs, draft, settings)
        ]
    report = {
        "rows": rows,
        **describe_run(),
        "config": settings.model_dump(mode="json"),
        "definitions": DEFINITIONS,
    }
    path = settings.report_dir / "drafters.json"
    write_report(report, path)
    console.print(render_drafters(rows))
    print(f"The report: {path}")


def measure(
    target: Target,
    configs: dict[str, DrafterConfig],
    draft: DraftConfig,
    settings: DraftersSettings,
) -> list[dict[str, Any]]:
    """A row of the report for each drafter, timed in turns."""
    drafters = {name: random_drafter(config, settings.dtype) for name, config in configs.items()}
    timers = {
        name: make_timer(target, drafter, draft, settings) for name, drafter in drafters.items()
    }
    for timer in timers.values():
        timer()  # compiles
    times = interleave(timers, settings.repeats)
    first = next(iter(times.values()))
    return [
        {
            "drafter": name,
            "beam_width": draft.beam_width,
            "draft_rounds": draft.draft_rounds,
            "batch_size": settings.batch_size,
            "weight_bytes": bytes_of(drafter),
            "bytes_per_step": draft_weight_bytes(drafter, draft),
            "milliseconds": _quartiles(1000 * times[name]),
            "relative": _quartiles(times[name] / first),
        }
        for name, drafter in drafters.items()
    ]


def make_timer(
    target: Target, drafter: DraftModel, draft: DraftConfig, settings: DraftersSettings
) -> Callable[[], float]:
    """Seconds that drafting one tree takes."""
    layers = drafter.config.context_layers
    # Drafting reads no cache.
    state = fill_state(abstract_state(target, settings.batch_size, 32, draft.max_path, layers))
    noise = make_noise(state, max_path=draft.max_path, vocab_size=target.config.vocab_size)
    zero = jnp.int32(0)

    def search() -> TokenTree:
        return run_draft(target, drafter, state, noise, zero, draft=draft, turns=settings.steps)

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(search())
        return (time.perf_counter() - started) / settings.steps

    return run


def _quartiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))]
