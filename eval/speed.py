"""Speculative against plain decoding: how much faster, and is the text the same?"""

from collections.abc import Iterable, Sequence

from rich.console import Console

from redrafter_jax.parallel.processes import is_first
from redrafter_jax.settings.arguments import parse_settings

from .benchmark import Method, Pair, decode_batch, make_batches, measure, one_per_shape
from .config import EvalSettings
from .loading import load
from .plots import write_chart
from .progress import make_progress
from .report import build_report, write_report
from .table import describe_setting, render_report


def measure_speed(arguments: Sequence[str] | None = None, others: Iterable[str] = ()) -> None:
    """Load the pair, warm it up, time it against plain decoding, report.

    Args:
      arguments: of the command line; None takes the process's own.
      others: commands that measure something else, for the help to name.

    Raises:
      InputError: a setting, a file or a prompt cannot be used.
    """
    settings = parse_settings(
        EvalSettings,
        "Measure speculative against plain decoding. Other measurements are named first: "
        f"{', '.join(others)}.",
        arguments,
        processes=True,
    )
    draft = settings.draft
    target, drafter, prompts, token_rows = load(
        settings, [draft], settings.mesh.build(), settings.batch_size
    )
    batches = make_batches(
        token_rows,
        settings.batch_size,
        settings.first_seed,
        settings.max_new_tokens,
        settings.sampling,
        settings.eos_token_ids,
    )
    speculative, plain = Method(target, drafter, draft), Method(target, None, None)

    console = Console(quiet=not is_first())
    with make_progress(console) as progress:
        shapes = one_per_shape([speculative, plain], batches)
        warming = [run for run in shapes for _ in range(settings.warm_ups)]
        for method, batch in progress.track(warming, description="compile and warm up"):
            decode_batch(method, batch)
        measured = measure(speculative, plain, batches, settings.repeats)
        total = len(batches) * settings.repeats
        pairs: list[Pair] = list(progress.track(measured, total=total, description="measure"))

    if not is_first():
        return
    report = build_report(settings, speculative, prompts, token_rows, pairs)
    path = settings.report_dir / "report.json"
    write_report(report, path)
    write_chart(report, describe_setting(report), path.with_suffix(".png"))
    console.print(render_report(report))
    print(f"The report: {path}, the chart: {path.with_suffix('.png')}")
