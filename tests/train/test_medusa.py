"""`drafter.kind: medusa`: what its heads learn, and a run from its first step to its use."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from rich.console import Console
from tiny_models import random_drafter, random_target
from train_runs import rows, settings, trial

from redrafter_jax import MedusaConfig, load_drafter
from train.config import LossSettings, TrainSettings
from train.loop import train
from train.loss import round_sums, split_windows

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_head_i_learns_the_token_that_comes_i_places_after_the_next() -> None:
    target = random_target()
    V, D, T = target.config.vocab_size, target.config.hidden_size, 9
    heads = random_drafter(MedusaConfig(V, D, num_heads=2, num_draft_layers=1))
    random = np.random.default_rng(0)
    tokens, hidden = random.integers(0, V, (1, T)), random.normal(size=(1, T, D))
    mask = random.random((1, T)) < 0.7

    @jax.jit
    def losses(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        places = (jnp.asarray(tokens, jnp.int32), jnp.asarray(mask), jnp.ones((1, T), jnp.int32))
        windows = split_windows(hidden, *places, rounds=2, chunk_length=4)
        pair = heads.merge(), target.merge()
        one = partial(round_sums, *pair, rounds=2, settings=LossSettings())
        sums = jax.vmap(one)(windows)
        return sums.hard.sum(axis=0), heads.merge().logits(hidden, 2)

    hard, logits = map(np.asarray, losses(jnp.asarray(hidden, jnp.float32)))
    expected = [
        -sum(
            float(oracles.log_softmax(logits[0, t, head])[tokens[0, t + 2 + head]])
            for t in range(T - 2 - head)
            if mask[0, t + 2 + head]
        )
        for head in range(2)
    ]
    np.testing.assert_allclose(hard, expected, rtol=1e-4)


@pytest.mark.long
def test_a_run_is_tried_and_exported(target_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    values = settings(
        target_folder,
        output,
        drafter={"kind": "medusa", "initial_head": "target", "draft_vocab_size": 40},
        steps=6,
        log_every=3,
        acceptance=trial(tmp_path, every=6, draft={"beam_width": 2, "draft_rounds": 2}),
    )
    outcome = train(TrainSettings.model_validate(values), Console(quiet=True))
    assert outcome.best is not None
    drafter = load_drafter(output / "drafter", "float32")
    assert (drafter.config.num_heads, drafter.config.draft_vocab_size) == (2, 40)
    first, last = rows(output)
    assert last["loss"] < first["loss"]
    assert last["acceptance_length"] >= 1
