"""Target calls counted on recorded answers are those of decoding, exactly."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from pair_prompts import PROMPTS, asked_with
from tiny_folders import encode
from tiny_models import forgetful_target, imitating_drafter, imitating_medusa

from eval.config import RowSettings
from eval.recorded import count_calls, record
from redrafter_jax import DraftConfig, SamplingConfig, generate
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import DraftModel

# Every tree is compiled to decode, and every beam width to count.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]

NEW_TOKENS = 40
SAMPLINGS = [SamplingConfig(), SamplingConfig(1.0, top_p=0.95)]
TREES = [
    DraftConfig(beam_width=3, draft_rounds=3, num_nodes=6, sharpness=1.5),
    DraftConfig(beam_width=3, draft_rounds=1, sharpness=1.5),
    DraftConfig(beam_width=3, draft_rounds=2, num_nodes=5, sharpness=1.5),
    DraftConfig(beam_width=3, draft_rounds=3, num_nodes=8, sharpness=1.5, lookup_tokens=3),
]


@pytest.mark.parametrize(
    ("imitate", "more"),
    [
        (
            partial(imitating_drafter, context_layers=(0,)),
            [
                DraftConfig(beam_width=2, draft_rounds=rounds, final_beams_only=True)
                for rounds in (2, 3)
            ]
            + [
                # Fewer candidates than all nodes of such beams would need.
                DraftConfig(2, 5, num_nodes=4, rerank=True, candidates=8),
                DraftConfig(2, 2, num_nodes=9, rerank=True, candidates=8),
                DraftConfig(1, 3, num_nodes=8, lookup_tokens=3, rerank=True),
            ],
        ),
        (imitating_medusa, []),
    ],
)
def test_the_calls_of_every_tree_are_those_of_decoding(
    imitate: Callable[..., DraftModel], more: list[DraftConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of a batch: fewer than there are prompts, so that the last batch is filled up.
    monkeypatch.setattr("eval.recorded._ROWS", 3)
    target = forgetful_target(memory=0.15)
    drafter = imitate(target)
    layers = bind_drafter(drafter).context_layers
    rows = [encode(text) for text in PROMPTS]
    # A text may end at a stop token within a call's path.
    stop = encode("g")
    asked = asked_with(rows)._replace(stop_tokens=tuple(stop))
    settings = RowSettings(max_new_tokens=NEW_TOKENS, first_seed=5)
    recordings = [record(target, asked, sampling, settings, layers) for sampling in SAMPLINGS]
    for draft, counts in count_calls(target, drafter, TREES + more, recordings).items():
        for sampling, recording, counted in zip(SAMPLINGS, recordings, counts, strict=True):
            decoded = generate(
                target,
                drafter,
                rows,
                max_new_tokens=NEW_TOKENS,
                draft=draft,
                sampling=sampling,
                seeds=range(5, 5 + len(rows)),
                eos_token_ids=stop,
            )
            assert recording.answers == decoded.tokens
            np.testing.assert_array_equal(counted, decoded.accept_counts)
            assert decoded.acceptance_length > 1.2
            calls = [len(answer) - 1 for answer in recording.answers]
            assert recording.baseline_calls.tolist() == calls
