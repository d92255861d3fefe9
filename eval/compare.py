"""Ways of drafting side by side: the same prompts, samplings and machine, in turns."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np

from redrafter_jax.checkpoints.found import Found, find_drafter, find_target
from redrafter_jax.checkpoints.huggingface import digest_files, load_drafter, load_target
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.drafters.head_drafter import DraftModel, check_pair
from redrafter_jax.models.cache import init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import MODEL
from redrafter_jax.parallel.mesh import data_shards
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.progress import progress
from redrafter_jax.text.prompts import Asked

from . import speed
from .abstract import bytes_of
from .benchmark import Batch, Method, answer_plainly, make_batches, measure, warm_up
from .compare_tables import LEGEND, markdown, prompts_of, tables
from .config import CompareSettings
from .loading import FoundTarget, ask_all_turns, ask_target, bind, find
from .measured import Measured, open_measured
from .metrics import tell_answers
from .plan import call_bytes, draft_bytes, embedding_bytes
from .report import describe_device, describe_sampling, describe_versions, show, write_report

DEFINITIONS = speed.DEFINITIONS | {
    "drafted_per_step": "nodes of a tree below its root, N - 1, padding nodes included",
    "bytes_per_step": "the least that a step reads from the memory of one device, computed from "
    "shapes: the weights of the draft and of the target call as `eval plan` counts them, and the "
    "cache of all rows, filled by a prompt and half of its answer on average",
    "identity": "all that the measurements depend on; prompts and files by their digests",
}


class Case(NamedTuple):
    """What the target is asked under one sampling, in batches."""

    asked: Asked
    batches: list[Batch]


class Cost(NamedTuple):
    """Tokens that a step drafts, and bytes of the weights that it reads on one device."""

    drafted: int
    weights: int


def compare(settings: CompareSettings) -> None:
    """Load a target and every drafter, time all of them on every sampling, report.

    Every turn is kept in a file beside the report as soon as it is measured. The same command goes
    on from there, and measures nothing that is there already.

    Raises:
      InputError: a file or a prompt cannot be used, a drafter does not fit the target, or the file
        holds measurements of something else.
    """
    from .charts import write_comparison_chart  # matplotlib is slow to import

    found = find(settings)
    find_once = cache(find_drafter)
    models = {
        name: find_once(drafting.drafter)
        for name, drafting in settings.drafters.items()
        if drafting.drafter is not None
    }
    for name, model in models.items():
        check_pair(found.target, model.config, settings.drafters[name].draft)
    first = ask_target(found, settings, settings.batch_size)
    if is_first():
        make_folder(settings.report_dir, "report_dir")
    path = settings.report_dir / "compare.json"
    identity = _identify(settings, first, models)
    measured = open_measured(path.with_suffix(".jsonl"), identity)
    target = load_target(settings.target, settings.dtype, found.mesh)
    rows = min(settings.batch_size, len(first.rows)) // data_shards(found.mesh)
    methods = {speed.BASELINE: Method(target, RootOnly())}
    row_bytes = embedding_bytes(target, rows)
    costs = {speed.BASELINE: Cost(0, call_bytes(target, 1, row_bytes))}
    # Several ways of drafting may share a drafter.
    load_once = cache(partial(load_drafter, dtype=settings.dtype, mesh=target.mesh))
    for name, drafting in settings.drafters.items():
        model = None if drafting.drafter is None else load_once(drafting.drafter)
        methods[name], costs[name] = _method(target, model, drafting.draft, row_bytes)

    cases = [
        _ask(settings, found, target, first, measured, at)
        for at, _ in enumerate(settings.samplings)
    ]
    before = _time_the_rest(settings, methods, cases, measured)
    if not is_first():
        return
    per_token = rows * _cache_bytes(target, settings.dtype)
    summaries = []
    for at, (sampling, case) in enumerate(zip(settings.samplings, cases, strict=True)):
        turns = [turn for turn in measured.turns[at] if turn.repeat < settings.repeats]
        summary = speed.summarize(case.asked, settings.batch_size, turns)
        _add_costs(summary, costs, per_token)
        described = describe_sampling(sampling)
        summaries.append({"sampling": asdict(sampling), "described": described, **summary})
    measures = {
        "samplings": summaries,
        "num_nodes": {name: method.drafter.num_nodes for name, method in methods.items()},
        "target": asdict(target.config),
        "identity": identity,
    }
    report = write_report(path, measures, settings, DEFINITIONS)
    prompts = len(summaries[0]["prompts"])
    title = (
        f"{settings.target}; {settings.dtype}, batch {settings.batch_size}; {prompts} prompts, "
        f"up to {settings.max_new_tokens} new tokens; {report['device']}"
    )
    page, chart = path.with_suffix(".md"), path.with_suffix(".png")
    page.write_text(markdown(report, title), encoding="utf-8")
    write_comparison_chart(report, title, chart)
    told = [
        f"{case['described']}: {line}"
        for case in summaries
        for line in tell_answers(case["answers"])
    ]
    if before:
        told.append(f"Of earlier runs, from {measured.path}: {before}.")
    shown = [table for case in summaries for table in tables(case)]
    show(path, title, *told, *shown, LEGEND, f"The page: {page}", f"The chart: {chart}")


def _identify(
    settings: CompareSettings, asked: Asked, models: Mapping[str, Found]
) -> dict[str, Any]:
    """All that measurements depend on: digests of prompts and models, settings, the machine."""
    given = {"target", "drafters", "prompts", "prompt_count", "report_dir", "repeats", "warm_ups"}
    questions = [[prompt.name, prompt.turns, prompt.category] for prompt in asked.prompts]
    decisive = json.dumps([questions, asked.rows, asked.stop_tokens])
    return {
        "prompts": hashlib.sha256(decisive.encode()).hexdigest(),
        "target": digest_files(find_target(settings.target)),
        **{
            f"drafters.{name}": {
                "files": digest_files(models[name]) if name in models else None,
                "draft": asdict(drafting.draft),
            }
            for name, drafting in settings.drafters.items()
        },
        **settings.model_dump(mode="json", exclude=given),
        "device": describe_device(),
        "versions": describe_versions(),
    }


def _method(
    target: Target, model: DraftModel | None, draft: DraftConfig, row_bytes: int
) -> tuple[Method, Cost]:
    """A way of drafting, and what a step of it takes.

    Raises:
      InputError: trees are deeper than the target has positions.
    """
    weights = 0 if model is None else draft_bytes(target, model, draft, row_bytes)
    drafter = bind(target.config, model, draft)
    nodes = drafter.num_nodes
    return Method(target, drafter), Cost(nodes - 1, weights + call_bytes(target, nodes, row_bytes))


def _ask(
    settings: CompareSettings,
    found: FoundTarget,
    target: Target,
    first: Asked,
    measured: Measured,
    at: int,
) -> Case:
    """What the target is asked under sampling `at`; answers that an earlier run kept are taken.

    Raises:
      InputError: a later turn does not fit.
    """
    sampling = settings.samplings[at]
    decode = answer_plainly(target, settings.batch_size, sampling, settings)

    def answer(asked: Asked) -> list[list[int]]:
        turn = asked.turns[0]
        if (at, turn) not in measured.answers:
            measured.keep_answers(at, turn, decode(asked))
        return measured.answers[at, turn]

    asked = ask_all_turns(found, settings, first, answer)
    return Case(asked, make_batches(asked, settings.batch_size, sampling, settings))


def _time_the_rest(
    settings: CompareSettings,
    methods: Mapping[str, Method],
    cases: Sequence[Case],
    measured: Measured,
) -> str:
    """Time the turns that are not measured yet; how many were, in words, "" if none."""
    due = [set(product(range(len(case.batches)), range(settings.repeats))) for case in cases]
    done = [
        {(turn.batch, turn.repeat) for turn in measured.turns.get(at, [])} & turns
        for at, turns in enumerate(due)
    ]
    left = [
        case.batches[batch]
        for case, turns, over in zip(cases, due, done, strict=True)
        for batch in sorted({batch for batch, _ in turns - over})
    ]
    total, over = sum(map(len, due)), sum(map(len, done))
    if left:
        warm_up(methods, left, settings.warm_ups, "measure")
        with progress(total, "measure", over) as advance:
            for at, case in enumerate(cases):
                for turn in measure(methods, case.batches, settings.repeats, done[at]):
                    measured.keep_turn(at, turn)
                    advance(1)
    return f"{over} of {total} turns" if over else ""


def _cache_bytes(target: Target, dtype: str) -> int:
    """Of one token of one row, on one device."""
    cache = jax.eval_shape(partial(init_cache, target.config, 1, 1, dtype))
    parts = 1 if target.mesh is None else target.mesh.shape[MODEL]
    return bytes_of((cache.keys, cache.values)) // parts


def _add_costs(summary: dict[str, Any], costs: Mapping[str, Cost], per_token: int) -> None:
    """What a step of every method takes, over all prompts and in each category.

    Args:
      summary: of `eval.speed.summarize`.
      costs: of every method.
      per_token: bytes of the cache for one token of every row.
    """
    for category, part in {None: summary, **summary["categories"]}.items():
        tokens = [
            row["prompt_tokens"] + row["methods"][speed.BASELINE]["new_tokens"] / 2
            for row in prompts_of(summary, category)
        ]
        cached = round(float(np.mean(tokens)) * per_token)
        for name, (drafted, weights) in costs.items():
            part["methods"][name]["drafted_per_step"] = drafted
            part["methods"][name]["bytes_per_step"] = weights + cached
