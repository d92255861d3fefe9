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
      InputError: they were not all measured on one GPU.
    """
    cases = list(ElementTree.parse(folder / "tests.xml").getroot().iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {part.get('message', '').partition('\n')[0]}"
        for case in cases
        for part in case
        if part.tag in ("failure", "error")
    ]
    skipped = sum(part.tag == "skipped" for case in cases for part in case)
    kernel = json.loads((folder / "kernel.json").read_text())
    steps = {
        path.parent.name.removeprefix("steps_"): json.loads(path.read_text())
        for path in sorted(folder.glob("steps_*/steps.json"))
    }
    for report in (kernel, *steps.values()):
        # `eval steps` puts the number of devices before the name.
        device = report["device"].rpartition(" x ")[2]
        if (report["platform"], device) != ("gpu", kernel["device"]):
            raise InputError(
                f"{folder} holds measurements on {report['device']!r} ({report['platform']}) and a "
                f"kernel's on {kernel['device']!r}; run `make gpu` again, on one GPU."
            )
    tests = {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}
    return {"device": kernel["device"], "tests": tests, "kernel": kernel, "steps": steps}


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
    rows = [
        [row[size] for size in ("heads", "batch", "slots", "nodes")]
        + [_kernel_cell(row["candidates"][name]) for name in names]
        for row in kernel["rows"]
    ]
    yield from _table(["heads", "B", "S", "N", *names], rows)
    for name, report in collected["steps"].items():
        yield f"\n## A decode step of {name}: milliseconds, and in baseline steps\n"
        parts = list(report["rows"][0]["milliseconds"])
        rows = [
            [row[size] for size in SIZES]
            + [f"{row['milliseconds'][part][1]:.3f}" for part in parts]
            + [f"{row['in_baseline_steps']['step'][1]:.2f}"]
            for row in report["rows"]
        ]
        yield from _table([*SIZES.values(), *parts, "step / baseline"], rows)


def _kernel_cell(one: dict[str, Any]) -> str:
    if "not_run" in one:
        return "not run"
    return f"{one['microseconds'][1]:.1f}, {one['share_of_copy'][1]:.2f}"


def _table(names: list[str], rows: list[list[Any]]) -> Iterator[str]:
    for cells in (names, ["---"] * len(names), *rows):
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Write both files; exit code 1 where the GPU is not to be relied on."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_table", description=__doc__)
    parser.add_argument("measured", type=Path, help="folder that `make gpu` has filled")
    parser.add_argument("output", type=Path, help="folder for the two files")
    arguments = parser.parse_args()
    collected = collect(arguments.measured)
    lines = list(markdown(collected))
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
