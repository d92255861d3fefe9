"""Drafters against the contract: whatever they propose, no text changes."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float
from small_batch import MIXED, PROMPTS

from redrafter_jax import (
    InputError,
    PromptLookup,
    TreeConfig,
    generate,
    generate_autoregressive,
)
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.combined import Combined
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.drafters.recurrent import RecurrentDrafter
from redrafter_jax.drafters.tree import chain_tree
from redrafter_jax.generation import start
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.requests import Batch
from redrafter_jax.types import DecodeState, StepTrace, TokenTree, Verified

pytestmark = pytest.mark.usefixtures("quick_compilation")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RepeatLast(Drafter):
    """Drafts the last token over and over; its own state counts the target calls of each row."""

    tokens: int = field(metadata={"static": True})

    @property
    def max_path(self) -> int:
        return self.tokens + 1

    @property
    def names(self) -> tuple[str, ...]:
        return ("repeat",)

    def init(self, hidden: Float[Array, "B Z"]) -> Array:
        return jnp.zeros(len(hidden), jnp.int32)

    def propose(self, decoder: Decoder, state: DecodeState, noise: Array) -> TokenTree:
        del decoder, noise
        drafted = jnp.repeat(state.root[:, None], self.tokens, axis=1)
        return chain_tree(state.root, drafted, jnp.ones(len(state.root), bool))

    def observe(self, drafter_state: Array, verified: Verified, trace: StepTrace) -> Array:
        return drafter_state + (trace.gained > 0)


class Undecorated(RepeatLast):
    """Lacks `register_dataclass`."""


@pytest.fixture(scope="module")
def expected(habitual_target: Target) -> list[list[int]]:
    return generate_autoregressive(
        habitual_target, PROMPTS, max_new_tokens=20, sampling=MIXED
    ).tokens


@pytest.mark.parametrize(
    ("drafter", "names"),
    [
        (RepeatLast(3), ["repeat"]),
        (PromptLookup(tokens=3), ["lookup"]),
        pytest.param(
            Combined(RepeatLast(2), PromptLookup(4), nodes=3),
            ["repeat", "lookup"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            Combined(PromptLookup(4), RepeatLast(2), nodes=2),
            ["lookup", "repeat"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["toy", "lookup", "toy and lookup", "lookup and toy"],
)
def test_texts_are_the_targets_own(
    habitual_target: Target, expected: list[list[int]], drafter: Drafter, names: list[str]
) -> None:
    run = partial(generate, habitual_target, drafter, PROMPTS, sampling=MIXED)
    result = run(max_new_tokens=20)
    assert result.tokens == expected
    assert list(result.accepted_by) == names
    accepted = [sum(by_row) for by_row in zip(*result.accepted_by.values(), strict=True)]
    # A call gains what it accepts and the bonus, unless the row ends before the bonus.
    for row, steps in enumerate(result.steps):
        assert 0 <= len(expected[row]) - 1 - steps - accepted[row] + 1 <= 1
    assert "lookup" not in names or sum(accepted) > 0, "some drafts came true"


def test_a_call_gains_what_the_toy_guesses(
    habitual_target: Target, expected: list[list[int]]
) -> None:
    result = generate(habitual_target, RepeatLast(3), PROMPTS, max_new_tokens=20, sampling=MIXED)
    for row, text in enumerate(expected):
        steps, decided = 0, 1
        while decided < len(text):
            right = 0
            while right < 3 and text[decided + right : decided + right + 1] == [text[decided - 1]]:
                right += 1
            steps, decided = steps + 1, decided + right + 1
        assert result.steps[row] == steps


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("drafter", "draft", "sentence"),
    [
        (PromptLookup(), TreeConfig(), r"^tree is .*PromptLookup\(tokens=8\) takes none; leave"),
        (PromptLookup(512), None, r"trees are 512 tokens deep, but the target has 512 positions"),
        (
            Combined(RepeatLast(2), PromptLookup(2), 0),
            None,
            r"^Combined\.nodes is 0; it must be greater than 0\.$",
        ),
        ("lookup", None, r"^drafter is 'lookup'; give what load_drafter returns, a Drafter"),
        (Undecorated(2), None, r"^Undecorated is not a pytree; decorate the class with"),
    ],
)
def test_what_does_not_fit_is_refused(
    habitual_target: Target, drafter: Any, draft: TreeConfig | None, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        generate(habitual_target, drafter, PROMPTS, max_new_tokens=2, tree=draft)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_head_that_is_not_bound_is_refused(target: Target, drafter: LoadedHead) -> None:
    head: Any = drafter
    for unbound, sentence in (
        (Combined(head, PromptLookup(2), 2), r" is not a Drafter; pass a loaded head"),
        (
            RecurrentDrafter(head, TreeConfig(2, 2, lookup_tokens=3)),
            r"^TreeConfig\.lookup_tokens is 3, but .* bind_drafter",
        ),
    ):
        with pytest.raises(InputError, match=sentence):
            generate(target, unbound, PROMPTS, max_new_tokens=2)


def test_a_state_of_another_drafter_is_refused(habitual_target: Target) -> None:
    state, _ = start(habitual_target, PromptLookup(3), Batch(PROMPTS, 20, eos_token_ids=()))
    with pytest.raises(InputError, match=r"for paths of 4 nodes, but the drafter's have 6; start"):
        decode(habitual_target, PromptLookup(5), state, 1)
