"""`python -m tools.gpu_table runs/gpu docs/benchmarks`: what `make gpu` measured, in two files.

The JSON file holds every report as it is, the Markdown file beside it the medians. Reports that
were not measured on one GPU are refused.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.steps import SIZES
from pallas_kernels import bench, bench_matmul
from redrafter_jax.command_line import make_folder, run
from redrafter_jax.errors import InputError


def collect(folder: Path) -> dict[str, Any]:
    """The reports that `make gpu` left in a folder: of both kernels, and of `steps` by target."""
    kernel = json.loads((folder / "kernel.json").read_text())
    products = json.loads((folder / "grouped_matmul.json").read_text())
    steps = {
        path.parent.name.removeprefix("steps_"): json.loads(path.read_text())
        for path in sorted(folder.glob("steps_*/steps.json"))
    }
    for report in (kernel, products, *steps.values()):
        # `eval steps` puts the number of devices before the name.
        device = report["device"].rpartition(" x ")[2]
        if (report["platform"], device) != ("gpu", kernel["device"]):
            raise InputError(
                f"{folder} holds measurements on {report['device']!r} ({report['platform']}) and a "
                f"kernel's on {kernel['device']!r}; run `make gpu` again, on one GPU."
            )
    return {"kernel": kernel, "products": products, "steps": steps}


def markdown(
    kernel: dict[str, Any], products: dict[str, Any], steps: dict[str, Any]
) -> Iterator[str]:
    """The lines of the page."""
    versions = ", ".join(f"{name} {number}" for name, number in kernel["versions"].items())
    yield f"# {kernel['device']}, {kernel['timestamp'].partition('T')[0]}\n"
    yield f"Written by `make gpu`; {versions}. Medians; the JSON file beside this has the rest.\n"
    measures = "microseconds, share of a copy's rate, relative error"
    yield f"## Tree attention: {measures}\n"
    yield from _kernel_table(kernel, bench.COLUMNS)
    yield f"\n## Pairs of products with int4 weights: {measures}\n"
    yield from _kernel_table(products, bench_matmul.COLUMNS)
    for name, report in steps.items():
        yield f"\n## A decode step of {name}: milliseconds, and in baseline steps\n"
        parts = list(report["rows"][0]["milliseconds"])
        # Earlier reports have fewer fields of a tree.
        stated = {size: word for size, word in SIZES.items() if size in report["rows"][0]}
        yield from _row([*stated.values(), "sampling", *parts, "step / baseline"], header=True)
        for row in report["rows"]:
            times = [f"{row['milliseconds'][part][1]:.3f}" for part in parts]
            ratio = f"{row['in_baseline_steps']['step'][1]:.2f}"
            sizes = [row[size] for size in stated]
            yield from _row([*sizes, row["sampling"], *times, ratio])


def _kernel_table(report: dict[str, Any], shape: dict[str, str]) -> Iterator[str]:
    names = list(report["rows"][0]["candidates"])
    yield from _row([*shape.values(), *names], header=True)
    for row in report["rows"]:
        cells = [_kernel_cell(row["candidates"][name]) for name in names]
        yield from _row([*(row[size] for size in shape), *cells])


def _kernel_cell(one: dict[str, Any]) -> str:
    if "not_run" in one:
        return "not run"
    cell = f"{one['microseconds'][1]:.1f}, {one['share_of_copy'][1]:.2f}"
    if "difference" not in one:
        return cell
    error = "not finite" if one["difference"] is None else f"{one['difference']:.1e}"
    return f"{cell}, {error}"


def _row(cells: list[Any], *, header: bool = False) -> Iterator[str]:
    yield f"| {' | '.join(map(str, cells))} |"
    if header:
        yield "|---" * len(cells) + "|"


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_table", description=__doc__)
    parser.add_argument("measured", type=Path, help="folder that `make gpu` has filled")
    parser.add_argument("output", type=Path, help="folder for the two files")
    arguments = parser.parse_args()
    reports = collect(arguments.measured)
    make_folder(arguments.output, "folder")
    kernel = reports["kernel"]
    name = re.sub(r"[^a-z0-9]+", "-", kernel["device"].lower()).strip("-")
    path = arguments.output / f"{name}-{kernel['timestamp'].partition('T')[0]}.md"
    path.write_text("\n".join(markdown(**reports)) + "\n", encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(reports, indent=2, allow_nan=False) + "\n")
    print(f"{path} and {path.with_suffix('.json')}")


if __name__ == "__main__":
    run(main)
