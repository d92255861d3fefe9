"""`python -m eval parity`: check that speculative decoding gives the baseline's texts."""

import contextlib
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.table import Table

from redrafter_jax.command_line import make_folder
from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead, check_pair
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import find_drafter, load_drafter
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import EncodedPrompts

from . import metrics
from .benchmark import (
    Batch,
    Run,
    baseline,
    decode_batch,
    drafting,
    make_batches,
)
from .config import ParitySettings
from .metrics import answer_lines, count_accepted, describe_answers, first_divergence
from .questions import Questions, find_target, read_questions
from .report import make_table, number, show, write_report
from .ties import explain, score

DEFINITIONS = metrics.DEFINITIONS | {
    "position": "index of the first new token that differs, from 0",
    "gap": "score of the baseline's token minus score of the speculative text's token at the first "
    "divergence, computed by the target in one pass over the common text; a score is the logit "
    "over the temperature, filtered, plus the noise of the absolute position, and the largest "
    "score is chosen; null if a filter decides, or a text has ended",
    "filtered": "whether a filter (top-k, top-p, min-p) drops one of the two tokens, or may do so "
    "by rounding",
    "tie": "whether the target could choose either token if rounding moved each logit of that pass "
    "by at most the dtype's tolerance: the filters would keep the token, and drop every token that "
    "is ahead of it by more than the tolerance over the temperature",
    "largest_gap": "largest absolute gap in the case",
    "ties": "number of divergences that are ties",
}


class ComparedBatch(NamedTuple):
    """A batch that is decoded speculatively and by the baseline.

    Attributes:
      speculative: the speculative run.
      baseline: the run of the baseline.
      divergences: for each row, the first position at which the texts differ, with an explanation;
        None if the texts are equal.
    """

    speculative: Run
    baseline: Run
    divergences: list[dict[str, Any] | None]


def check_parity(settings: ParitySettings) -> None:
    """Decode every case with both methods in every dtype, and report where and why texts differ.

    The process exits with code 1 if a divergence is not a numerical tie.

    Raises:
      InputError: a file or a prompt cannot be used.
    """
    found = find_target(settings)
    drafter_config = find_drafter(settings.drafter, found.files).config
    questions: dict[str, Questions] = {}
    for name, case in settings.cases.items():
        with _case(name):
            check_pair(found.files.config, drafter_config, case.tree)
            questions[name] = read_questions(found, case, case.batch_size, case.prompt_tokens)
    if is_first():
        make_folder(settings.report_dir, "report_dir")
    measures: list[dict[str, Any]] = []
    for dtype in settings.dtypes:
        target = found.files.load(dtype, found.mesh)
        drafter = load_drafter(settings.drafter, dtype, found.mesh, target=target)
        tolerance = getattr(settings.tolerance, dtype)
        asked: dict[str, EncodedPrompts] = {}
        work: list[tuple[str, Batch]] = []
        for name, case in settings.cases.items():
            with _case(name):
                asked[name] = questions[name].encode_turns(target, case.sampling)
            batches = make_batches(asked[name], case.batch_size, case.sampling, case)
            work += [(name, batch) for batch in batches]
        compared: dict[str, list[ComparedBatch]] = {name: [] for name in settings.cases}
        for name, batch in track(work, len(work), f"decode in {dtype}"):
            tree = settings.cases[name].tree
            compared[name].append(compare_batch(target, drafter, tree, batch, tolerance))
        for name, case in settings.cases.items():
            measured = _measure(asked[name], case.tree, compared[name])
            measures.append({"case": name, "dtype": dtype, **measured})

    if is_first():
        path = settings.report_dir / "parity.json"
        verdict = _verdict(measures)
        shapes = {"target": asdict(found.files.config), "drafter": asdict(drafter_config)}
        measured = {"verdict": verdict, "cases": measures, **shapes}
        device = write_report(path, measured, settings, DEFINITIONS)["device"]
        heading = f"{settings.target} with {settings.drafter}\n{device}"
        lines = (
            f"{one['case']}: {line}"
            for one in measures[: len(settings.cases)]
            for line in answer_lines(one["answers"])
        )
        show(path, heading, *lines, *_tables(measures), verdict)
    if any(measure["ties"] < len(measure["divergences"]) for measure in measures):
        sys.exit(1)


@contextlib.contextmanager
def _case(name: str) -> Generator[None]:
    """Add the name of the case to errors."""
    try:
        yield
    except InputError as error:
        raise InputError(f"Case {name!r}: {error}") from None


def compare_batch(
    target: Target, drafter: LoadedHead | Drafter, tree: TreeConfig, batch: Batch, tolerance: float
) -> ComparedBatch:
    """Decode a batch speculatively and by the baseline; explain the first divergence of each row.

    Args:
      target: the target.
      drafter: the drafter.
      tree: shape of the draft trees.
      batch: the batch.
      tolerance: largest gap between two logits that counts as a numerical tie.
    """
    methods = baseline(target), drafting(target, drafter, tree)
    alone, speculative = (decode_batch(method, batch) for method in methods)
    texts = list(zip(alone.tokens, speculative.tokens, strict=True))
    places = [first_divergence(*pair) for pair in texts]
    divergences: list[dict[str, Any] | None] = [None] * len(texts)
    if any(place is not None for place in places):
        read = [
            [*prompt, *text[:place]] if place else list(prompt)
            for prompt, (text, _), place in zip(batch.prompts, texts, places, strict=True)
        ]
        seen = score(target, batch._replace(prompts=read, max_new_tokens=1))
        for row, place in enumerate(places):
            if place is not None:
                token, other = (_token_at(text, place) for text in texts[row])
                divergences[row] = {
                    "position": place,
                    "token": token,
                    "speculative_token": other,
                    **explain(seen[row], token, other, tolerance),
                }
    return ComparedBatch(speculative, alone, divergences)


def _token_at(text: Sequence[int], place: int) -> int | None:
    return text[place] if place < len(text) else None


def _measure(
    asked: EncodedPrompts, tree: TreeConfig, compared: Sequence[ComparedBatch]
) -> dict[str, Any]:
    """The measures of one case in one dtype, for `parity.json`."""
    rows = [divergence for one in compared for divergence in one.divergences]
    divergences: list[dict[str, Any]] = [
        {
            "row": row,
            "prompt": asked.prompts[row].name,
            "turn": asked.turns[row],
            **divergence,
        }
        for row, divergence in enumerate(rows)
        if divergence is not None
    ]
    gaps = [abs(row["gap"]) for row in divergences if row["gap"] is not None]
    texts = [row for one in compared for row in one.baseline.tokens]
    return {
        "num_nodes": tree.budget,
        "rows": len(rows),
        "identical": 1 - len(divergences) / len(rows),
        "answers": describe_answers(asked, texts),
        "ties": sum(row["tie"] for row in divergences),
        "largest_gap": max(gaps, default=None),
        **count_accepted([one.speculative for one in compared]),
        "divergences": divergences,
    }


def _verdict(measures: Sequence[dict[str, Any]]) -> str:
    rows = sum(measure["rows"] for measure in measures)
    divergences = [row for measure in measures for row in measure["divergences"]]
    if not divergences:
        return f"All {rows} texts are the target's own, token for token."
    identical = f"{rows - len(divergences)} of {rows} texts are identical"
    wrong = sum(not row["tie"] for row in divergences)
    count = len(divergences)
    judged = f"of {count} divergences {wrong} are NO" if wrong else f"all {count} divergences are"
    return f"{identical}; {judged} numerical ties."


def _tables(measures: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """A table per dtype, with a row per case."""
    columns = ["case", "tokens", "identical", "ties", "largest gap", "acceptance length"]

    def cells(one: dict[str, Any]) -> list[str]:
        different = len(one["divergences"])
        return [
            one["case"],
            str(one["new_tokens"]),
            f"{one['rows'] - different} of {one['rows']}",
            f"{one['ties']} of {different}" if different else "-",
            number(one["largest_gap"], ".2g"),
            number(one["acceptance_length"], ".2f"),
        ]

    for dtype in dict.fromkeys(one["dtype"] for one in measures):
        yield make_table(dtype, columns, [cells(one) for one in measures if one["dtype"] == dtype])
