"""What a fit comes to: what its report measured, the table beside the head, and the verdict."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from redrafter_jax.checkpoints.download import DRAFT_TABLE
from redrafter_jax.checkpoints.draft_table import find_draft_table, write_draft_table
from redrafter_jax.config import DraftConfig
from redrafter_jax.verdict import Texts, Verdict, Way, judge

from .plan import FitPlan

SAMPLINGS: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.7}]
# What a doubling of the data adds to the acceptance length of a small head: SmolLM2's had 1.22
# after 61 thousand positions and 1.82 after 11 million.
_PER_DOUBLING = 0.08
_DAY = 24 * 60


def finalists(folder: Path) -> dict[str, dict[str, Any]]:
    """By name, for each temperature the tree that the tuner measured as fastest of the head's.

    The baseline may be faster than it.
    """
    rows = json.loads((folder / "tune" / "tune.json").read_text())["rows"]
    names = [one.name for one in fields(DraftConfig)]
    trees: dict[str, dict[str, Any]] = {}
    for sampling in dict.fromkeys(row["sampling"] for row in rows):
        of_one = [row for row in rows if row["batch_size"] == 1 and row["finalist"]]
        own = [row for row in of_one if row["sampling"] == sampling]
        best = max(own, key=lambda row: row["measured"][1])
        draft = {name: best[name] for name in names}
        if draft not in trees.values():
            trees["head" if not trees else f"head, the tree for {sampling}"] = draft
    return trees


def verdict(folder: Path, plan: FitPlan) -> tuple[bool, str]:
    """Whether the head is recommended, and what was found in a sentence.

    A tree of the table that is slower than the baseline on the report's prompts gives way there.
    """
    report = json.loads((folder / "report" / "compare.json").read_text())
    drafter = folder / "run" / "drafter"
    drafts = {
        name: DraftConfig(**drafting["draft"])
        for name, drafting in report["config"]["drafters"].items()
    }
    verdicts: list[Verdict] = []
    measured: dict[float, dict[DraftConfig | None, float]] = {}
    for case in report["samplings"]:
        ways = [_way(name, draft, case["methods"][name]) for name, draft in drafts.items()]
        answers = case["answers"]
        texts = Texts(len(case["prompts"]), answers.get("repeating", 0), answers["short"])
        verdicts.append(judge(ways, texts))
        temperature = case["sampling"]["temperature"]
        measured[temperature] = {way.draft: way.median for way in ways}
    pays = obey_report(drafter, measured)
    first, *others = verdicts
    also = "".join(
        f"; at temperature {settings['temperature']:g} {other.way.median:.2f} times"
        for settings, other in zip(SAMPLINGS[1:], others, strict=True)
    )
    return pays, f"{first.sentence}{also}; {_next_step(pays, first, report, plan)}."


def obey_report(drafter: Path, measured: dict[float, dict[DraftConfig | None, float]]) -> bool:
    """Make the drafter's table say what the report measured: speed-ups of trees by temperature.

    A tree that is slower than the baseline gives way to it. A temperature for which the tuner had
    no time gets the tree that would be taken there, if that pays. Returns whether any tree is left.
    """
    table = find_draft_table(drafter)
    assert table is not None
    trees = [
        tree for tree in table.trees if tree.batch_size != 1 or tree.temperature not in measured
    ]
    for temperature, speedups in reversed(measured.items()):
        tree = table.nearest(1, temperature)
        if speedups.get(tree.draft, 0.0) < 1:
            tree = replace(tree, draft=None, predicted_speedup=1.0, measured_speedup=1.0)
        trees.insert(0, replace(tree, temperature=temperature))
    write_draft_table(drafter / DRAFT_TABLE, replace(table, trees=tuple(trees)))
    return any(tree.draft is not None for tree in trees)


def minutes_to_pay(minutes: float, length: float, speedup: float) -> float:
    """Minutes of a fit after which the head may pay, if data goes on to add what it usually adds.

    `length` is the acceptance length, with which this head has the `speedup`.
    """
    missing = 1.05 * length / speedup - length
    return minutes * 2 ** max(missing / _PER_DOUBLING, 1.0)


def _way(name: str, draft: DraftConfig, measures: dict[str, Any]) -> Way:
    ends = measures["speedup_quartiles"]
    speedup = None if ends is None else (ends[0], measures["speedup"], ends[1])
    return Way(name, draft, True, speedup, measures["accepted_by"])


def _next_step(pays: bool, found: Verdict, report: dict[str, Any], plan: FitPlan) -> str:
    if pays:
        return f"the table beside the head, {DRAFT_TABLE}, says where it is used"
    minutes = plan.asked.minutes
    if not found.way.median:
        return f"decode without the head, or fit again with --minutes {2 * minutes:g}"
    measures = report["samplings"][0]["methods"][found.way.name]
    needed = minutes_to_pay(minutes, measures["acceptance_length"], found.way.median)
    if needed > _DAY:
        return "decode without the head: on this device it would need more than a day"
    return (
        "decode without the head, or fit again: some "
        f"{10 * math.ceil(needed / 10)} minutes would be needed"
    )
