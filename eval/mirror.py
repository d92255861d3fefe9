"""`python -m eval mirror`: measure drafting the next trees while the target verifies.

After some of the target's layers, its next tokens are guessed. For the likeliest guesses, the
drafter drafts trees ahead. The measures are how often the next tree is ready, and the time of a
step.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from rich.table import Table

from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import Dtype, MirrorConfig, SamplingConfig, TreeConfig
from redrafter_jax.drafters.model_drafter import ModelDrafter
from redrafter_jax.engine.requests import Batch
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import load_drafter
from redrafter_jax.models.target import Decoder
from redrafter_jax.progress import track
from redrafter_jax.settings.sections import SamplingSettings
from redrafter_jax.types import KVCache, TokenTree, View

from .benchmark import Method, Run, decode_batch, drafting, make_batches, measure
from .config import RowSettings, TargetSettings
from .questions import find_target, read_questions
from .report import describe_sampling, make_table, show, write_report

DEFINITIONS = {
    "plain": "the same drafter and tree, drafted after each target call",
    "fallback_rate": "for k guesses after every node: share of a row's steps, except the last, for "
    "which no tree would have been ready. Decoding uses the largest k; a smaller k takes the first "
    "k guesses",
    "waits_per_step": "drafter calls for which the target waited, over target calls; a batch waits "
    "if any of its rows has no tree",
    "acceptance_length": "tokens per target call with the largest k. For a drafter that reads only "
    "tokens, plain decoding has the same. Other drafters read the hidden states behind the guess "
    "until the target has decided",
    "equal": "whether the tokens equal those of plain decoding",
    "milliseconds": "medians over steps of each program, with the host waiting for it: now, a tree "
    "that the target waits for; begin, the first layers and the guess; complete, the other layers "
    "and the decision; ahead, the trees drafted ahead; pick, the choice of the tree that fits; "
    "read, the drafter's reading of the path; transfers, all three transfers of a step together",
    "law": "begin + max(complete, ahead) + transfers + pick + waits_per_step x now + "
    "max(0, read - begin)",
    "step": "measured: decoding time over target calls, without waiting for programs, median of "
    "repeats",
    "overlapped": "whether the drafter has its own devices; otherwise a step takes the sum of all "
    "parts, and the law is a prediction",
    "predicted_speedup": "speed-up of the law over plain decoding, by c, the cost of drafting in "
    "target calls. The guesses are assumed equally good. Drafting takes c target calls both ahead "
    "and after, and a target call takes the time of the plain step without now",
}
_TRANSFERS = ("send tree", "send guess", "send end")
_COSTS = (0.05, 0.1, 0.2, 0.4, 0.8)


class MirrorSettings(RowSettings, TargetSettings):
    """The settings of `python -m eval mirror`: measure drafting while the target verifies.

    Attributes:
      drafter: drafter that `redrafter_jax.load_drafter` can load; None for prompt lookup alone,
        with `tree.lookup_tokens`.
      tree: draft tree.
      dtype: dtype of both models' parameters.
      sampling: sampling settings.
      layers: numbers of target layers after which the target's next tokens are guessed, each
        measured in turn; None for a quarter, half and three quarters of the layers.
      candidates: numbers k of guesses after every node; decoding uses the largest.
      drafter_devices: number of devices for the drafter alone; 0 shares the target's devices.
      batch_size: number of prompts decoded together.
      repeats: number of timed runs of the whole step and of its parts; 0 disables timing.
      wait_milliseconds: additional time that the drafter waits in every call. This simulates a
        slower drafter that takes no processor from the target.
    """

    drafter: str | None = None
    tree: TreeConfig
    dtype: Dtype = "float32"
    sampling: SamplingSettings = SamplingConfig()
    layers: list[PositiveInt] | None = Field(default=None, min_length=1)
    candidates: list[PositiveInt] = Field(default=[1, 2, 4, 8], min_length=1)
    drafter_devices: NonNegativeInt = 0
    batch_size: PositiveInt = 1
    repeats: NonNegativeInt = 0
    wait_milliseconds: NonNegativeFloat = 0.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Waiting(ModelDrafter):
    """A model drafter that waits for `seconds` before each draft."""

    seconds: float = field(default=0.0, metadata={"static": True})

    def propose(
        self,
        target: Decoder,
        own: Any,
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        def wait(root: Any) -> np.ndarray:
            del root
            time.sleep(self.seconds)
            return np.zeros((), np.int32)

        zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.int32), view.root[0])
        view = view._replace(root=view.root + zero)
        return super().propose(target, own, cache, view, noise, tree)


class Stopwatch:
    """A callback for `Mirror.watch` that times the programs of a step, waiting for each of them.

    Attributes:
      seconds: duration of each run of a program in seconds, by the program's name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._last = time.perf_counter()

    def __call__(self, name: str, result: Any) -> None:
        jax.block_until_ready(result)
        now = time.perf_counter()
        self.seconds[name].append(now - self._last)
        self._last = now

    def milliseconds(self) -> dict[str, float]:
        """Return the median milliseconds of each program; the three transfers are summed."""
        found = {name: 1000 * median(seconds) for name, seconds in self.seconds.items()}
        return found | {"transfers": sum(found.pop(name) for name in _TRANSFERS)}


def measure_mirror(settings: MirrorSettings) -> None:
    """Decode with each of the layers, and write the report.

    Raises:
      InputError: a setting, a file or a prompt cannot be used.
    """
    tree, name, head = settings.tree, settings.drafter, None
    if name is None and tree != TreeConfig(lookup_tokens=max(tree.lookup_tokens, 1)):
        raise InputError(
            f"tree is {tree} but drafter is not set, which selects prompt lookup alone; set "
            "drafter, or set only lookup_tokens in tree."
        )
    found = find_target(settings)
    questions = read_questions(found, settings, settings.batch_size)
    make_folder(settings.report_dir, "report_dir")
    target = found.files.load(settings.dtype, found.mesh)
    if name is not None:
        head = load_drafter(name, settings.dtype, found.mesh, target=target)
    plain = drafting(target, head, tree)
    drafter = plain.drafter.apart()
    if settings.wait_milliseconds:
        if not isinstance(drafter, ModelDrafter):
            raise InputError(
                f"wait_milliseconds is {settings.wait_milliseconds:g}, but the drafter is not a "
                "language model; use one, such as drafter=self:layers=2, or leave "
                "wait_milliseconds out."
            )
        drafter = Waiting(drafter.model, seconds=settings.wait_milliseconds / 1000)
    plain = plain._replace(drafter=drafter)
    asked = questions.encode_turns(target, settings.sampling)
    batches = make_batches(asked, settings.batch_size, settings.sampling, settings)
    expected = [decode_batch(plain, batch) for batch in batches]
    if not any(max(run.steps) for run in expected):
        raise InputError(
            "All answers end at their first token, so there is no step to measure; use other "
            "prompts, or raise max_new_tokens."
        )
    N = target.config.num_hidden_layers
    layers = settings.layers or sorted({max(1, N * part // 4) for part in (1, 2, 3)})
    most, rows, report = max(settings.candidates), [], {}
    path = settings.report_dir / "mirror.json"
    for layer in track(layers, len(layers), "measure"):
        mirror = MirrorConfig(layer, most, plain.num_nodes * most, settings.drafter_devices)
        method = plain._replace(mirror=mirror)
        runs = [decode_batch(method, batch) for batch in batches]
        row = {"layer": layer} | _count(runs, expected, settings.candidates)
        if settings.repeats:
            row |= _time(method, batches, settings.repeats, row, _acceptance(expected))
        rows.append(row)
        # Write after every layer, so that an interrupted run leaves a report.
        measures = {
            "rows": rows,
            "plain": {"acceptance_length": _acceptance(expected)},
            "overlapped": settings.drafter_devices > 0,
        }
        report = write_report(path, measures, settings, DEFINITIONS)
    sampling = describe_sampling(settings.sampling)
    title = f"{settings.target} with {name or 'prompt lookup'}, {sampling}\n{report['device']}"
    said = f"plain: acceptance length {_acceptance(expected):.3f}"
    show(path, title, said, *_tables(rows))


def _acceptance(runs: Sequence[Run]) -> float:
    return acceptance_length(np.concatenate([run.accept_counts for run in runs]))


def _count(
    runs: Sequence[Run], expected: Sequence[Run], candidates: Sequence[int]
) -> dict[str, Any]:
    """The measures that are the same on every machine."""
    counts = [run.mirror for run in runs if run.mirror is not None]
    outcomes = sum(one.outcomes for one in counts)
    ranks = sum((one.ranks for one in counts), Counter[int]())
    ready = {k: sum(ranks[rank] for rank in range(k)) for k in candidates}
    return {
        "acceptance_length": _acceptance(runs),
        "outcomes": outcomes,
        "fallback_rate": {str(k): 1 - ready[k] / max(outcomes, 1) for k in candidates},
        "waits_per_step": sum(one.now for one in counts) / sum(one.steps for one in counts),
        "equal": [run.tokens for run in runs] == [run.tokens for run in expected],
    }


def _time(
    method: Method, batches: Sequence[Batch], repeats: int, row: dict[str, Any], plain_gain: float
) -> dict[str, Any]:
    """Time parts and whole steps in turns, so that a slow moment affects both."""
    methods = {"step": method, "plain_step": method._replace(mirror=None)}
    watch, seconds = Stopwatch(), defaultdict[str, list[float]](list)
    for turn in measure(methods, batches, repeats):
        decode_batch(method, batches[turn.batch], watch)
        for name, run in turn.runs.items():
            if calls := max(run.steps):
                seconds[name].append(run.decode_seconds / calls)
    parts = watch.milliseconds()
    steps = {name: 1000 * median(own) for name, own in seconds.items()}
    waits, call = row["waits_per_step"], steps["plain_step"] - parts["now"]
    gain = row["acceptance_length"] / plain_gain
    return {
        "milliseconds": parts | steps,
        "law": _law(parts, waits, parts["ahead"], parts["now"]),
        "predicted_speedup": {
            str(cost): gain * (1 + cost) * call / _law(parts, waits, cost * call, cost * call)
            for cost in _COSTS
        },
    }


def _law(parts: dict[str, float], waits: float, ahead: float, now: float) -> float:
    """Milliseconds of a step by the law of `DEFINITIONS`, for given times of drafting."""
    step = parts["begin"] + max(parts["complete"], ahead) + parts["transfers"] + parts["pick"]
    return step + waits * now + max(0.0, parts["read"] - parts["begin"])


def _tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """The counts of all layers and, if they were timed, the times and what the law predicts."""

    def table(title: str, cells: Callable[[dict[str, Any]], dict[str, str]]) -> Table:
        told = [{"layer": str(row["layer"])} | cells(row) for row in rows]
        return make_table(title, [*told[0]], [[*one.values()] for one in told], text_columns=0)

    def form(numbers: dict[str, float], spec: str) -> dict[str, str]:
        return {name: format(value, spec) for name, value in numbers.items()}

    def counts(row: dict[str, Any]) -> dict[str, str]:
        more = {"acceptance": row["acceptance_length"], "waits / step": row["waits_per_step"]}
        equal = "yes" if row["equal"] else "no"
        return form(row["fallback_rate"] | more, ".3f") | {"equal": equal}

    def times(row: dict[str, Any]) -> dict[str, str]:
        ratio = {"step / law": row["milliseconds"]["step"] / row["law"]}
        return form(row["milliseconds"] | {"law": row["law"]}, ".1f") | form(ratio, ".2f")

    yield table("share of steps without a ready tree, by k", counts)
    if "law" in rows[0]:
        yield table("milliseconds, medians", times)
        title = "predicted speed-up over plain, for a drafter of so many target calls"
        yield table(title, lambda row: form(row["predicted_speedup"], ".2f"))
