"""Large ragged batches in which every row samples its own way: both texts are the same.

`test_parity` tries many small batches; here one batch holds every temperature with every filter,
and its programs are compiled as users compile them.
"""

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from tiny_models import imitating_drafter

from redrafter_jax import SamplingConfig, TreeConfig, generate, generate_autoregressive
from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.engine import runner
from redrafter_jax.models.target import Target

TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 8, "top_p": 0.95, "min_p": 0.02},
)
SAMPLINGS = [
    SamplingConfig(temperature, **filters)
    for temperature, filters in product(TEMPERATURES, FILTERS)
]
ROWS = 2 * len(SAMPLINGS)
TREES = {
    "deep and sharp": TreeConfig(beam_width=3, draft_rounds=5, num_nodes=12, sharpness=2.5),
    "wide beam": TreeConfig(beam_width=16, draft_rounds=2, candidates=20),
    "prompt lookup": TreeConfig(beam_width=3, draft_rounds=2, num_nodes=8, lookup_tokens=3),
}


@pytest.fixture(autouse=True, scope="module")
def compiled_as_users_compile() -> Iterator[None]:
    """With all of LLVM's passes, of which conftest.py leaves most out."""
    options = {"xla_backend_optimization_level": "3"} if jax.default_backend() == "cpu" else None
    compiled = jax.jit(
        inspect.unwrap(runner.decode_rows),
        donate_argnames="state",
        static_argnames=("tree", "steps", "top"),
        compiler_options=options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "decode_rows", compiled)
        yield


@pytest.mark.parametrize(
    ("tree", "corruption"),
    [
        ("deep and sharp", 0.5),
        ("wide beam", 0.0),
        ("prompt lookup", 0.5),
    ],
)
@pytest.mark.long
def test_drafters_change_no_token_however_often_they_are_right(
    habitual_target: Target, tree: str, corruption: float
) -> None:
    random = np.random.default_rng([list(TREES).index(tree), int(2 * corruption)])
    arguments: dict[str, Any] = {
        "prompts": [random.integers(24, size=random.integers(1, 41)).tolist() for _ in range(ROWS)],
        "max_new_tokens": random.integers(1, 49, size=ROWS).tolist(),
        "sampling": SAMPLINGS * 2,
        "seeds": random.integers(2**31, size=ROWS).tolist(),
        "eos_token_ids": (),
    }
    drafter: LoadedHead = imitating_drafter(habitual_target, corruption)
    plain = generate_autoregressive(habitual_target, **arguments)
    ours = generate(habitual_target, drafter, tree=TREES[tree], **arguments)
    assert [len(tokens) for tokens in plain.tokens] == arguments["max_new_tokens"]
    assert ours.tokens == plain.tokens
    # Paths of every length: what was rejected along them must leave no trace either.
    assert (ours.accept_counts.sum(axis=0) > 0).all()
    # At no temperature is the equality that of texts without accepted drafts.
    for temperature in TEMPERATURES:
        rows = [row for row in range(ROWS) if arguments["sampling"][row].temperature == temperature]
        assert acceptance_length(ours.accept_counts[rows]) > 1.5 - corruption
