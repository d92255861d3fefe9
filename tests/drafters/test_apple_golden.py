"""Apple's own code on a tiny pair: its files load, and beams, trees, texts and calls are the same.

tests/goldens/README.md says what made them.
"""

import base64
import json
from typing import Any

import numpy as np
import pytest
from places import GOLDENS

from redrafter_jax import load_drafter, load_target
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.models.target import Target
from tools.apple.traces import Step, trace_ours

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = json.loads((GOLDENS / "apple.json").read_text())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, LoadedHead]:
    """Loaded from the files that PyTorch wrote."""
    folders = {}
    for name in ("target", "drafter"):
        folders[name] = tmp_path_factory.mktemp(name)
        content = base64.b64decode(GOLDEN[name]["pytorch_model.bin"])
        (folders[name] / "pytorch_model.bin").write_bytes(content)
        (folders[name] / "config.json").write_text(json.dumps(GOLDEN[name]["config"]))
    return load_target(folders["target"], "float32"), load_drafter(folders["drafter"], "float32")


def apples_paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Every packed node as the tokens from the root down to it."""
    paths: list[tuple[int, ...]] = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths)


def assert_same_step(ours: Step, apple: dict[str, Any]) -> None:
    assert ours.length == apple["length"]
    beams = ours.rounds[-1]
    assert list(beams) == [tuple(sequence) for sequence in apple["sequences"]]
    # No two neighbouring beams of the golden are nearer than 3e-4.
    np.testing.assert_allclose(list(beams.values()), apple["log_probs"], atol=2e-4, rtol=0)
    packed = apple["tree"]["tokens"]
    assert len(ours.paths) == len(packed)
    assert ours.paths == apples_paths(packed, apple["tree"]["parents"])


@pytest.mark.parametrize(
    ("beam_width", "draft_rounds"),
    [
        pytest.param(1, 3, marks=pytest.mark.long),
        pytest.param(16, 4, marks=pytest.mark.long),
        (45, 7),
    ],
)
def test_every_step_drafts_apples_beams_and_verifies_its_tree(
    pair: tuple[Target, LoadedHead], beam_width: int, draft_rounds: int
) -> None:
    cases = [
        case
        for case in GOLDEN["cases"]
        if (case["beam_width"], case["draft_rounds"]) == (beam_width, draft_rounds)
    ]
    assert len(cases) == 2
    for case in cases:
        trace = trace_ours(
            *pair,
            case["prompt"],
            beam_width=beam_width,
            draft_rounds=draft_rounds,
            max_new_tokens=case["max_new_tokens"],
        )
        assert trace.tokens == case["tokens"]
        assert trace.target_calls == case["target_calls"]
        for ours, apple in zip(trace.steps, case["steps"], strict=True):
            assert_same_step(ours, apple)
