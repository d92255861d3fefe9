"""What replay sees, and how a divergence is judged from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pair_prompts import asked_with
from tiny_models import tiny_config

from eval.benchmark import Method, decode_batch, make_batches
from eval.config import RowSettings
from eval.replay import Explanation, TokenIndex, TokenScores, explain, find_node, replay
from redrafter_jax import SamplingConfig, TreeConfig
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import make_mesh, place
from redrafter_jax.engine.requests import Batch, pad_requests
from redrafter_jax.sampling import filter_logits

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("sizes", [None, pytest.param((2, 2), marks=pytest.mark.long)])
def test_replay_sees_what_every_token_was_chosen_from(
    habitual_target: Target, good_drafter: LoadedHead, sizes: tuple[int, int] | None
) -> None:
    mesh = None if sizes is None else make_mesh(*sizes)
    target, drafter = place(habitual_target, mesh), place(good_drafter, mesh)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6], [8, 9]]
    sampling = SamplingConfig(temperature=0.9, top_k=6)
    rows = RowSettings(max_new_tokens=24, first_seed=4)
    (batch,) = make_batches(asked_with(prompts), 4, sampling, rows)
    tree = TreeConfig(beam_width=3, draft_rounds=3)
    places = [TokenIndex(row, position) for position in (23, 0, 5, 1) for row in range(4)]
    methods = [Method(target, bind_drafter(drafter, tree)), Method(target, RootOnly())]
    for method in methods if mesh is None else methods[:1]:
        tokens = decode_batch(method, batch).tokens
        seen = replay(method, batch, tokens, places)
        for (row, position), one in zip(places, seen, strict=True):
            assert one is not None
            assert one.scores.argmax() == tokens[row][position]
            assert np.isfinite(one.scores).sum() == 6


def test_a_text_is_followed_from_the_root_to_its_node() -> None:
    tokens, parents = np.asarray([7, 3, 5, 3, 4, -1]), np.asarray([0, 0, 0, 2, 1, 0])
    paths: list[tuple[list[int], int | None]] = [([], 0), ([3], 1), ([5, 3], 3), ([3, 4], 4)]
    for text, node in [*paths, ([4], None), ([7], None), ([3, 4, 4], None)]:
        assert find_node(tokens, parents, text) == node


def see(
    logits: list[float], noise: list[float], scores: list[float], sampling: SamplingConfig
) -> TokenScores:
    config = tiny_config(vocab_size=len(logits))
    requests, _ = pad_requests(config, Batch([[0]], 1, sampling, [0], ()), 1)
    arrays = [np.asarray(values, np.float32) for values in (logits, noise, scores)]
    return TokenScores(arrays[0], arrays[1], arrays[2], requests.sampling)


def judge(
    logits: list[float], other_logits: list[float], noise: list[float], sampling: SamplingConfig
) -> Explanation:
    """Of two passes that choose by the real filter."""
    passes = []
    for values in (logits, other_logits):
        rows = see(values, noise, values, sampling)
        kept = jax.jit(filter_logits)(jnp.asarray(values, jnp.float32)[None, None], rows.sampling)
        passes.append(rows._replace(scores=np.asarray(kept)[0, 0] + rows.noise))
    tokens = [int(one.scores.argmax()) for one in passes]
    assert tokens[0] != tokens[1]
    return explain(passes[0], passes[1], tokens[0], tokens[1], 1e-3)


@pytest.mark.parametrize(
    ("sampling", "edge"),
    [
        (SamplingConfig(temperature=1.0, top_k=2), [3.0, 2.0, 2.0, -9.0]),
        (SamplingConfig(temperature=1.0, min_p=float(np.exp(-1.0))), [3.0, 2.5, 2.0, -9.0]),
        # 0.5 and 0.3 reach 0.8: the third is on the edge.
        (
            SamplingConfig(temperature=1.0, top_p=0.8),
            [float(np.log(share)) for share in (0.5, 0.3, 0.15, 0.05)],
        ),
    ],
    ids=["top_k", "min_p", "top_p"],
)
def test_a_token_on_the_edge_of_a_filter_is_a_tie(
    sampling: SamplingConfig, edge: list[float]
) -> None:
    # Wherever the third token is kept, its noise makes it win.
    noise = [0.0, 0.0, 4.0, 0.0]

    def moved(by: float) -> list[float]:
        return [edge[0], edge[1], edge[2] + by, edge[3]]

    near = judge(moved(1e-4), moved(-1e-4), noise, sampling)
    assert (near.filtered, near.reproduced, near.tie) == (True, True, True)
    assert near.speculative_gap is None
    assert near.gap == pytest.approx(edge[2] + 4.0 - edge[0], abs=1e-3)
    far = judge(moved(0.2), moved(-0.2), noise, sampling)
    assert (far.filtered, far.reproduced, far.tie) == (True, True, False)


def test_gaps_of_cold_rows_are_measured_in_logits() -> None:
    cold = SamplingConfig(temperature=0.01)
    explanation = judge([1.0, 0.9996], [0.9996, 1.0], [0.0, 0.0], cold)
    assert explanation.gap == pytest.approx(0.04, rel=0.01)
    assert explanation.tie


def test_a_choice_that_the_scores_do_not_bear_out_is_no_tie() -> None:
    one = see([2.0, 1.0], [0.0, 0.0], [2.0, 1.0], SamplingConfig())
    unlike = explain(one, one, 0, 1, 1e-3)
    assert (unlike.gap, unlike.speculative_gap) == (1.0, -1.0)
    no_path_of_the_tree = explain(one, None, 0, 1, 1e-3)
    for explanation in (unlike, no_path_of_the_tree):
        assert (explanation.reproduced, explanation.tie) == (False, False)
