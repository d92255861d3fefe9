"""`python -m eval tune`: write the fastest tree for each batch size and temperature to a file.

In a turn, several trees and the baseline decode the same batch of prompts, one directly after the
other. Fast trees take more turns, and trees similar to them are added (see `halving.py`). All
speeds are measured, so this works for every kind of drafter.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np

from redrafter_jax.acceptance import ends_at_once, repeats_itself
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead, check_pair
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import find_drafter, load_drafter
from redrafter_jax.files.locate import TREE_TABLE
from redrafter_jax.files.tree_table import TreeTable, TunedTree, write_tree_table
from redrafter_jax.models.target import Target
from redrafter_jax.progress import progress
from redrafter_jax.text.prompts import read_prompts
from redrafter_jax.verdict import Texts

from .benchmark import Batch, Method, Run, decode_batch, drafting, make_batches, state_shape
from .config import TuneSettings
from .halving import Race, Tried, find_fastest, pick_diverse, tree_turns
from .metrics import count_accepted, quartiles
from .questions import find_target, read_questions
from .report import describe_device, describe_sampling, show, write_report
from .trees import build_all
from .tuned import Candidate, choose, table, verdict

DEFINITIONS = {
    "acceptance_length": "mean tokens gained per target call, bonus token included, over the turns",
    "cost": "time of a decode step / time of a baseline step: median over turns",
    "predicted": "predicted speed-up: acceptance length / cost",
    "turns": "number of turns, in which the tree and the baseline decode a batch one after the "
    "other",
    "faster": "number of turns in which the tree was faster",
    "measured": "quartiles over turns of the ratio to the baseline's tokens per second without "
    "prefill",
    "accepted_by": "accepted tokens by the source that proposed them, over the turns",
    "chosen": "the finalist with the largest median among those with a lower quartile above 1 and "
    "at least one accepted token; the baseline if there is none",
}
_LEGEND = (
    "length: acceptance length, tokens per target call. step: cost of a decode step, in "
    "baseline steps. measured: speed-up over the baseline, without prefill."
)

_BATCH_SIZES = (1, 2, 4, 8)
# Minimum number of turns of a finalist, because quartiles of fewer values mean little.
_TURNS = 8


def tune(settings: TuneSettings) -> None:
    """Measure trees, and write the table of the fastest trees and a report.

    Raises:
      InputError: a setting, a file or a prompt cannot be used.
    """
    if settings.mesh.build() is not None:
        raise InputError(
            "eval tune measures one device; leave mesh out and start it as a single process."
        )
    started = time.perf_counter()
    trees = build_all(settings.trees)
    output = _output(settings)
    batch_sizes = _batch_sizes(settings)
    found = find_target(settings)
    drafter_config = find_drafter(settings.drafter, found.files).config
    for tree in trees:
        check_pair(found.files.config, drafter_config, tree)
    questions = read_questions(found, settings, None)
    make_folder(settings.report_dir, "report_dir")
    target = found.files.load(settings.dtype)
    drafter = load_drafter(settings.drafter, settings.dtype, target=target)
    cells = list(product(batch_sizes, settings.samplings))
    rows, entries, verdicts, left_out, cut_short = [], [], [], [], []
    leaders: list[TreeConfig] = []
    for index, (batch_size, sampling) in enumerate(cells):
        name = f"batch size {batch_size}, {describe_sampling(sampling)}"
        seconds = None
        if settings.minutes is not None:
            left = started + 60 * settings.minutes - time.perf_counter()
            seconds = left / (len(cells) - index)
            if left <= 0 and entries:
                left_out.append(name)
                continue
        asked = questions.encode_turns(target, sampling)
        batches = make_batches(asked, batch_size, sampling, settings)
        whole = [batch for batch in batches if len(batch.prompts) == batch_size]
        pair = _Pair(target, drafter, whole, settings, name)
        # A single row has no other row with which to share nodes.
        own = [tree for tree in trees if batch_size > 1 or not tree.shared_nodes(1)] or trees
        # Try the best trees of the previous setting first.
        first = [tree for tree in leaders if tree in own]
        entrants = list(dict.fromkeys([*first, *pick_diverse(own, settings.entrants)]))
        candidates = pair.find(own, entrants[: settings.entrants], seconds)
        leaders = [one.tree for one in candidates[: -(-settings.entrants // 2)]]
        # After the time limit, other trees have fewer turns, too few to be chosen.
        finalists = [
            one for one in candidates[: settings.finalists] if one.turns == candidates[0].turns
        ]
        if pair.unfinished:
            cut_short.append(pair.unfinished)
        best = choose(finalists)
        verdicts.append(f"{name}: {verdict(finalists, best, pair.texts(asked.stop_tokens))}")
        rows += [
            {
                "batch_size": batch_size,
                "sampling": describe_sampling(sampling),
                **asdict(one.tree),
                **dict(zip(one._fields[1:], one[1:], strict=True)),
                "finalist": one in finalists,
                "chosen": one == best,
            }
            for one in candidates
        ]
        entry = TunedTree(batch_size, sampling.temperature, None, 1.0, 1.0)
        if best is not None:
            entry = replace(
                entry,
                tree=best.tree,
                predicted_speedup=round(best.predicted, 3),
                measured_speedup=round(best.measured[1], 3),
                acceptance_length=round(best.acceptance_length, 3),
            )
        entries.append(entry)
    write_tree_table(output, TreeTable(describe_device(), settings.dtype, tuple(entries)))
    path = settings.report_dir / "tune.json"
    shapes = {"target": asdict(target.config), "drafter": asdict(drafter_config)}
    measures = {"rows": rows, "verdicts": verdicts, **shapes}
    write_report(path, measures, settings, DEFINITIONS)
    notes = [f"Prompts were asked with the chat template: {found.template.name}."]
    if cut_short:
        notes.append(f"The time limit allowed only: {'; '.join(cut_short)}.")
    if left_out:
        notes.append(f"No time was left for: {'; '.join(left_out)}.")
    show(path, table(rows), _LEGEND, *notes, f"The trees: {output}")
    print("\n".join(verdicts))


class _Pair:
    """Measurements of a target and a drafter at one batch size and sampling."""

    def __init__(
        self,
        target: Target,
        drafter: LoadedHead | Drafter,
        batches: Sequence[Batch],
        settings: TuneSettings,
        name: str,
    ) -> None:
        self._target, self._drafter = target, drafter
        self._settings, self._name = settings, name
        baseline = drafting(target, drafter, None)
        shapes = [state_shape(baseline, batch) for batch in batches]
        # Batches of the commonest shape first, so that a tree's first turns need one program.
        self._batches = [
            batches[at]
            for at in sorted(range(len(batches)), key=lambda at: -shapes.count(shapes[at]))
        ]
        self._runs: dict[TreeConfig, list[tuple[Run, Run]]] = {}
        self._warm: set[tuple[TreeConfig | None, tuple[int, ...]]] = set()
        # What was measured before the time limit; empty if everything was.
        self.unfinished = ""
        # Texts of the baseline, by batch.
        self._texts: dict[int, list[list[int]]] = {}

    def find(
        self,
        trees: Sequence[TreeConfig],
        entrants: Sequence[TreeConfig],
        seconds: float | None,
    ) -> list[Candidate]:
        """Search for the fastest tree; return the measured trees. See `find_fastest`.

        `seconds` is the time limit, and None sets no limit. With 0 seconds or less, one tree is
        measured in the minimum number of turns. A compilation that has begun is finished.
        """
        begun = time.perf_counter()
        turns = self._settings.pairs or max(_TURNS, len(self._batches))

        def used() -> float:
            if seconds is None:
                return 0.0
            return (time.perf_counter() - begun) / seconds if seconds > 0 else 1.0

        race = Race(self._prepare, self._measure, turns, self._settings.finalists, used)
        planned = tree_turns(trees, entrants, race)
        with progress(planned, self._name) as self._advance:
            found = find_fastest(trees, entrants, race)
        done = sum(map(len, self._runs.values()))
        if seconds is not None and done < planned:
            self.unfinished = f"{self._name}: {done} of {planned} turns, with {len(found)} trees"
        return [self._candidate(one) for one in found]

    def texts(self, stops: Collection[int]) -> Texts:
        """Count the baseline's texts for the verdict; `stops` are the tokens that end a text."""
        every = [text for texts in self._texts.values() for text in texts]
        repeating = sum(map(repeats_itself, every))
        return Texts(len(every), repeating, sum(ends_at_once(text, stops) for text in every))

    def _prepare(self, tree: TreeConfig, turn: int) -> None:
        """Compile a tree and the baseline for the batch of a turn, untimed."""
        batch = self._batches[turn % len(self._batches)]
        for one in (None, tree):
            self._warm_up(one, batch)

    def _warm_up(self, tree: TreeConfig | None, batch: Batch) -> Method:
        """Return the method for a tree, compiled for the batch."""
        method = drafting(self._target, self._drafter, tree)
        shape = tree, state_shape(method, batch)
        if shape not in self._warm:
            decode_batch(method, batch)
            self._warm.add(shape)
        return method

    def _measure(self, trees: Sequence[TreeConfig], turn: int) -> list[float]:
        """Decode one batch with the baseline and each tree, and return the trees' speed-ups."""
        number = turn % len(self._batches)
        batch = self._batches[number]
        every = [self._warm_up(tree, batch) for tree in (None, *trees)]
        first = turn % len(every)
        order = [*range(first, len(every)), *range(first)]
        runs = {index: decode_batch(every[index], batch) for index in order}
        self._texts[number] = runs[0].tokens
        self._advance(len(trees))
        for index, tree in enumerate(trees, start=1):
            self._runs.setdefault(tree, []).append((runs[index], runs[0]))
        return [_speedup(runs[index], runs[0]) for index in range(1, len(every))]

    def _candidate(self, tried: Tried) -> Candidate:
        """Summarize the measurements of a tree.

        Raises:
          InputError: no token was decoded after prefill.
        """
        runs = [pair for pair in self._runs[tried.tree] if pair[1].decoded_tokens]
        if not runs:
            raise InputError(
                f"{self._settings.prompts}: every answer ends at its first token ({self._name}), "
                "so there is nothing to measure; raise max_new_tokens, or use other prompts or "
                "another chat_template."
            )
        counted = count_accepted([own for own, _ in runs])
        length = counted["acceptance_length"]
        cost = float(np.median([_cost(own) / _cost(theirs) for own, theirs in runs]))
        speedups = np.asarray(list(tried.speedups.values()), float)
        low, middle, high = quartiles(speedups) or [0.0, 0.0, 0.0]
        ends = (low, middle, high)
        turns, faster = len(runs), int((speedups > 1).sum())
        accepted = counted["accepted_by"]
        return Candidate(tried.tree, length, cost, length / cost, turns, faster, ends, accepted)


def _speedup(own: Run, baseline: Run) -> float:
    """The ratio of tokens per second, prefill left out."""
    if not baseline.decoded_tokens:
        return math.nan
    rates = [run.decoded_tokens / run.decode_seconds for run in (own, baseline)]
    return rates[0] / rates[1]


def _cost(run: Run) -> float:
    """Seconds of a decode step."""
    return run.decode_seconds / max(run.steps)


def _batch_sizes(settings: TuneSettings) -> list[int]:
    """The batch sizes to tune for.

    Raises:
      InputError: there are fewer prompts than a batch size.
    """
    prompts = len(read_prompts(settings.prompts, settings.prompt_count))
    if settings.batch_sizes is None:
        return [size for size in _BATCH_SIZES if size <= prompts]
    if max(settings.batch_sizes) > prompts:
        raise InputError(
            f"batch_sizes includes {max(settings.batch_sizes)}, but there are only {prompts} "
            "prompts; give at least as many prompts, or smaller batch_sizes."
        )
    return settings.batch_sizes


def _output(settings: TuneSettings) -> Path:
    """Path of the table.

    Raises:
      InputError: the folder of the table does not exist, or the path is a folder.
    """
    output = settings.output or Path(settings.drafter) / TREE_TABLE
    if not output.parent.is_dir():
        why = f"output is {output}, but the folder {output.parent} is missing; make the folder, or"
        if settings.output is None:
            why = f"drafter is {settings.drafter}, not a local folder; correct drafter, or"
        raise InputError(f"{why} set output=FILE for the trees.")
    if output.is_dir():
        raise InputError(f"output is {output}, a folder; set output=FILE for the trees.")
    return output
