"""Apple's own code on a tiny pair: its files load, and beams, trees, texts and calls are the same.

tests/goldens/README.md says what made them.
"""

import base64
import json
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from engine_runs import read_batch
from places import GOLDENS

from redrafter_jax import TreeConfig, load_drafter, load_target
from redrafter_jax.decoding.step import decode_step
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.drafters.recurrent import RecurrentDrafter
from redrafter_jax.engine.requests import Batch
from redrafter_jax.models.target import Target
from redrafter_jax.types import TokenTree

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


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Every node as the tokens from the root down to it; parents come before their children."""
    paths: list[tuple[int, ...]] = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def scored_paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The paths of row 0's nodes in their order, without padding, with their log-probabilities."""
    tokens, parents, scores = (
        np.asarray(values)[0].tolist() for values in (tree.tokens, tree.parents, tree.log_probs)
    )
    nodes = zip(paths_of(tokens, parents), scores, strict=True)
    return {path: score for path, score in nodes if score > -np.inf}


def assert_same_step(tree: TokenTree, apple: dict[str, Any], draft_rounds: int) -> None:
    ours = scored_paths(tree)
    # The last round's nodes are the final beams, best first.
    beams = {path[1:]: score for path, score in ours.items() if len(path) == 1 + draft_rounds}
    assert list(beams) == [tuple(sequence) for sequence in apple["sequences"]]
    # No two neighbouring beams of the golden are nearer than 3e-4.
    np.testing.assert_allclose(list(beams.values()), apple["log_probs"], atol=2e-4, rtol=0)
    packed = paths_of(apple["tree"]["tokens"], apple["tree"]["parents"])
    assert len(ours) == len(packed)
    assert ours.keys() == set(packed)


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
    target, head = pair
    # Apple's `warp_logits` keeps a beam's 50 best scores, and there are only 48 tokens.
    tree = TreeConfig(beam_width, draft_rounds, final_beams_only=True, candidates=48)
    drafter, step_once = RecurrentDrafter(head), jax.jit(partial(decode_step, tree=tree))
    for case in cases:
        batch = Batch([case["prompt"]], case["max_new_tokens"], eos_token_ids=())
        state = read_batch(target, drafter, batch, tree)
        for step in case["steps"]:
            assert int(state.cache.lengths[0]) + 1 == step["length"]
            state, trace = step_once(target, drafter, state)
            assert_same_step(trace.tree, step, draft_rounds)
        assert bool(state.done[0])
        begin = len(case["prompt"])
        text = state.tokens[0, begin : begin + case["max_new_tokens"]]
        assert text.tolist() == case["tokens"]
        assert len(case["steps"]) == case["target_calls"]
