"""`python -m eval parity`: is the speculative text the baseline's, token for token?"""

import contextlib
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from rich.table import Table

from redrafter_jax.command_line import make_folder
from redrafter_jax.config import TreeConfig
from redrafter_jax.decoding.read import chunk_length, read_chunk
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.drafters.bind import check_pair
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.engine.requests import check_batch, slots_for
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import find_drafter, load_drafter
from redrafter_jax.models.cache import init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.mesh import per_shard, place, to_host
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.progress import track
from redrafter_jax.sampling import draw_noise, filter_logits
from redrafter_jax.text.prompts import EncodedPrompts
from redrafter_jax.types import KVCache, Sampling

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
from .row_sampling import stack_sampling

DEFINITIONS = metrics.DEFINITIONS | {
    "position": "index of the first new token that differs, from 0",
    "gap": "at the first divergence the baseline's token's score less that of the speculative "
    "text's, where the target reads the text up to there in one pass; a score is what a token is "
    "chosen by: logits over the temperature, filtered, plus the noise of the absolute position; "
    "null where a filter decides, or a text has ended",
    "filtered": "a filter (top-k, top-p, min-p) drops one of the two tokens, or by rounding may",
    "tie": "the target could choose either token, had rounding moved each logit of that pass by "
    "the tolerance of the dtype or less: the filters would keep the token, and drop every token "
    "that is ahead of it by more than the tolerance over the temperature",
    "largest_gap": "the largest size of a gap in the case",
    "ties": "divergences that are ties",
}


class ComparedBatch(NamedTuple):
    """One batch decoded both ways; `divergences` has an entry per row, None for equal texts."""

    speculative: Run
    baseline: Run
    divergences: list[dict[str, Any] | None]


def check_parity(settings: ParitySettings) -> None:
    """Decode every case both ways in every dtype, explain where texts differ, report.

    Exits with code 1 if a divergence is no numerical tie.

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
    """Name the case in errors."""
    try:
        yield
    except InputError as error:
        raise InputError(f"Case {name!r}: {error}") from None


def compare_batch(
    target: Target, drafter: LoadedHead | Drafter, tree: TreeConfig, batch: Batch, tolerance: float
) -> ComparedBatch:
    """Decode a batch both ways; where texts differ, read them up to there to see why."""
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


class Scores(NamedTuple):
    """What the target chooses a row's next token from, and how.

    Attributes:
      logits: its scores.
      noise: of the token's position.
      sampling: of this row, B = 1.
    """

    logits: Float[np.ndarray, " V"]
    noise: Float[np.ndarray, " V"]
    sampling: Sampling

    @property
    def temperature(self) -> float:
        """What logits are divided by."""
        return float(self.sampling.temperature[0]) or 1.0

    @property
    def unfiltered(self) -> Float[np.ndarray, " V"]:
        """By what tokens are chosen where no filter drops them."""
        return self.logits / self.temperature + self.noise

    def keeps(self, by: Float[np.ndarray, " V"] | float = 0.0) -> Bool[np.ndarray, " V"]:
        """Which tokens the filters keep, had the logits moved by so much."""
        moved = jnp.asarray(self.logits + by, jnp.float32)[None, None]
        # Without `jit` the filter would compile its branches anew every time.
        return np.isfinite(jax.jit(filter_logits)(moved, self.sampling)[0, 0])

    def may_choose(self, token: int, tolerance: float) -> bool:
        """Whether it would be chosen, had rounding moved each logit by the tolerance or less.

        Filters keep the largest logits. One movement has to make them keep the token, another to
        make them drop all tokens ahead of it. These two are not one: the largest logit of all may
        have to fall in the first and to rise in the second. But where the token can also pass the
        tokens ahead in logits, some movement between the two does both.
        """
        logits, scores = self.logits, self.unfiltered
        if not self.keeps(np.where(logits > logits[token], -tolerance, tolerance))[token]:
            return False
        ahead = scores > scores[token] + tolerance / self.temperature
        if not ahead.any():
            return True
        rival = int(np.where(ahead, logits, -np.inf).argmax())
        down = ahead | (logits < logits[rival] - 2 * tolerance)
        dropped = not self.keeps(np.where(down, -tolerance, tolerance))[rival]
        return dropped and bool(logits[rival] <= logits[token] + 2 * tolerance)


def score(target: Target, batch: Batch) -> list[Scores]:
    """What the target chooses the token after each prompt from."""
    rows = check_batch(target.config, batch)
    lengths = np.asarray([len(row.prompt) for row in rows], np.int32)
    # Whole chunks, and the token after the last one.
    tokens = np.zeros((len(rows), slots_for(int(lengths.max()), 1) + 1), np.int32)
    for own, row in zip(tokens, rows, strict=True):
        own[: len(row.prompt)] = row.prompt
    sampling = stack_sampling(target.config, rows)
    placed = place((tokens, lengths, sampling), target.mesh)
    logits, noise = to_host(_score(target, *placed))
    return [
        Scores(
            logits[row],
            noise[row],
            jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], sampling),
        )
        for row, _ in enumerate(batch.prompts)
    ]


@jax.jit
@per_shard
def _score(
    target: Target, tokens: Int[Array, "B Splus1"], lengths: Int[Array, " B"], sampling: Sampling
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """The logits and the noise that the token after each prompt is chosen by."""
    decoder, V = target.merge(), target.config.vocab_size
    B, S = tokens.shape[0], tokens.shape[1] - 1
    C = min(chunk_length(), S)

    def read(
        index: Int[Array, ""], carry: tuple[KVCache, Float[Array, "B V"]]
    ) -> tuple[KVCache, Float[Array, "B V"]]:
        cache, logits = carry
        chunk = jax.lax.dynamic_slice_in_dim(tokens, index * C, C + 1, axis=1)
        fresh = read_chunk(decoder, RootOnly(), (), cache, chunk, lengths, sampling)
        ends = (lengths - 1) // C == index
        return fresh.cache, jnp.where(ends[:, None], all_gather(fresh.logits[:, 0], V), logits)

    nothing = init_cache(target.config, B, S, decoder.dtype), jnp.zeros((B, V))
    _, logits = jax.lax.fori_loop(0, (lengths.max() - 1) // C + 1, read, nothing)
    return logits, draw_noise(sampling, lengths, 1, V)[:, 0]


def explain(
    seen: Scores, token: int | None, speculative_token: int | None, tolerance: float
) -> dict[str, Any]:
    """Judge a first divergence; a token is None where the text has ended.

    The tolerance is in logits, that is in scores times the temperature.
    """
    if token is None or speculative_token is None:
        return {"gap": None, "filtered": False, "tie": False}
    both = (token, speculative_token)
    gap = float(seen.unfiltered[token] - seen.unfiltered[speculative_token])
    tie = all(seen.may_choose(one, tolerance) for one in both)
    by_scores = abs(gap) <= tolerance / seen.temperature
    filtered = (tie and not by_scores) or not seen.keeps()[[*both]].all()
    return {"gap": None if filtered else gap, "filtered": bool(filtered), "tie": tie}


def _measure(
    asked: EncodedPrompts, tree: TreeConfig, compared: Sequence[ComparedBatch]
) -> dict[str, Any]:
    """What `parity.json` says of one case in one dtype."""
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
    """For each dtype one line per case."""
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
