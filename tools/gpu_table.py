"""`python -m tools.gpu_table runs/gpu docs/benchmarks`: what `make gpu` measured, in two files.

The JSON file holds every report as it is, the Markdown file beside it the medians. Reports that
were not measured on one GPU are refused.
"""

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redrafter_jax.command_line import make_folder, run
from redrafter_jax.errors import InputError

# Relative error of the attention's outputs: some units in the last place of bfloat16, 2^-8 each.
DIFFERENCE_LIMIT = 2e-2
# Columns of a decode step, as they are called in the reports of `eval steps`.
SIZES = {
    "beam_width": "W",
    "draft_rounds": "R",
    "num_nodes": "N",
    "lookup_tokens": "C",
    "batch_size": "B",
    "slots": "S",
    "sampling": "sampling",
}


def collect(folder: Path) -> dict[str, Any]:
    """The reports that `make gpu` left in a folder: `tests`, `kernel` and `steps` by name.

    Raises:
      InputError: one is missing, is no such report, or was measured elsewhere than the others.
    """
    tests = read_tests(folder / "tests.xml")
    kernel = read_report(folder / "kernel.json")
    paths = sorted(folder.glob("steps_*/steps.json"))
    if not paths:
        raise InputError(f"{folder} holds no steps_*/steps.json; run `make gpu`.")
    steps = {path.parent.name.removeprefix("steps_"): read_report(path) for path in paths}
    for path, report in zip(paths, steps.values(), strict=True):
        # `eval steps` puts the number of devices before the name.
        if report["device"].partition(" x ")[2] != kernel["device"]:
            raise InputError(
                f"{path} was measured on {report['device']!r} and the kernel on "
                f"{kernel['device']!r}; run `make gpu` again."
            )
    return {"device": kernel["device"], "tests": tests, "kernel": kernel, "steps": steps}


def read_tests(path: Path) -> dict[str, Any]:
    """Counts from pytest's JUnit XML, and name and reason of each test that failed."""
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}; run `make gpu`.") from None
    except ElementTree.ParseError as error:
        raise InputError(f"{path} is not JUnit XML: {error}.") from None
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {part.get('message', '').partition('\n')[0]}"
        for case in cases
        for part in case
        if part.tag in ("failure", "error")
    ]
    skipped = sum(part.tag == "skipped" for case in cases for part in case)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def read_report(path: Path) -> dict[str, Any]:
    """A report with rows that were measured on a GPU."""
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}; run `make gpu`.") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
    if not (isinstance(report, dict) and report.get("rows") and "platform" in report):
        raise InputError(f"{path} is not a report of measurements; run `make gpu`.")
    if report["platform"] != "gpu":
        raise InputError(f"{path} was measured on {report['platform']!r}; run `make gpu` on a GPU.")
    return report


def problems(collected: dict[str, Any]) -> Iterator[str]:
    """A sentence for each reason not to rely on this GPU."""
    tests = collected["tests"]
    if tests["failed"] or not tests["passed"]:
        yield f"Tests on the GPU: {tests['passed']} passed, {len(tests['failed'])} failed."
        yield from tests["failed"]
    for row in collected["kernel"]["rows"]:
        for name, one in row["candidates"].items():
            difference = one.get("difference")
            if "not_run" in one or (difference is not None and difference <= DIFFERENCE_LIMIT):
                continue
            yield (
                f"{name} at {row['heads']}, B={row['batch']}, S={row['slots']}, N={row['nodes']}: "
                f"relative error {difference}, and the limit is {DIFFERENCE_LIMIT}."
            )


def markdown(collected: dict[str, Any]) -> Iterator[str]:
    """The lines of the page."""
    kernel, tests = collected["kernel"], collected["tests"]
    versions = ", ".join(f"{name} {number}" for name, number in kernel["versions"].items())
    yield f"# {collected['device']}, {kernel['timestamp'].partition('T')[0]}"
    yield f"\nWritten by `make gpu`; {versions}. Medians; the JSON file beside this has the rest."
    yield f"\nTests on the GPU: {tests['passed']} passed, {len(tests['failed'])} failed, "
    yield f"{tests['skipped']} skipped.\n"
    yield from (f"- {problem}" for problem in problems(collected))
    yield "\n## Tree attention: microseconds, and share of the rate of a copy\n"
    names = list(kernel["rows"][0]["candidates"])
    yield from _header("heads", "B", "S", "N", *names)
    for row in kernel["rows"]:
        cells = (_kernel_cell(row["candidates"][name]) for name in names)
        yield _line(row["heads"], row["batch"], row["slots"], row["nodes"], *cells)
    for name, report in collected["steps"].items():
        yield f"\n## A decode step of {name}: milliseconds, and in baseline steps\n"
        parts = list(report["rows"][0]["milliseconds"])
        yield from _header(*SIZES.values(), *parts, "step / baseline")
        for row in report["rows"]:
            times = (f"{row['milliseconds'][part][1]:.3f}" for part in parts)
            ratio = f"{row['in_baseline_steps']['step'][1]:.2f}"
            yield _line(*(row[size] for size in SIZES), *times, ratio)


def _kernel_cell(one: dict[str, Any]) -> str:
    if "not_run" in one:
        return "not run"
    return f"{one['microseconds'][1]:.1f}, {one['share_of_copy'][1]:.2f}"


def _header(*columns: str) -> Iterator[str]:
    yield _line(*columns)
    yield "|" + "---|" * len(columns)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Write both files; exit code 1 where the GPU is not to be relied on."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_table", description=__doc__)
    parser.add_argument("measured", type=Path, help="folder that `make gpu` has filled")
    parser.add_argument("output", type=Path, help="folder for the two files")
    arguments = parser.parse_args()
    collected = collect(arguments.measured)
    try:
        lines = list(markdown(collected))
    except KeyError as error:
        raise InputError(
            f"A report in {arguments.measured} has no {error}: another version wrote it; run "
            "`make gpu` again."
        ) from None
    make_folder(arguments.output, "folder")
    name = re.sub(r"[^a-z0-9]+", "-", collected["device"].lower()).strip("-")
    path = arguments.output / f"{name}-{collected['kernel']['timestamp'].partition('T')[0]}.md"
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(json.dumps(collected, indent=2, allow_nan=False) + "\n")
    print(f"{path} and {path.with_suffix('.json')}")
    if found := list(problems(collected)):
        print(*found, sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
