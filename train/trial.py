"""Evaluation of the drafter during training: speculative decoding of held-out prompts."""

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import batched
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from redrafter_jax.acceptance import (
    acceptance_length,
    acceptance_rate_per_depth,
    ends_at_once,
    repeats_itself,
)
from redrafter_jax.drafters.base import LoadedHead, check_pair
from redrafter_jax.files.drafter_files import save_drafter
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.generation import generate, generate_autoregressive
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_rows, to_host
from redrafter_jax.parallel.model import Model
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.text.chat_template import NO_TEMPLATE
from redrafter_jax.text.prompts import (
    EncodedPrompts,
    PromptEncoding,
    encode_later_turns,
    encode_prompts,
    read_prompts,
    rows_decoded,
)
from redrafter_jax.verdict import Texts, describe_tree

from .config import AcceptanceSettings, TrainSettings
from .data.chat import load_template

# With an acceptance length below this, drafting is never faster.
_HARDLY = 1.1


class Trial(NamedTuple):
    """The evaluation of the drafter during training.

    Attributes:
      settings: settings of the evaluation.
      rows: token ids of the prompts, one list per prompt and turn.
      stop_tokens: tokens that end an answer; empty for prompts that are plain texts.
      folder: folder to which the best drafter is exported.
      measured_on: digest of the prompts, the limits and the tree. Acceptance lengths are comparable
        only with the same digest.
    """

    settings: AcceptanceSettings
    rows: list[list[int]]
    stop_tokens: tuple[int, ...]
    folder: Path
    measured_on: str


class Best(NamedTuple):
    """The best drafter so far.

    Attributes:
      step: training step of the drafter.
      acceptance_length: its acceptance length on the prompts, in tokens per target call.
      measured_on: digest of the evaluation, from `Trial.measured_on`.
      texts: number of decoded texts.
      repeating: number of texts that repeat themselves.
      short: number of texts that end within a few tokens.
    """

    step: int
    acceptance_length: float
    measured_on: str
    texts: int = 0
    repeating: int = 0
    short: int = 0


def plan_trial(
    settings: TrainSettings, files: TargetFiles, mesh: Mesh | None, chats: bool
) -> Callable[[Target], Trial] | None:
    """Read the evaluation prompts before any model is loaded.

    Args:
      settings: settings of the training run.
      files: files of the target.
      mesh: mesh of devices; None for a single device.
      chats: whether the training data has conversations. If it has, or if the tokenizer has a chat
        template, prompts are user turns unless `acceptance.chat` overrides this.

    Returns:
      None if `acceptance` is not set; otherwise a function from the target to the `Trial`. The
      target is needed because a later turn is encoded after the answers to earlier turns. The
      function raises `InputError` if a later turn does not fit.

    Raises:
      InputError: the prompts cannot be used, or the tree does not fit the models.
    """
    trial = settings.acceptance
    if trial is None:
        return None
    target = files.config
    drafter = settings.drafter.build_for(target, settings.draft_rounds)
    check_pair(target, drafter, trial.tree)
    prompts = read_prompts(trial.prompts, trial.prompt_count, trial.turns)
    template, eos = NO_TEMPLATE, ()
    chats = chats or files.template is not None
    if chats if trial.chat is None else trial.chat:
        template = load_template(settings.data, files)
        eos = target.eos_token_ids
    how = PromptEncoding(
        template, files.tokenizer, eos, trial.max_new_tokens, target.position_limit
    )
    for count in rows_decoded(prompts):
        check_rows(count, mesh)
    return partial(_prepare, settings, how, encode_prompts(how, prompts))


def _prepare(
    settings: TrainSettings, how: PromptEncoding, first: EncodedPrompts, target: Target
) -> Trial:
    trial = settings.acceptance
    assert trial is not None

    def answer(asked: EncodedPrompts) -> list[list[int]]:
        return [
            text
            for rows in batched(asked.rows, trial.batch_size)
            for text in generate_autoregressive(
                target,
                rows,
                max_new_tokens=trial.max_new_tokens,
                eos_token_ids=asked.stop_tokens,
            ).tokens
        ]

    asked = encode_later_turns(how, first, answer)
    inputs = [asked.rows, asked.stop_tokens, trial.max_new_tokens, asdict(trial.tree)]
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    return Trial(trial, asked.rows, asked.stop_tokens, settings.output_dir / "best", digest)


def try_drafter(trial: Trial, target: Target, drafter: LoadedHead) -> dict[str, float]:
    """Decode all prompts greedily, and measure the acceptance.

    The drafter runs in the target's dtype, as in later use.

    Returns:
      The measures by name: `acceptance_length`; for every reached depth d of the tree,
      `acceptance_rate/depth_d`, and as `acceptance_calls/depth_d` the number of target calls from
      which this rate is computed; `trial/texts`, `trial/repeating` and `trial/short`, the counts of
      `Best`.
    """
    dtype = target.merge().dtype
    drafter = jax.tree.map(lambda leaf: leaf.astype(dtype), drafter)
    tree = trial.settings.tree
    counts = np.zeros(tree.max_path, int)
    texts: list[list[int]] = []
    for rows in batched(trial.rows, trial.settings.batch_size):
        result = generate(
            target,
            drafter,
            rows,
            max_new_tokens=trial.settings.max_new_tokens,
            tree=tree,
            eos_token_ids=trial.stop_tokens,
        )
        texts += result.tokens
        counts += result.accept_counts.sum(axis=0)
    measured = {
        "acceptance_length": acceptance_length(counts),
        "trial/texts": len(texts),
        "trial/repeating": sum(map(repeats_itself, texts)),
        "trial/short": sum(ends_at_once(text, trial.stop_tokens) for text in texts),
    }
    for depth, rate in enumerate(acceptance_rate_per_depth(counts), start=1):
        if np.isfinite(rate):
            measured[f"acceptance_rate/depth_{depth}"] = float(rate)
            measured[f"acceptance_calls/depth_{depth}"] = int(counts[depth - 1 :].sum())
    return measured


def keep_best(
    trial: Trial,
    best: Best | None,
    step: int,
    measured: float,
    drafter: LoadedHead,
    texts: Sequence[int] = (),
) -> Best:
    """Export the drafter if it is better than the best so far, and return the new best.

    A best drafter that was measured on other prompts or another tree is always replaced. A run that
    is killed during the export leaves one complete drafter, in `trial.folder` or in the folder of
    the same name with the suffix `.old`.

    Args:
      trial: the evaluation.
      best: the best drafter so far; None at the first evaluation.
      step: training step of `drafter`.
      measured: acceptance length of `drafter`.
      drafter: the drafter that was evaluated.
      texts: values of the fields `texts`, `repeating` and `short` of `Best`.
    """
    if best and best.measured_on == trial.measured_on and measured <= best.acceptance_length:
        return best
    params = to_host(drafter.params)
    if is_first():
        _replace(trial.folder, Model(drafter.config, drafter.graphdef, params))
    return Best(step, measured, trial.measured_on, *texts)


def describe_best(best: Best | None, settings: TrainSettings) -> str:
    """Describe in a sentence what a training run's evaluation shows, and what to do next.

    Training does not measure speed. The sentence says how fast a target call must be for the
    drafter to make decoding faster.
    """
    target, drafter = settings.target, settings.output_dir / ("best" if best else "drafter")
    words = [
        f"target={target}",
        f"drafters.head.drafter={drafter}",
        f"drafters.both.drafter={drafter}",
        "prompts=FILE",
    ]
    if settings.data.chat_template != "tokenizer":  # the default of `eval compare`
        words.append(f"chat_template={settings.data.chat_template}")
    compare = (
        "`eval compare` measures its speed against no drafting: python -m eval compare --config "
        f"configs/compare.yaml {shlex.join(words)}"
    )
    trial = settings.acceptance
    if best is None or trial is None:
        return f"No verdict: the head was not tried, because `acceptance` is not set; {compare}"
    texts = Texts(best.texts, best.repeating, best.short)
    if trial.tree.lookup_tokens:
        looked_up = f"acceptance.tree has lookup_tokens={trial.tree.lookup_tokens}"
        gain = "and a gain of prompt lookup is not the head's"
        return f"Too little data to tell: {looked_up}, {gain}; {compare}"
    if texts.fault:
        return (
            f"Too little data to tell: the head was tried on {texts.fault}; give acceptance other "
            f"prompts; {compare}"
        )
    gained = (
        f"a target call gains {best.acceptance_length:.2f} tokens (1.00 without a head) with "
        f"{describe_tree(trial.tree)} on {best.texts} held-out texts"
    )
    if best.acceptance_length < _HARDLY:
        return (
            f"Slower than no head, wherever it runs: {gained}; train on more tokens, best on text "
            "that the target writes (train regenerate)."
        )
    return (
        f"Faster where a call over the tree costs less than {best.acceptance_length:.2f} calls of "
        f"the baseline: {gained}; {compare}"
    )


def _replace(folder: Path, drafter: LoadedHead) -> None:
    fresh, old = (folder.with_name(f"{folder.name}.{word}") for word in ("new", "old"))
    shutil.rmtree(fresh, ignore_errors=True)
    save_drafter(drafter, fresh)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
