"""`python -m eval drafters`: what drafting costs with one kind of drafter and with another.

All have random weights and one target's shape, and are timed in turns on the same state. What a
kind brings in acceptance is seen on a trained one, by `python -m eval acceptance`.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.timing import interleave
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import DraftConfig, DrafterConfig
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target

from .abstract import abstract_state, bytes_of
from .metrics import quartiles
from .progress import track
from .random_weights import random_drafter, random_target
from .report import write_report
from .shape_config import DraftersSettings
from .step_parts import fill_state, run_noise, run_propose
from .table import render_drafters, show
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


def compare_drafters(settings: DraftersSettings) -> None:
    """Time every kind of drafter on every tree; a table and a JSON file.

    Raises:
      InputError: a drafter or a tree does not fit the target.
    """
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
    rows = [
        row
        for draft in track(drafts, len(drafts), "measure")
        for row in measure(target, configs, draft, settings)
    ]
    path = settings.report_dir / "drafters.json"
    write_report(path, {"rows": rows}, settings, DEFINITIONS)
    show(path, render_drafters(rows))


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
            "milliseconds": quartiles(1000 * times[name]),
            "relative": quartiles(times[name] / first),
        }
        for name, drafter in drafters.items()
    ]


def make_timer(
    target: Target, drafter: DraftModel, draft: DraftConfig, settings: DraftersSettings
) -> Callable[[], float]:
    """Seconds that drafting one tree takes."""
    bound = bind_drafter(drafter, draft)
    # Drafting reads no cache.
    state = fill_state(abstract_state(target, bound, settings.batch_size, 32))
    zero, V = jnp.int32(0), target.config.vocab_size
    noise = run_noise(state, zero, max_path=bound.max_path, vocab_size=V, turns=1)

    def run() -> float:
        started = time.perf_counter()
        tree = run_propose(target, bound, state, noise, zero, turns=settings.steps)
        jax.block_until_ready(tree)
        return (time.perf_counter() - started) / settings.steps

    return run
