"""Ways of drafting side by side: the same prompts, samplings and machine, in turns."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import numpy as np

from redrafter_jax.command_line import make_folder
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.drafters.head_drafter import check_pair
from redrafter_jax.files.drafter_files import find_drafter, load_drafter
from redrafter_jax.files.parameters import MatchedModel
from redrafter_jax.models.cache import init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import MODEL
from redrafter_jax.parallel.mesh import data_shards
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.progress import progress
from redrafter_jax.text.prompts import EncodedPrompts

from . import paper, speed
from .abstract import bytes_of
from .benchmark import Method, make_batches, measure, warm_up
from .compare_tables import LEGEND, markdown, prompts_of, tables
from .config import CompareSettings
from .loading import bind, find_target, read_questions
from .measured import Measured, open_measured
from .metrics import answer_lines, judge_case, lookup_lines
from .plan import call_bytes, draft_bytes, embedding_bytes
from .report import describe_device, describe_sampling, describe_versions, show, write_report

DEFINITIONS = speed.DEFINITIONS | {
    "drafted_per_step": "nodes of a tree below its root, N - 1, padding nodes included",
    "bytes_per_step": "the least that a step reads from the memory of one device, computed from "
    "shapes: the weights of the draft and of the target call as `eval plan` counts them, and the "
    "cache of all rows, filled by a prompt and half of its answer on average",
    "identity": "all that the measurements depend on; prompts and files by their digests",
}


def compare(settings: CompareSettings) -> None:
    """Load a target and every drafter, time all of them on every sampling, report.

    Every turn is appended to a file beside the report as soon as it is measured. The same command
    goes on from there, and measures nothing again.

    Raises:
      InputError: a file or a prompt cannot be used, a drafter does not fit the target, or the file
        holds measurements of something else.
    """
    from .charts import write_comparison_chart  # matplotlib is slow to import

    found = find_target(settings)
    find_once = cache(find_drafter)
    models = {
        name: find_once(drafting.drafter)
        for name, drafting in settings.drafters.items()
        if drafting.drafter is not None
    }
    for name, model in models.items():
        check_pair(found.files.config, model.config, settings.drafters[name].tree)
    questions = read_questions(found, settings, settings.batch_size)
    if is_first():
        make_folder(settings.report_dir, "report_dir")
    path = settings.report_dir / "compare.json"
    identity = _identify(settings, found.files.digest(), questions.first, models)
    measured = open_measured(path.with_suffix(".jsonl"), identity)
    target = found.files.load(settings.dtype, found.mesh)
    rows = min(settings.batch_size, len(questions.first.rows)) // data_shards(found.mesh)
    methods, weights = _load_methods(settings, target, rows)
    asked = [
        questions.encode_turns(target, sampling, partial(measured.answer, index))
        for index, sampling in enumerate(settings.samplings)
    ]
    before = _time_missing(settings, methods, asked, measured)
    if not is_first():
        return
    per_token = rows * _cache_bytes(target, settings.dtype)
    summaries = []
    drafts = {
        name: (drafting.tree, drafting.drafter is not None)
        for name, drafting in settings.drafters.items()
    }
    for index, sampling in enumerate(settings.samplings):
        turns = [turn for turn in measured.turns[index] if turn.repeat < settings.repeats]
        summary = speed.summarize(asked[index], settings.batch_size, turns)
        _add_costs(summary, methods, weights, per_token)
        summary["verdict"] = judge_case(summary, drafts)
        paper.add_intervals(summary)
        described = describe_sampling(sampling)
        summaries.append({"sampling": asdict(sampling), "described": described, **summary})
    measures = {
        "samplings": summaries,
        "num_nodes": {name: method.drafter.num_nodes for name, method in methods.items()},
        "target": asdict(target.config),
        "training_seeds": paper.training_seeds(
            {name: drafting.drafter for name, drafting in settings.drafters.items()}
        ),
        "identity": identity,
    }
    report = write_report(path, measures, settings, DEFINITIONS | paper.DEFINITIONS)
    prompts = len(summaries[0]["prompts"])
    title = (
        f"{settings.target}; {settings.dtype}, batch {settings.batch_size}; {prompts} prompts, "
        f"up to {settings.max_new_tokens} new tokens; {report['device']}"
    )
    page, chart = path.with_suffix(".md"), path.with_suffix(".png")
    page.write_text(markdown(report, title) + "\n" + paper.markdown(report), encoding="utf-8")
    path.with_suffix(".csv").write_text(paper.as_csv(report), encoding="utf-8")
    path.with_suffix(".tex").write_text(paper.as_latex(report), encoding="utf-8")
    write_comparison_chart(report, title, chart)
    notes = [
        f"{case['described']}: {line}"
        for case in summaries
        for line in (*answer_lines(case["answers"]), *lookup_lines(case["verdict"]))
    ]
    if before:
        notes.append(f"Of earlier runs, from {measured.path}: {before}.")
    shown = [table for case in summaries for table in tables(case)]
    show(path, title, *notes, *shown, LEGEND, f"The page: {page}", f"The chart: {chart}")
    for case in summaries:
        print(f"{case['described']}: {case['verdict']['sentence']}")


def _identify(
    settings: CompareSettings,
    target: str,
    asked: EncodedPrompts,
    models: Mapping[str, MatchedModel],
) -> dict[str, Any]:
    """All that measurements depend on: digests of prompts and models, settings, the machine.

    `target` is the digest of its files.
    """
    omitted = {"target", "drafters", "prompts", "prompt_count", "report_dir", "repeats", "warm_ups"}
    questions = [[prompt.name, prompt.turns, prompt.category] for prompt in asked.prompts]
    encoded = json.dumps([questions, asked.rows, asked.stop_tokens])
    return {
        "prompts": hashlib.sha256(encoded.encode()).hexdigest(),
        "target": target,
        **{
            f"drafters.{name}": {
                "files": models[name].digest() if name in models else None,
                "tree": asdict(drafting.tree),
            }
            for name, drafting in settings.drafters.items()
        },
        **settings.model_dump(mode="json", exclude=omitted),
        "device": describe_device(),
        "versions": describe_versions(),
    }


def _load_methods(
    settings: CompareSettings, target: Target, rows: int
) -> tuple[dict[str, Method], dict[str, int]]:
    """By name, the methods, and the bytes of weights that a step of each reads on one device.

    `rows` is the number of a batch's rows on one device.

    Raises:
      InputError: trees are deeper than the target has positions.
    """
    row_bytes = embedding_bytes(target, rows)
    methods = {speed.BASELINE: Method(target, RootOnly())}
    weights = {speed.BASELINE: call_bytes(target, 1, row_bytes)}
    # Several ways of drafting may share a drafter.
    load_once = cache(partial(load_drafter, dtype=settings.dtype, mesh=target.mesh))
    for name, drafting in settings.drafters.items():
        model = None if drafting.drafter is None else load_once(drafting.drafter)
        drafter = bind(target.config, model, drafting.tree)
        methods[name] = Method(target, drafter)
        weights[name] = call_bytes(target, drafter.num_nodes, row_bytes)
        if model is not None:
            weights[name] += draft_bytes(target, model, drafting.tree, row_bytes)
    return methods, weights


def _time_missing(
    settings: CompareSettings,
    methods: Mapping[str, Method],
    asked: Sequence[EncodedPrompts],
    measured: Measured,
) -> str:
    """Time the turns that are not measured yet; says how many were, "" if none."""
    batches = [
        make_batches(one, settings.batch_size, sampling, settings)
        for one, sampling in zip(asked, settings.samplings, strict=True)
    ]
    due = {
        (index, batch, repeat)
        for index, own in enumerate(batches)
        for batch, repeat in product(range(len(own)), range(settings.repeats))
    }
    done = due & {
        (index, turn.batch, turn.repeat) for index, own in measured.turns.items() for turn in own
    }
    missing = sorted({(index, batch) for index, batch, _ in due - done})
    if left := [batches[index][batch] for index, batch in missing]:
        warm_up(methods, left, settings.warm_ups, "measure")
        with progress(len(due), "measure", len(done)) as advance:
            for index, own in enumerate(batches):
                skipped = {(batch, repeat) for of, batch, repeat in done if of == index}
                for turn in measure(methods, own, settings.repeats, skipped):
                    measured.keep_turn(index, turn)
                    advance(1)
    return f"{len(done)} of {len(due)} turns" if done else ""


def _cache_bytes(target: Target, dtype: str) -> int:
    """Bytes of one token of one row, on one device."""
    cache = jax.eval_shape(partial(init_cache, target.config, 1, 1, dtype))
    parts = 1 if target.mesh is None else target.mesh.shape[MODEL]
    return bytes_of((cache.keys, cache.values)) // parts


def _add_costs(
    summary: dict[str, Any],
    methods: Mapping[str, Method],
    weights: Mapping[str, int],
    per_token: int,
) -> None:
    """Add what a step of every method reads, over all prompts and in each category.

    `weights` are the bytes of each method's step, `per_token` those of the cache for one token of
    every row.
    """
    for category, part in {None: summary, **summary["categories"]}.items():
        tokens = [
            row["prompt_tokens"] + row["methods"][speed.BASELINE]["new_tokens"] / 2
            for row in prompts_of(summary, category)
        ]
        cached = round(float(np.mean(tokens)) * per_token)
        for name, method in methods.items():
            part["methods"][name]["drafted_per_step"] = method.drafter.num_nodes - 1
            part["methods"][name]["bytes_per_step"] = weights[name] + cached
