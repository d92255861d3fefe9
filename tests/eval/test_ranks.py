"""Ranks of the target's choices against a slow walk, and acceptance counted by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_folders import write_pair
from tiny_models import PARITY_CONFIG, imitating_drafter

from eval.ranks import fewest_calls, measure_ranks, rank_texts, summarise
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = PARITY_CONFIG.vocab_size
PROMPTS = [[3, 1, 4, 1, 5], [9]]
TEXTS = [[2, 6, 5, 3], [5, 8, 9, 7, 9, 3]]


@jax.jit
def hidden_of(target: Target, tokens: jax.Array) -> jax.Array:
    return target.merge().forward(tokens)[0]


@pytest.mark.parametrize("known", [None, (1, 2, 3, 5, 6, 7, 9)])
def test_ranks_are_those_of_a_walk_along_the_text(
    habitual_target: Target, known: tuple[int, ...] | None
) -> None:
    drafter = imitating_drafter(habitual_target, corruption=1.0, draft_tokens=known)
    weights = oracles.DrafterWeights.of(drafter.merge())
    tokens = list(known or range(V))
    decoder = habitual_target.merge()
    embedding = np.asarray(decoder.embed_tokens[...], np.float64)
    found = rank_texts(habitual_target, drafter, PROMPTS, TEXTS, rounds=3)
    for prompt, text, ranks in zip(PROMPTS, TEXTS, found, strict=True):
        whole = prompt + text
        hidden = np.asarray(hidden_of(habitual_target, jnp.asarray([whole]))[0], np.float64)
        assert ranks.shape == (3, len(text) - 1)
        for column, root in enumerate(range(len(prompt), len(whole) - 1)):
            state = np.zeros(PARITY_CONFIG.hidden_size)
            for i in range(3):
                guessed = root + 1 + i
                if guessed >= len(whole):
                    assert ranks[i, column] == V
                    continue
                state = weights.step(state, embedding[whole[root + i]])
                order = np.argsort(-weights.logits(hidden[root - 1], state))
                ranking = [tokens[place] for place in order]
                wanted = ranking.index(whole[guessed]) if whole[guessed] in tokens else V
                assert ranks[i, column] == wanted


def test_a_run_of_guesses_ends_at_the_first_that_is_not_within() -> None:
    # Roots 0 to 5; two rounds. Within two: root 0 gains 1 + 2, root 3 gains 1, root 4 all the rest.
    ranks = np.asarray([[1, 0, 0, 2, 0, 1], [0, 0, 5, 0, 1, 9]])
    row = summarise([ranks], 2)
    assert row["acceptance_length"] == pytest.approx(6 / 3)
    assert row["within"] == [5 / 6, 4 / 5]


def test_a_shorter_gain_that_leads_to_a_longer_run_is_taken() -> None:
    # Token 0 could take four; three lead to token 3, which takes all the rest.
    runs = [3, 0, 0, 3, 0, 0, 0]
    assert fewest_calls(np.asarray(runs)) == 2
    ranks = np.asarray([[0 if run > i else 9 for run in runs] for i in range(3)])
    assert summarise([ranks], 1)["acceptance_length"] == 3.5
    # Nothing is guessed: a call a token.
    assert fewest_calls(np.zeros(5, int)) == 5


def test_texts_that_leave_a_round_nothing_to_guess_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "ranks.yaml"
    stated = "target: a, drafter: b, prompts: c, draft_rounds: 4, report_dir: d"
    config.write_text(f"{{{stated}, max_new_tokens: 4}}")
    with pytest.raises(InputError, match="max_new_tokens is 4, too short a text"):
        measure_ranks(["--config", str(config)])
    # One more: the last round has one place, its root the first token.
    row = summarise([np.asarray([[0] * (4 - i) + [9] * i for i in range(4)])], 1)
    assert row["within"] == [1.0] * 4


def test_the_command_writes_its_report(
    habitual_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = write_pair(tmp_path, habitual_target, imitating_drafter(habitual_target))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "gh"}\n')
    config = tmp_path / "ranks.yaml"
    config.write_text(
        f"{{target: {folders.target}, drafter: {folders.drafter}, prompts: {prompts}, "
        f"max_new_tokens: 9, draft_rounds: 2, widths: [1, {V}], report_dir: {tmp_path}}}"
    )
    measure_ranks(["--config", str(config)])
    first, last = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    assert first["within"][0] < 1
    # All tokens hold every choice: eight more tokens in calls of three.
    assert last["within"] == [1.0, 1.0]
    assert last["acceptance_length"] == pytest.approx(8 / 3)
    assert "round 1" in capsys.readouterr().out
