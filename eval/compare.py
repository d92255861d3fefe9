"""Ways of drafting side by side: the same prompts, samplings and machine, in turns."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from redrafter_jax.checkpoints.found import find_drafter
from redrafter_jax.checkpoints.huggingface import load_drafter, load_target
from redrafter_jax.command_line import make_folder
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import check_pair
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.processes import is_first

from . import speed
from .benchmark import Method, answer_plainly
from .charts import write_comparison_chart
from .config import CompareSettings, DraftingSettings
from .loading import ask_all_turns, ask_target, find
from .metrics import tell_answers
from .report import describe_sampling, make_table, number, show, write_report

_COLUMNS = ("speedup", "quartiles", "acceptance", "lookup", "calls", "identical")
_LEGEND = (
    "speedup: median of the pairs with the baseline. acceptance: tokens per target call; lookup: "
    "those of them that prompt lookup proposed. calls: of the target. identical: texts that are "
    "the baseline's."
)


def compare(settings: CompareSettings) -> None:
    """Load a target and every drafter, time all of them on every sampling, report.

    Raises:
      InputError: a file or a prompt cannot be used, or a drafter does not fit the target.
    """
    found = find(settings)
    for drafting in settings.drafters.values():
        if drafting.drafter is not None:
            check_pair(found.target, find_drafter(drafting.drafter).config, drafting.draft)
    first = ask_target(found, settings, settings.batch_size)
    if is_first():
        make_folder(settings.report_dir, "report_dir")
    target = load_target(settings.target, settings.dtype, found.mesh)
    methods = {speed.BASELINE: Method(target, RootOnly())}
    for name, drafting in settings.drafters.items():
        methods[name] = _method(target, drafting, settings)
    cases = []
    for sampling in settings.samplings:
        words = describe_sampling(sampling)
        answer = answer_plainly(target, settings.batch_size, sampling, settings)
        asked = ask_all_turns(found, settings, first, answer)
        measures = speed.time_methods(
            methods, asked, sampling, settings.batch_size, settings, words
        )
        cases.append({"sampling": asdict(sampling), "described": words, **measures})
    if not is_first():
        return
    measures = {
        "samplings": cases,
        "num_nodes": {name: method.drafter.num_nodes for name, method in methods.items()},
        "target": asdict(target.config),
    }
    path, prompts = settings.report_dir / "compare.json", len(cases[0]["prompts"])
    report = write_report(path, measures, settings, speed.DEFINITIONS)
    title = (
        f"{settings.target}; {settings.dtype}, batch {settings.batch_size}; {prompts} prompts, "
        f"up to {settings.max_new_tokens} new tokens; {report['device']}"
    )
    page, chart = path.with_suffix(".md"), path.with_suffix(".png")
    page.write_text(markdown(report, title))
    write_comparison_chart(report, title, chart)
    tables = (make_table(case["described"], ["", *_COLUMNS], _rows(case)) for case in cases)
    told = (
        f"{case['described']}: {line}" for case in cases for line in tell_answers(case["answers"])
    )
    show(path, title, *told, *tables, _LEGEND, f"The table: {page}", f"The chart: {chart}")


def markdown(report: Mapping[str, Any], title: str) -> str:
    """The tables of all samplings, to be read on a page."""
    lines = [title, ""]
    for case in report["samplings"]:
        lines += [f"| {case['described']} | {' | '.join(_COLUMNS)} |"]
        lines += ["|---" * (len(_COLUMNS) + 1) + "|"]
        lines += [f"| {' | '.join(cells)} |" for cells in _rows(case)] + [""]
    return "\n".join([*lines, _LEGEND, ""])


def _method(target: Target, drafting: DraftingSettings, settings: CompareSettings) -> Method:
    """A way of drafting, with its drafter loaded.

    Raises:
      InputError: a file cannot be read, or trees are deeper than the target has positions.
    """
    if drafting.drafter is None:
        drafter = bind_drafter(PromptLookup(drafting.draft.lookup_tokens))
    else:
        model = load_drafter(drafting.drafter, settings.dtype, target.mesh)
        drafter = bind_drafter(model, drafting.draft)
    drafter.check(target.config)
    return Method(target, drafter)


def _rows(case: Mapping[str, Any]) -> Iterator[list[str]]:
    """A sampling's table, a method a row."""
    for name, measures in case["methods"].items():
        calls = max(measures["target_calls"], 1)
        ends = measures["speedup_quartiles"]
        looked_up = measures["accepted_by"].get("lookup")
        same = [row["methods"][name]["identical"] == 1 for row in case["prompts"]]
        yield [
            name,
            number(measures["speedup"], ".2f"),
            "-" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}",
            number(measures["acceptance_length"], ".2f"),
            number(None if looked_up is None else looked_up / calls, ".2f"),
            str(measures["target_calls"]),
            f"{sum(same)} of {len(same)}",
        ]
