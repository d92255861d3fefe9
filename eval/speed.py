"""Speculative decoding against the autoregressive baseline: how much faster, with which texts."""

from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.parallel.processes import is_first

from .benchmark import Method, decode_batch, make_batches, measure, one_per_shape
from .config import EvalSettings
from .loading import load
from .plots import write_chart
from .progress import track
from .report import write_report
from .speed_report import DEFINITIONS, build_report
from .table import describe_setting, render_report, show


def measure_speed(settings: EvalSettings) -> None:
    """Load the pair, compile and warm up, time it against the baseline, report.

    Raises:
      InputError: a file or a prompt cannot be used.
    """
    draft = settings.draft
    target, drafter, prompts, token_rows = load(settings, [draft])
    batches = make_batches(token_rows, settings.batch_size, settings.sampling, settings)
    methods = {
        "speculative": Method(target, bind_drafter(drafter, draft)),
        "baseline": Method(target, RootOnly()),
    }
    shapes = one_per_shape(methods, batches)
    warming = [run for run in shapes for _ in range(settings.warm_ups)]
    for method, batch in track(warming, len(warming), "compile and warm up"):
        decode_batch(method, batch)
    total = len(batches) * settings.repeats
    turns = list(track(measure(methods, batches, settings.repeats), total, "measure"))
    if not is_first():
        return
    measures = build_report(settings.batch_size, methods["speculative"], prompts, token_rows, turns)
    path = settings.report_dir / "report.json"
    report = write_report(path, measures, settings, DEFINITIONS)
    write_chart(report, describe_setting(report), path.with_suffix(".png"))
    show(path, render_report(report), chart=True)
