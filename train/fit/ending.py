"""The end of a fit: the trees to measure, the head's table of trees, and the verdict.

The table is the file `draft.yaml` beside the head: the fastest tree, or the baseline, for each
batch size and temperature.
"""

import json
import math
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from redrafter_jax.config import TreeConfig
from redrafter_jax.config.limits import read_config
from redrafter_jax.files.locate import TREE_TABLE
from redrafter_jax.files.tree_table import find_tree_table, write_tree_table
from redrafter_jax.verdict import MeasuredWay, Texts, Verdict, judge

from .plan import FitPlan

SAMPLINGS: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.7}]
# Gain in acceptance length of a small head per doubling of the data: the head for SmolLM2 had 1.22
# after 61 thousand positions and 1.82 after 11 million.
_PER_DOUBLING = 0.08
_DAY = 24 * 60


def finalists(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the trees to measure for the report: names of methods, with the fields of their trees.

    These are the trees that the tuner chose for one prompt at a time, one per temperature. Where
    the tuner chose the baseline, the fastest tree that it measured is taken instead.
    """
    rows = json.loads((folder / "tune" / "tune.json").read_text())["rows"]
    names = [one.name for one in fields(TreeConfig)]
    trees: dict[str, dict[str, Any]] = {}
    for sampling in dict.fromkeys(row["sampling"] for row in rows):
        of_one = [row for row in rows if row["batch_size"] == 1 and row["finalist"]]
        own = [row for row in of_one if row["sampling"] == sampling]
        best = max(own, key=lambda row: (row["chosen"], row["measured"][1]))
        tree = {name: best[name] for name in names}
        if tree not in trees.values():
            trees["head" if not trees else f"head, the tree for {sampling}"] = tree
    return trees


def obey_report(folder: Path) -> None:
    """Update the head's table at batch size 1 with the speed-ups of the report.

    If the report measured a tree as slower than the baseline, the baseline replaces this tree.
    Trees that are not in the report stay. A temperature that the tuner did not reach gets an entry
    with the tree of the nearest temperature, or with the baseline if that tree is slower.
    """
    drafter = _drafter(folder)
    table = find_tree_table(drafter)
    assert table is not None
    trees = list(table.trees)
    report = _report(folder)
    for case in reversed(report["samplings"]):
        temperature = case["sampling"]["temperature"]
        speedups = {way.tree: way.median for way in _ways(case)}
        tree = table.nearest(1, temperature)
        if tree.tree not in speedups:
            continue
        speedup = speedups[tree.tree]
        if speedup < 1:
            tree = replace(tree, tree=None, predicted_speedup=1.0, measured_speedup=1.0)
        else:
            tree = replace(tree, measured_speedup=round(speedup, 3))
        tree = replace(tree, temperature=temperature)
        others = [one for one in trees if (one.batch_size, one.temperature) != (1, temperature)]
        trees = [tree, *others]
    write_tree_table(drafter / TREE_TABLE, replace(table, trees=tuple(trees)))


def verdict(folder: Path, plan: FitPlan) -> tuple[list[float], str]:
    """Return the temperatures at which the head is used, and a sentence about the result.

    The head is used for one prompt at a time at the temperatures at which the table has a tree and
    the report has enough data.
    """
    report = _report(folder)
    table = find_tree_table(_drafter(folder))
    assert table is not None
    verdicts: list[Verdict] = []
    for case in report["samplings"]:
        answers = case["answers"]
        texts = Texts(len(case["prompts"]), answers["repeating"], answers["short"])
        verdicts.append(judge(_ways(case), texts))
    temperatures = [case["sampling"]["temperature"] for case in report["samplings"]]
    pays = [
        temperature
        for temperature, found in zip(temperatures, verdicts, strict=True)
        if found.kind != "too little data" and table.nearest(1, temperature).tree is not None
    ]
    first, *others = verdicts
    also = "".join(
        f"; at temperature {temperature:g}, "
        + (
            other.kind
            if other.kind == "too little data"
            else f"{other.way.median:.2f} times as fast"
        )
        for temperature, other in zip(temperatures[1:], others, strict=True)
    )
    larger = sorted({one.batch_size for one in table.trees if one.batch_size > 1 and one.tree})
    if pays:
        then = (
            f"the table beside the head, {TREE_TABLE}, says at which temperatures and batch sizes "
            "the head is used"
        )
    elif first.kind == "too little data":
        template = plan.asked.chat_template
        asked = f" with chat_template={shlex.quote(template)}" if template else ""
        then = (
            f"decode without the head until `eval compare`{asked} has measured it on prompts of "
            "your own"
        )
    elif larger:
        then = (
            "decode one prompt at a time without the head; for several at once the tuner found "
            f"the head faster (batch size {', '.join(map(str, larger))}): serve with "
            f"{shlex.join(['--drafter', str(_drafter(folder)), *plan.asked.template_option])}"
        )
    else:
        measures = report["samplings"][0]["methods"][first.way.name]
        then = _without_head(first, measures["acceptance_length"], plan.asked.minutes)
    return pays, f"{first.sentence}{also}; {then}."


def minutes_to_pay(minutes: float, length: float, speedup: float) -> float:
    """Estimate how many minutes a fit needs to give a head that is faster than the baseline.

    The estimate assumes a constant gain in acceptance length for each doubling of the data.

    Args:
      minutes: minutes of the finished fit.
      length: acceptance length of its head, in tokens per target call.
      speedup: speed-up of its head over the baseline, below 1.
    """
    missing = 1.05 * length / speedup - length
    return minutes * 2 ** max(missing / _PER_DOUBLING, 1.0)


def _drafter(folder: Path) -> Path:
    return folder / "run" / "drafter"


def _report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report" / "compare.json").read_text())


def _ways(case: dict[str, Any]) -> list[MeasuredWay]:
    """The measurements of each tree of the report at one temperature."""
    ways = []
    for name, way in case["ways"].items():
        if way["tree"] is None:
            continue
        measures = case["methods"][name]
        ends = measures["speedup_quartiles"]
        speedup = None if ends is None else (ends[0], measures["speedup"], ends[1])
        tree = read_config(TreeConfig, way["tree"], Path("compare.json"))
        counts = measures["accepted_by"], measures["timed_turns"], measures["timed_turns_faster"]
        ways.append(MeasuredWay(name, tree, True, speedup, *counts))
    return ways


def _without_head(found: Verdict, length: float, minutes: float) -> str:
    """Advice for a head that is slower than the baseline."""
    if not found.way.median:
        return f"decode without the head, or fit again with --minutes {2 * minutes:g}"
    needed = minutes_to_pay(minutes, length, found.way.median)
    if needed > _DAY:
        return "decode without the head: on this device a useful head would need more than a day"
    return (
        "decode without the head, or fit again: a useful head would need about "
        f"{10 * math.ceil(needed / 10)} minutes"
    )
