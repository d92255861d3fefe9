"""What drafters borrow of a target's vocabulary projection: gathered once, never in a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from redrafter_jax.drafters.one_of import OneOf
from small_batch import DRAFT, PROMPTS
from tiny_models import PARITY_CONFIG, imitating_drafter, random_target, tiny_config

from redrafter_jax import generate_autoregressive, make_mesh, stream
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.models import projection
from redrafter_jax.models.projection import Lender
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


def test_a_stream_gathers_before_its_first_step_alone(
    habitual_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = imitating_drafter(
        habitual_target, head="target", draft_tokens=tuple(range(1, PARITY_CONFIG.vocab_size))
    )
    gathered: list[Any] = []
    gather = projection._gather

    def count(*arguments: Any) -> Any:
        gathered.append(arguments)
        return gather(*arguments)

    monkeypatch.setattr(projection, "_gather", count)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_ids": ()}
    *_, last = stream(habitual_target, model, PROMPTS, tree=DRAFT, **options)
    assert len(gathered) == 1
    monkeypatch.undo()
    plain = generate_autoregressive(habitual_target, PROMPTS, **options)
    assert last.generation.tokens == plain.tokens
    assert max(last.generation.steps) < 19, "some drafts came true"


def test_trees_of_one_head_share_what_they_borrow(habitual_target: Target) -> None:
    model = imitating_drafter(
        habitual_target, head="target", draft_tokens=tuple(range(1, PARITY_CONFIG.vocab_size))
    )
    drafters = tuple(bind_drafter(model, DRAFT) for _ in range(2))
    ready = OneOf(drafters, 0).prepare(Lender(habitual_target)).drafters
    one, other = (jax.tree.leaves(vars(drafter)["borrowed"]) for drafter in ready)
    assert one
    assert [id(leaf) for leaf in one] == [id(leaf) for leaf in other]
