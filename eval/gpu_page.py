"""`python -m eval gpu`: one page for docs/benchmarks out of what `make gpu` measured on a GPU.

Nothing is measured here. Every number is copied from a file that says on which device it was made,
and what was measured on no GPU, or on different ones, makes no page.
"""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redrafter_jax.command_line import make_folder
from redrafter_jax.errors import InputError
from redrafter_jax.settings.arguments import parse_settings

from .config import GpuSettings
from .table import STEP_SIZES

# A few units in the last place of bfloat16, whose step is 2^-8.
_DIFFERENCE = 2e-2


class Tests(NamedTuple):
    """What pytest's XML says: numbers of tests, and of each that failed its name and reason."""

    passed: int
    skipped: int
    failed: list[str]


def write_gpu_page(arguments: Sequence[str] | None = None) -> None:
    """Write `<device>-<date>.md` and `.json`; exit with code 1 if one may not rely on the GPU.

    That is where a test failed or none ran, or an attention's outputs are not the reference's.

    Args:
      arguments: of the command line; None takes the process's own.

    Raises:
      InputError: a file is missing, is no such file, or was not measured on this one GPU.
    """
    settings = parse_settings(
        GpuSettings,
        "One page about a GPU out of what `make gpu` measured.",
        arguments,
        command="gpu",
    )
    tests = read_tests(settings.tests)
    kernel = _read_report(settings.kernel, "settings", "candidates")
    steps = {
        name: _read_report(path, "config", *STEP_SIZES, "milliseconds", "in_plain_steps")
        for name, path in settings.steps.items()
    }
    # The name as the driver reports it; a report of steps counts the devices before it.
    device = kernel["device"]
    for path, report in zip(settings.steps.values(), steps.values(), strict=True):
        if report["device"].partition(" x ")[2] != device:
            raise InputError(
                f"{settings.kernel} is of {device!r} and {path} of {report['device']!r}; run "
                "`make gpu` again, so that one page is about one GPU."
            )
    make_folder(settings.folder, "folder")
    day = kernel["timestamp"].partition("T")[0]
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = settings.folder / f"{name}-{day}.md"
    path.write_text("\n".join(page(device, day, tests, kernel, steps)) + "\n")
    whole = {"device": device, "tests": tests._asdict(), "kernel": kernel, "steps": steps}
    text = json.dumps(whole, indent=2, allow_nan=False)
    path.with_suffix(".json").write_text(text + "\n")
    print(f"The page: {path}, its numbers: {path.with_suffix('.json')}")
    wrong = list(_wrong(kernel["rows"]))
    if tests.failed or not tests.passed:
        wrong.insert(0, f"tests on the GPU: {describe_tests(tests)}")
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        sys.exit(1)


def read_tests(path: Path) -> Tests:
    """What pytest wrote with `--junitxml`.

    Raises:
      InputError: there is no such file, or it is none of pytest's.
    """
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}; run `make gpu`.") from None
    except ElementTree.ParseError as error:
        raise InputError(f"{path} is no XML of pytest's: {error}.") from None
    failed, skipped = [], 0
    for case in cases:
        wrong = next((part for part in case if part.tag in ("failure", "error")), None)
        if wrong is not None:
            reason = (wrong.get("message") or "no message").partition("\n")[0]
            failed.append(f"{case.get('classname')}::{case.get('name')}: {reason}")
        else:
            skipped += any(part.tag == "skipped" for part in case)
    return Tests(len(cases) - len(failed) - skipped, skipped, failed)


def describe_tests(tests: Tests) -> str:
    """In a few words."""
    return f"{tests.passed} passed, {len(tests.failed)} failed, {tests.skipped} skipped"


def page(
    device: str, day: str, tests: Tests, kernel: dict[str, Any], steps: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """The lines of the page."""
    versions = kernel["versions"] | next(iter(steps.values()))["versions"]
    listed = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    yield f"# {device}, {day}"
    yield ""
    yield f"Written by `make gpu`; {listed}."
    yield "Medians, with quartiles in brackets; the JSON beside this page has every number and its"
    yield "definition."
    yield ""
    yield "## Tests"
    yield ""
    yield f"`python -m pytest -m gpu`: {describe_tests(tests)}."
    yield ""
    yield from (f"- {one}" for one in tests.failed)
    yield from [""] * bool(tests.failed)
    yield "## Tree attention"
    yield ""
    settings = kernel["settings"]
    yield f"`python -m pallas_kernels.bench`, {settings['dtype']}, {settings['repeats']} repeats:"
    yield "time of a call, and its rate of reading the cache once, as a share of the rate of a copy"
    yield "that was measured beside it; last, how far its outputs are from the reference's, as a"
    yield "share of their norm."
    yield ""
    yield from _kernel_table(kernel["rows"])
    yield ""
    wrong = [f"- {sentence}" for sentence in _wrong(kernel["rows"])]
    yield from wrong
    yield from [""] * bool(wrong)
    yield from _reasons(kernel["rows"])
    for name, report in steps.items():
        config = report["config"]
        yield f"## A decode step of {name}"
        yield ""
        yield f"`python -m eval steps`, random weights, {config['dtype']}, {config['steps']} steps"
        yield f"per run, {config['repeats']} repeats, milliseconds. Each part is a program of its"
        yield "own: their sum may exceed the whole step."
        yield ""
        yield from _steps_table(report["rows"])
        yield ""


def _kernel_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = list(rows[0]["candidates"])
    yield from _header("heads", "B", "S", "N", "copy, GB/s", *names)
    for row in rows:
        cells = []
        for one in row["candidates"].values():
            if "not_run" in one:
                cells.append("not run")
                continue
            low, middle, high = one["share_of_copy"]
            share = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
            cells.append(f"{one['microseconds'][1]:.1f} µs, {share}, {_difference(one)}")
        copy = f"{row['copy_gigabytes_per_second'][1]:.0f}"
        yield _line(row["heads"], row["batch"], row["slots"], row["nodes"], copy, *cells)


def _difference(one: dict[str, Any]) -> str:
    if "difference" not in one:
        return "not compared"
    return "not finite" if one["difference"] is None else f"{one['difference']:.1e}"


def _wrong(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A sentence about each attention that ran and is not known to be right."""
    for row in rows:
        for name, one in row["candidates"].items():
            difference = one.get("difference")
            if "not_run" in one or (difference is not None and difference <= _DIFFERENCE):
                continue
            yield (
                f"{name} at {row['heads']}, B={row['batch']}, S={row['slots']}, N={row['nodes']}: "
                f"its difference from the reference is {_difference(one)}, and {_DIFFERENCE} is "
                "the limit; do not rely on it."
            )


def _reasons(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    found = {
        f"- {name} was not run: {one['not_run']}"
        for row in rows
        for name, one in row["candidates"].items()
        if "not_run" in one
    }
    yield from sorted(found)
    yield from [""] * bool(found)


def _steps_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from _header(*STEP_SIZES.values(), *rows[0]["milliseconds"], "step / plain")
    for row in rows:
        times = [f"{middle:.3f}" for _, middle, _ in row["milliseconds"].values()]
        low, middle, high = row["in_plain_steps"]["step"]
        ratio = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        yield _line(*(row[size] for size in STEP_SIZES), *times, ratio)


def _header(*columns: str) -> Iterator[str]:
    yield _line(*columns)
    yield "|" + "---|" * len(columns)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _read_report(path: Path, section: str, *measures: str) -> dict[str, Any]:
    """A bench's report that has its `section`, and these `measures` in every row."""
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}; run `make gpu`.") from None
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}.") from None
    if not isinstance(report, dict):
        raise InputError(f"{path} is no report of a bench: it holds {report!r:.40}.")
    missing = {"platform", "device", "rows", "timestamp", "versions", section} - set(report)
    if missing or not report["rows"]:
        raise InputError(
            f"{path} is no report of a bench: it has no {min(missing, default='rows')}."
        )
    for name in measures:
        if not all(isinstance(row, dict) and name in row for row in report["rows"]):
            raise InputError(
                f"{path} is no report of this bench, or an older one: its rows have no {name!r}; "
                "run `make gpu`."
            )
    if report["platform"] != "gpu":
        raise InputError(
            f"{path} was measured on {report['platform']!r}, and this page is about a GPU; run "
            "`make gpu` on a machine that has one."
        )
    return report
