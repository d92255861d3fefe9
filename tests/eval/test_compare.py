"""`python -m eval compare`: every way of drafting against the baseline, per sampling."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pair_prompts import PROMPTS
from tiny_folders import encode

from eval.commands import evaluate
from redrafter_jax import DraftConfig, InputError, PromptLookup, SamplingConfig, generate
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

NEW_TOKENS = 16
HEAD = DraftConfig(beam_width=2, draft_rounds=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    values = {
        "target": pair_settings["target"],
        "prompts": pair_settings["prompts"],
        "drafters": {
            "lookup": {"draft": {"lookup_tokens": 3}},
            "head": {
                "drafter": pair_settings["drafter"],
                "draft": {"beam_width": 2, "draft_rounds": 2},
            },
        },
        "samplings": [{"temperature": 0.0}, {"temperature": 0.8}],
        "dtype": "float32",
        "max_new_tokens": NEW_TOKENS,
        "report_dir": str(folder),
    }
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_methods_count_what_generate_counts_and_keep_the_text(
    config: Path,
    habitual_target: Target,
    good_drafter: DraftModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluate(["compare", "--config", str(config)])
    shown = capsys.readouterr().out
    report = json.loads((config.parent / "compare.json").read_text())
    assert [case["described"] for case in report["samplings"]] == ["greedy", "T 0.8"]
    assert report["num_nodes"] == {"baseline": 1, "lookup": 4, "head": 5}
    for case in report["samplings"]:
        sampling = SamplingConfig(**case["sampling"])
        for name, drafter, draft in (
            ("baseline", None, None),
            ("lookup", PromptLookup(3), None),
            ("head", good_drafter, HEAD),
        ):
            expected = generate(
                habitual_target,
                drafter,
                [encode(text) for text in PROMPTS],
                max_new_tokens=NEW_TOKENS,
                draft=draft,
                sampling=sampling,
            )
            ours = case["methods"][name]
            assert ours["identical"] == 1.0
            assert ours["target_calls"] == sum(expected.steps)
            assert ours["accept_counts"] == expected.accept_counts.sum(axis=0).tolist()
    page = (config.parent / "compare.md").read_text()
    for line in page.splitlines():
        if line.startswith("| head"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert cells[0] == "head"
            assert cells[-1] == "5 of 5"
            assert all(cell in shown for cell in cells)
    assert page.count("| head") == 2
    assert (config.parent / "compare.png").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["drafters={lookup: {}}"], "without a drafter there is prompt lookup alone"),
        (
            ["drafters={lookup: {draft: {lookup_tokens: 4, beam_width: 2}}}"],
            "without a drafter there is prompt lookup alone",
        ),
        (["drafters={baseline: {draft: {lookup_tokens: 4}}}"], "'baseline' cannot name a way"),
        (["drafters={head: {drafter: /nowhere}}"], "/nowhere"),
        (["drafters.head.draft.beam_width=25"], "beam_width is 25, more than the 24 tokens"),
        (["drafters={}"], "drafters"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_weights_are_read(
    config: Path, overrides: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("eval.compare.load_target")
    with pytest.raises(InputError, match=sentence):
        evaluate(["compare", "--config", str(config), *overrides])
