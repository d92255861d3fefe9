"""`python -m eval sampling`: what sampling adds to a decode step of a given shape."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.__main__ import main
from eval.sampling_cost import measure_sampling
from redrafter_jax import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")

VALUES: dict[str, Any] = {
    "target": {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        # The prompt's 64 tokens and 11 steps of P = 3 are too many; what is timed takes 96 slots.
        "max_position_embeddings": 96,
        "tie_word_embeddings": True,
    },
    "drafter": {"exit_dim": 16},
    "dtype": "float32",
    "draft": {"beam_width": 2, "draft_rounds": 2},
    "samplings": [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5, "min_p": 0.1}],
    "steps": 2,
    "repeats": 2,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sampling.yaml"
    path.write_text(yaml.safe_dump(VALUES | {"report_dir": str(tmp_path / "report")}))
    return path


def test_every_sampling_is_timed_beside_greedy_decoding(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval", "sampling", "--config", str(config)])
    main()
    report = json.loads((config.parent / "report" / "sampling.json").read_text())
    rows = {row["sampling"]: row for row in report["rows"]}
    assert list(rows) == ["greedy", "T 1", "T 0.7, top_k 5, min_p 0.1"]
    assert rows["greedy"]["plain_share"] == rows["greedy"]["speculative_share"] == 0
    for row in rows.values():
        assert row["plain_milliseconds"] > 0
        assert row["speculative_milliseconds"] > 0
    assert report["noise_milliseconds"]["speculative"] > 0
    assert "noise of a plain step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("target.head_dim=7", "head_dim is 7; rotary embedding needs an even number"),
        ("target.width=3", "target.width: unknown key"),
        (
            "draft.beam_width=25",
            "beam_width is 25, more than the 24 tokens",
        ),
        ("steps=11", "the target has 96 positions"),
    ],
)
def test_bad_settings_are_one_sentence(config: Path, override: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        measure_sampling(["--config", str(config), override])
    assert sentence in str(refused.value)
