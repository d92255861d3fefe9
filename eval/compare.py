"""`python -m eval compare`: compare drafting methods with the baseline on the same prompts."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from redrafter_jax.command_line import make_folder
from redrafter_jax.config import SamplingConfig
from redrafter_jax.drafters.base import check_pair
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import FoundSelf, find_drafter, load_drafter
from redrafter_jax.files.parameters import MatchedModel
from redrafter_jax.files.tree_table import load_tree
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.cache import init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import MODEL
from redrafter_jax.parallel.mesh import data_shards
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.progress import progress
from redrafter_jax.text.prompts import EncodedPrompts, rows_decoded

from . import summary, tables
from .abstract import bytes_of
from .benchmark import Method, drafting, make_batches, measure, warm_up
from .config import CompareSettings
from .measured import Measured, open_measured
from .metrics import answer_lines
from .plan import call_bytes, draft_bytes, embedding_bytes
from .questions import find_target, read_questions
from .report import (
    describe_device,
    describe_sampling,
    describe_versions,
    show,
    write_report,
)
from .summary import BASELINE, Way
from .trees import TREE

DEFINITIONS = summary.DEFINITIONS | {
    "ways": "drafter and tree of every method; null as the tree means the baseline, which the "
    "drafter's table of trees may also choose",
    "drafted_per_step": "nodes of a tree below its root, N - 1, padding nodes included",
    "bytes_per_step": "minimum bytes that a step reads from the memory of one device, computed "
    "from shapes: the weights of drafting and of the target call as `eval plan` counts them, and "
    "the cache of all rows, filled with the mean prompt and half of its answer",
    "training_seeds": "seeds of the runs that trained the heads, from config.yaml in their folders",
    "identity": "everything that the measurements depend on; prompts and files by their digests",
}


def compare(settings: CompareSettings) -> None:
    """Decode the prompts with every method and sampling, and write the report.

    Every timed turn is appended to `compare.jsonl` as soon as it is measured. The same command
    resumes from this file and measures nothing twice.

    Raises:
      InputError: a file or a prompt cannot be used, a drafter does not fit the target, or the file
        holds measurements with other settings.
    """
    found = find_target(settings)
    batch_size = settings.batch_size or (1 if settings.clock else None)
    questions = read_questions(found, settings, batch_size)
    rows = rows_decoded(questions.first.prompts)[-1]
    batch_size = min(batch_size or rows, rows)
    ways = [_ways(settings, sampling) for sampling in settings.samplings]
    every = dict.fromkeys(way for own in ways for way in own.values())
    # A head without a tree drafts nothing and is not loaded.
    drafted = [(way.drafter, way.tree) for way in every if way.drafter and way.tree]
    models = {name: find_drafter(name, found.files) for name in dict(drafted)}
    for name, tree in drafted:
        check_pair(found.files.config, models[name].config, tree)
    if is_first():
        make_folder(settings.report_dir, "report_dir")
    path = settings.report_dir / "compare.json"
    identity = _identify(settings, found.files.digest(), questions.first, ways, models)
    measured = open_measured(path.with_suffix(".jsonl"), identity)
    target = found.files.load(settings.dtype, found.mesh)
    shard_rows = batch_size // data_shards(found.mesh)
    methods, weights = _load_methods(target, every, settings.dtype, shard_rows)
    asked = [
        questions.encode_turns(target, sampling, partial(measured.answer, index))
        for index, sampling in enumerate(settings.samplings)
    ]
    before = _decode_missing(settings, batch_size, ways, methods, asked, measured)
    if not is_first():
        return
    per_token = shard_rows * _cache_bytes(target, settings.dtype)
    cases = []
    for index, (sampling, own) in enumerate(zip(settings.samplings, ways, strict=True)):
        turns = [turn for turn in measured.turns[index] if turn.repeat < settings.repeats]
        case = summary.summarize(asked[index], batch_size, turns)
        for name, way in own.items():
            _add_costs(case, name, methods[way].num_nodes, weights[way], per_token)
        told = {"sampling": asdict(sampling), "described": describe_sampling(sampling)}
        described = {
            name: {
                "drafter": way.drafter,
                "tree": way.tree and asdict(way.tree),
                "num_nodes": methods[way].num_nodes,
            }
            for name, way in own.items()
        }
        cases.append({**told, "ways": described, **case})
        cases[-1]["verdict"] = summary.judge_case(case, own, settings.clock)
    measures = {
        "samplings": cases,
        "batch_size": batch_size,
        "target": asdict(target.config),
        "training_seeds": training_seeds(
            name for name, model in models.items() if isinstance(model, MatchedModel)
        ),
        "identity": identity,
    }
    report = write_report(path, measures, settings, DEFINITIONS)
    _write_files(path, report, [f"From earlier runs, in {measured.path}: {before}."] * bool(before))


def _write_files(path: Path, report: Mapping[str, Any], more: Sequence[str]) -> None:
    """Write the page, chart, CSV and LaTeX files, and print a summary that includes `more`."""
    from .charts import write_comparison_chart  # matplotlib is slow to import

    cases, config = report["samplings"], report["config"]
    title = (
        f"{config['target']}; {config['dtype']}, batch {report['batch_size']}; "
        f"{len(cases[0]['prompts'])} prompts, up to {config['max_new_tokens']} new tokens; "
        f"{report['device']}"
    )
    notes = {
        case["described"]: [*answer_lines(case["answers"]), *summary.lookup_lines(case)]
        for case in cases
    }
    page, chart = path.with_suffix(".md"), path.with_suffix(".png")
    page.write_text(tables.page(report, title, notes), encoding="utf-8")
    path.with_suffix(".csv").write_text(tables.as_csv(report), encoding="utf-8")
    path.with_suffix(".tex").write_text(tables.as_latex(report), encoding="utf-8")
    write_comparison_chart(report, title, chart)
    said = [f"{name}: {line}" for name, lines in notes.items() for line in lines]
    shown = (*said, *more, *tables.screen(report), tables.LEGEND)
    show(path, title, *shown, f"The page: {page}", f"The chart: {chart}")
    for case in cases:
        print(f"{case['described']}: {case['verdict']['sentence']}")


def _ways(settings: CompareSettings, sampling: SamplingConfig) -> dict[str, Way]:
    """Return the baseline and all methods by name; a grid of trees has one method for each tree.

    Raises:
      InputError: a drafter with `tree: auto` has no table, or two methods have the same name.
    """
    ways = {BASELINE: Way(None, None)}
    for name, one in settings.drafters.items():
        if one.tree == "auto":
            assert one.drafter is not None
            tree = load_tree(one.drafter, settings.batch_size or 1, sampling.temperature)
            ways[name] = Way(one.drafter, tree)
            continue
        trees = one.tree.build()
        rows = list(map(asdict, trees))
        fields = TREE if one.drafter else ("lookup_tokens",)
        differ = [field for field in fields if len({row[field] for row in rows}) > 1]
        for tree, row in zip(trees, rows, strict=True):
            words = [f"{TREE[field]}={row[field]}" for field in differ]
            full = ", ".join([name, *words])
            if full in ways:
                raise InputError(f"drafters has two methods named {full!r}; rename one of them.")
            ways[full] = Way(one.drafter, tree)
    return ways


def _identify(
    settings: CompareSettings,
    target: str,
    asked: EncodedPrompts,
    ways: Sequence[Mapping[str, Way]],
    models: Mapping[str, MatchedModel | FoundSelf],
) -> dict[str, Any]:
    """Everything on which measurements depend: digests of prompts and models, settings, machine.

    `target` is the digest of the target's files.
    """
    omitted = {"target", "drafters", "prompts", "prompt_count", "report_dir", "repeats", "warm_ups"}
    questions = [[prompt.name, prompt.turns, prompt.category] for prompt in asked.prompts]
    encoded = json.dumps([questions, asked.rows, asked.stop_tokens])
    digests = {name: model.digest() for name, model in models.items()}
    return {
        "prompts": hashlib.sha256(encoded.encode()).hexdigest(),
        "target": target,
        **{
            f"drafters.{name}": {
                "files": digests.get(way.drafter or ""),
                "trees": [tree and asdict(tree) for tree in (own[name].tree for own in ways)],
            }
            for name, way in ways[0].items()
            if name != BASELINE
        },
        **settings.model_dump(mode="json", exclude=omitted),
        "device": describe_device(),
        "versions": describe_versions(),
    }


def _load_methods(
    target: Target, ways: Iterable[Way], dtype: str, rows: int
) -> tuple[dict[Way, Method], dict[Way, int]]:
    """Load the methods; return them with the bytes of weights that a step of each reads per device.

    `rows` is the number of rows of a batch per device.

    Raises:
      InputError: a tree is deeper than the target's position limit.
    """
    row_bytes = embedding_bytes(target, rows)
    load_once = cache(partial(load_drafter, dtype=dtype, mesh=target.mesh, target=target))
    methods, weights = {}, {}
    for way in ways:
        head = load_once(way.drafter) if way.drafter and way.tree else None
        methods[way] = drafting(target, head, way.tree)
        weights[way] = call_bytes(target, methods[way].num_nodes, row_bytes)
        if head is not None and way.tree is not None:
            weights[way] += draft_bytes(target, head, way.tree, row_bytes)
    return methods, weights


def _decode_missing(
    settings: CompareSettings,
    batch_size: int,
    ways: Sequence[Mapping[str, Way]],
    methods: Mapping[Way, Method],
    asked: Sequence[EncodedPrompts],
    measured: Measured,
) -> str:
    """Decode the missing turns; say how many turns earlier runs have measured, "" for none."""
    batches = [
        make_batches(one, batch_size, sampling, settings)
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
    if settings.clock:
        left = [
            (way, methods[way], batches[index][batch])
            for index, batch in missing
            for way in ways[index].values()
        ]
        warm_up(left, settings.warm_ups)
    if missing:
        runs = len(ways[0])
        with progress(runs * len(due), "measure", runs * len(done)) as advance:
            for index, own in enumerate(batches):
                skipped = {(batch, repeat) for of, batch, repeat in done if of == index}
                named = {name: methods[way] for name, way in ways[index].items()}
                for turn in measure(named, own, settings.repeats, skipped, advance):
                    measured.keep_turn(index, turn if settings.clock else turn.untimed())
    return f"{len(done)} of {len(due)} turns" if done else ""


def _cache_bytes(target: Target, dtype: str) -> int:
    """Bytes of the cache per token of one row on one device."""
    page = jax.eval_shape(partial(init_cache, target.config, 1, PAGE, dtype))
    parts = 1 if target.mesh is None else target.mesh.shape[MODEL]
    return bytes_of((page.keys, page.values)) // PAGE // parts


def _add_costs(case: dict[str, Any], name: str, nodes: int, weights: int, per_token: int) -> None:
    """Add the bytes that a step of the method reads, over all prompts and in each category.

    `weights` is the bytes of weights per step, `per_token` the bytes of cache for one token of
    every row.
    """
    for category, part in {None: case, **case["categories"]}.items():
        tokens = [
            row["prompt_tokens"] + row["methods"][BASELINE]["new_tokens"] / 2
            for row in case["prompts"]
            if category in (None, row["category"])
        ]
        part["methods"][name]["drafted_per_step"] = nodes - 1
        part["methods"][name]["bytes_per_step"] = weights + round(
            float(np.mean(tokens)) * per_token
        )


def training_seeds(drafters: Iterable[str]) -> dict[str, int]:
    """Return the seeds of drafters' training runs, by the drafters' folders.

    A drafter is left out if its parent folder has no `config.yaml` with a seed.
    """
    seeds = {}
    for drafter in drafters:
        path = Path(drafter).parent / "config.yaml"
        if path.is_file():
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(values, dict) and type(values.get("seed")) is int:
                seeds[drafter] = values["seed"]
    return seeds
