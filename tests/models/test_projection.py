"""What drafters borrow of a target's vocabulary projection: gathered once, never in a step."""

import gc
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from small_batch import DRAFT, PROMPTS
from tiny_models import PARITY_CONFIG, imitating_drafter, random_target, tiny_config

from redrafter_jax import (
    SamplingConfig,
    TreeConfig,
    generate_autoregressive,
    make_mesh,
    stream,
)
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.files.tree_table import TreeTable, TunedTree
from redrafter_jax.models import projection
from redrafter_jax.models.projection import Lender, lender_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place

TOKENS = (20, 3, 7)
ALL_BUT_ONE = tuple(range(1, PARITY_CONFIG.vocab_size))


@pytest.mark.parametrize("tied", [False, True])
def test_a_part_is_gathered_once_whoever_asks(tied: bool) -> None:
    target = random_target(tiny_config(tie_word_embeddings=tied))
    lender = Lender(target)
    part = lender.projection(TOKENS)
    assert part is not None
    assert lender.projection(TOKENS) is part
    hidden = np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)
    decoder = target.merge()
    head = decoder.embed_tokens[...].T if tied else decoder.lm_head[...]
    expected = hidden @ np.asarray(head)[:, list(TOKENS)]
    np.testing.assert_allclose(part.merge()(jnp.asarray(hidden)), expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_gathered_where_each_device_holds_a_part() -> None:
    mesh = make_mesh(model=2)
    assert Lender(place(random_target(), mesh)).projection(TOKENS) is None
    # A vocabulary that the mesh does not divide is whole on every device.
    odd = random_target(tiny_config(vocab_size=31))
    assert Lender(place(odd, mesh)).projection(TOKENS) is not None


def test_what_was_gathered_is_kept_as_long_as_the_target_is_in_use() -> None:
    target = random_target()
    part = lender_of(target).projection(TOKENS)
    assert lender_of(target).projection(TOKENS) is part
    assert lender_of(replace(target)).projection(TOKENS) is not part
    kept = len(projection._lent)
    del target
    gc.collect()
    assert len(projection._lent) < kept


@pytest.fixture
def fresh_target(habitual_target: Target) -> Target:
    """The target as another caller loads it: nobody has borrowed of it."""
    return replace(habitual_target)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is gathered from now on."""
    calls: list[Any] = []
    gather = projection._gather

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return gather(*arguments)

    monkeypatch.setattr(projection, "_gather", count)
    return calls


@pytest.mark.long
def test_a_stream_gathers_before_its_first_step_alone(
    fresh_target: Target, gathered: list[Any]
) -> None:
    head = imitating_drafter(fresh_target, head="target", draft_tokens=ALL_BUT_ONE)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_ids": ()}
    *_, last = stream(fresh_target, head, PROMPTS, tree=DRAFT, **options)
    assert len(gathered) == 1
    plain = generate_autoregressive(fresh_target, PROMPTS, **options)
    assert last.generation.tokens == plain.tokens
    assert max(last.generation.steps) < 19, "some drafts came true"


@pytest.mark.long
def test_trees_of_one_head_share_what_they_borrow(
    fresh_target: Target, gathered: list[Any]
) -> None:
    head = imitating_drafter(fresh_target, head="target", draft_tokens=ALL_BUT_ONE)
    trees = (TunedTree(1, 0.0, DRAFT, 1.5, 1.5), TunedTree(1, 1.0, TreeConfig(2, 2), 1.5, 1.5))
    engine = Engine(
        fresh_target,
        head,
        tree=TreeTable("here", "float32", trees),
        slots=1,
        context_length=40,
    )
    for temperature in (0.0, 1.0):
        engine.submit(Request([3, 1, 4], 9, 0, SamplingConfig(temperature)))
        while engine.busy:
            engine.advance()
    assert {tree for _, tree, *_ in engine._runner.ran} >= {DRAFT, TreeConfig(2, 2)}
    assert len(gathered) == 1
