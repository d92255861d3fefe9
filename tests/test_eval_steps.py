"""`python -m eval steps`: every combination is timed, and what is timed is a decode step."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tiny_folders import run_module
from tiny_models import tiny_config

from eval.abstract import abstract_state
from eval.config import StepsSettings
from eval.random_weights import random_drafter, random_target
from eval.step_parts import (
    fill_state,
    make_noise,
    run_accept,
    run_commit,
    run_draft,
    run_verify,
    set_back,
)
from eval.steps import Combination, measure_steps
from redrafter_jax import DraftConfig, InputError
from redrafter_jax.command_line import load_settings
from redrafter_jax.config import DrafterConfig
from redrafter_jax.decode import decode_step

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = tiny_config(num_hidden_layers=1)
PARTS = ["draft", "verify", "accept", "commit"]
VALUES: dict[str, Any] = {
    "target": {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "exit_dim": 16,
    "dtype": "float32",
    "trees": [{"beam_width": [2], "draft_rounds": [2], "num_nodes": [3, None]}],
    "slots": [32],
    "steps": 2,
    "short_turns": 3,
    "repeats": 2,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "steps.yaml"
    path.write_text(yaml.safe_dump(VALUES | {"report_dir": str(tmp_path / "report")}))
    return path


def test_the_parts_in_a_row_are_a_decode_step() -> None:
    draft = DraftConfig(beam_width=3, draft_rounds=2, num_nodes=6)
    target = random_target(TINY, jnp.float32)
    shape = DrafterConfig(vocab_size=24, hidden_size=32, exit_dim=16, num_draft_layers=0)
    drafter = random_drafter(shape, jnp.float32)
    state = fill_state(abstract_state(target, 2, 32, draft.max_path))
    state = set_back(state, 9, draft.max_path, done=False)
    expected = jax.jit(decode_step, static_argnums=3)(target, drafter, state, draft)
    assert expected.stats.steps.tolist() == [1, 1]

    zero = jnp.int32(0)
    noise = make_noise(state, max_path=3, vocab_size=24)
    # A turn does the same again, whatever their number.
    tree = run_draft(target, drafter, state, noise, zero, draft=draft, turns=3)
    verified = run_verify(target, state, tree, zero, turns=2)
    chosen, accepted = run_accept(
        verified.logits, tree, noise, state.sampling, zero, max_path=3, turns=2
    )
    ended = run_commit(state, verified, chosen, accepted, zero, turns=1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ended, expected
    )

    # Rows that are done take any number of turns.
    state = set_back(ended, 9, draft.max_path, done=True)
    ended = run_commit(state, verified, chosen, accepted, zero, turns=50)
    assert ended.cache.lengths.tolist() == [9, 9]


def test_weights_have_the_shape_and_dtype_asked_for() -> None:
    target = random_target(TINY, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(target)} == {jnp.dtype("bfloat16")}
    head = target.merge().lm_head[...]
    assert head.shape == (32, 24)
    # 32 inputs of size one make outputs of size one.
    assert float(head.std()) == pytest.approx(32**-0.5, rel=0.1)


def test_the_fullest_row_leaves_room_for_every_step() -> None:
    one = Combination(DraftConfig(beam_width=2, draft_rounds=4), batch_size=1, slots=64)
    # Two steps of up to 5 tokens; P = 5 slots more are written, and the root is one ahead.
    assert one.cached(steps=2) + 2 * 5 + 5 + 1 == 64


def test_the_report_has_every_combination(config: Path) -> None:
    grid = "batch_sizes=[1, 2]", "trees=[{beam_width: [2], draft_rounds: [2]}]"
    finished = run_module("eval", "steps", "--config", str(config), *grid)
    assert finished.returncode == 0, finished.stderr
    report = json.loads((config.parent / "report" / "steps.json").read_text())
    sizes = [(row["num_nodes"], row["batch_size"], row["slots"]) for row in report["rows"]]
    assert sizes == [(5, 1, 32), (5, 2, 32)]
    for row in report["rows"]:
        for measures in (row["milliseconds"], row["in_plain_steps"]):
            assert list(measures) == [*PARTS, "step", "plain"]
            for low, middle, high in measures.values():
                assert 0 < low <= middle <= high
        assert row["in_plain_steps"]["plain"] == [1, 1, 1]
    assert set(report["rows"][0]["milliseconds"]) < set(report["definitions"])
    assert "their sum may exceed the whole step" in finished.stdout
    assert (config.parent / "report" / "steps.png").stat().st_size > 0


@pytest.mark.parametrize("name", ["steps_demo", "steps_llama_3_1_8b", "steps_vicuna_7b"])
def test_the_configurations_are_valid(name: str) -> None:
    settings = load_settings(StepsSettings, CONFIGS / f"{name}.yaml")
    drafts = [draft for sizes in settings.trees for draft in sizes.build()]
    assert DraftConfig(6, 4, 12) in drafts or DraftConfig(8, 4, 32) in drafts


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trees=[{num_nodes: [34]}]", "num_nodes is 34; beam_width=8 and draft_rounds=4 give 1 to"),
        ("trees=[{beam_width: [25]}]", "beam_width is 25, more than the vocabulary's 24 tokens"),
        ("slots=[40]", "slots.0: Input should be a multiple of 32 (got 40)"),
        ("slots=[160]", "slots is 160, but the target has 128 positions; give fewer"),
        ("steps=10", "slots is 32, which 10 steps of up to 3 tokens overrun; give more slots"),
        ("batch_sizes=[]", "batch_sizes: List should have at least 1 item"),
    ],
)
def test_bad_settings_are_one_sentence(config: Path, override: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        measure_steps(["--config", str(config), override])
    assert sentence in str(refused.value)


def test_what_does_not_fit_the_device_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 1000}

    monkeypatch.setattr("eval.steps.jax.devices", lambda: [Small()])
    with pytest.raises(InputError, match=r"slots=32 with batch 1 needs 0\.0 GB .* give fewer"):
        measure_steps(["--config", str(config)])
