"""The pair of `make demo-tiny`: a drafter trained on real text, and identical texts."""

import json
from typing import Any

import pytest
from places import CONFIGS
from rich.console import Console

from redrafter_jax import (
    DraftConfig,
    SamplingConfig,
    generate,
    generate_autoregressive,
    load_drafter,
    load_target,
)
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.models.target import Target
from redrafter_jax.settings.files import load_settings
from redrafter_jax.text.tokenizer import load_tokenizer
from train.config import TrainSettings
from train.loop import train

pytestmark = pytest.mark.long
TARGET = CONFIGS / "demo_target"
LIMITS = [64, 48, 32, 25]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGET, "float32")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
    """The demo's own settings, but seconds of training: enough for some drafts to be right."""
    output = tmp_path_factory.mktemp("demo")
    overrides = [
        f"target={TARGET}",
        f"output_dir={output}",
        "steps=30",
        "acceptance=null",
        "data.sources=[{folder: 'python:stdlib', include: ['asyncio/*.py'], weight: 0.2}, "
        f"{{files: ['{CONFIGS / 'demo_regenerated.jsonl'}'], weight: 0.8}}]",
        "optimizer.batch_size=4",
        "data.sequence_length=64",
    ]
    settings = load_settings(TrainSettings, CONFIGS / "demo.yaml", overrides)
    exported = train(settings, Console(quiet=True)).exported
    assert exported is not None
    return load_drafter(exported, "float32")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rows = [json.loads(line) for line in (CONFIGS / "demo_prompts.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(TARGET)
    lengths = (64, 17, 3, 40)
    chosen = zip(rows[:: len(rows) // 4], lengths, strict=False)
    return [tokenizer.encode(row["prompt"]).ids[:length] for row, length in chosen]


def test_speculative_text_is_plain_text(
    target: Target, drafter: DraftModel, prompts: list[list[int]]
) -> None:
    """Every row of the batch chooses its tokens in a way of its own."""
    asked: dict[str, Any] = {
        "max_new_tokens": LIMITS,
        "sampling": [
            SamplingConfig(),
            SamplingConfig(temperature=0.7, top_p=0.9),
            SamplingConfig(temperature=1.0),
            SamplingConfig(temperature=1.3, top_k=40, min_p=0.02),
        ],
        "eos_token_ids": (),
    }
    plain = generate_autoregressive(target, prompts, **asked)
    assert [len(row) for row in plain.tokens] == LIMITS
    draft = DraftConfig(8, 5, num_nodes=12, final_beams_only=True, sharpness=2.0)
    ours = generate(target, drafter, prompts, draft=draft, **asked)
    assert ours.tokens == plain.tokens
    # The drafts must be right often enough for this to be a test of acceptance.
    assert ours.acceptance_length > 1.2
