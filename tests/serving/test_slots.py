"""Rows that come and go: what each request gets is what `generate` gives it."""

from collections.abc import Sequence

import jax
import pytest

from redrafter_jax import DraftConfig, PromptLookup, SamplingConfig, generate, make_mesh
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.serving.slots import Request, Slots

STOPS = (3,)
# Of many lengths and limits, one that ends at its first token included; more than there are rows.
REQUESTS = [
    Request(
        [(5 * number + i) % 24 for i in range(1 + 9 * (number % 4))],
        1 + 6 * (number % 5),
        number,
        SamplingConfig() if number % 3 == 0 else SamplingConfig(0.8, top_p=0.9),
    )
    for number in range(13)
]


def answers(slots: Slots, requests: Sequence[Request], steps: int = 5) -> dict[int, list[int]]:
    ended: list[tuple[int, list[int]]] = []
    for number, request in enumerate(requests):
        slots.submit(number, request)
        if number % 5 == 4:  # some come while others are decoded
            ended += slots.advance(steps)
    while slots.busy:
        ended += slots.advance(steps)
    assert len(ended) == len(dict(ended))
    return dict(ended)


def generated(target: Target, requests: Sequence[Request]) -> dict[int, list[int]]:
    result = generate(
        target,
        None,
        [request.prompt for request in requests],
        max_new_tokens=[request.max_new_tokens for request in requests],
        sampling=[request.sampling for request in requests],
        seeds=[request.seed for request in requests],
        eos_token_ids=STOPS,
    )
    return dict(enumerate(result.tokens))


@pytest.fixture(scope="module")
def expected(habitual_target: Target) -> dict[int, list[int]]:
    tokens = generated(habitual_target, REQUESTS)
    assert any(answer[-1] in STOPS for answer in tokens.values())
    return tokens


@pytest.mark.parametrize("kind", ["baseline", "head", "lookup"])
def test_every_request_gets_what_generate_gives_it(
    habitual_target: Target, good_drafter: DraftModel, expected: dict[int, list[int]], kind: str
) -> None:
    drafters: dict[str, Drafter] = {
        "baseline": bind_drafter(None),
        "head": bind_drafter(good_drafter, DraftConfig(beam_width=2, draft_rounds=2)),
        "lookup": PromptLookup(tokens=2),
    }
    slots = Slots(habitual_target, drafters[kind], 4, 64, STOPS)
    assert answers(slots, REQUESTS) == expected


@pytest.mark.parametrize(("data", "model"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_on_a_mesh_too(
    habitual_target: Target, expected: dict[int, list[int]], data: int, model: int
) -> None:
    target = place(habitual_target, make_mesh(data, model))
    assert answers(Slots(target, bind_drafter(None), 4, 64, STOPS), REQUESTS) == expected


def test_nothing_is_compiled_after_the_first_requests(
    habitual_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    slots = Slots(habitual_target, bind_drafter(None), 4, 64, STOPS)
    with jax.log_compiles():
        jax.jit(lambda x: 2 * x)(1)
        assert "Compiling" in caplog.text
        answers(slots, REQUESTS[:2])
        caplog.clear()
        answers(slots, REQUESTS)
    assert "Compiling" not in caplog.text


def test_what_a_row_has_no_room_for_is_refused(habitual_target: Target) -> None:
    slots = Slots(habitual_target, bind_drafter(None), 4, 64, STOPS)
    with pytest.raises(InputError, match=r"7 asks for 3 prompt and 62 new tokens, .* room for 64"):
        slots.submit(7, Request([0, 1, 2], 62, 0))
