"""How well answers were drafted, beside their usage; and what of their prompts was cached."""

import json
import re
from typing import Any

import pytest
from fake_engine import FakeEngine
from places import ROOT
from servers import HTTP, body, post, serving, streamed

from redrafter_jax.engine.messages import Draft, Event, Token
from redrafter_jax.serving.speculation import Speculation

# Of the fake engine: every step has three nodes and accepts one, where it decides two tokens.
ROUTES = ("completions", "chat/completions")


def told_of(answer: dict[str, Any]) -> Any:
    return answer["metrics"]["speculative_decoding"]


def step(call: int, accepted: int, nodes: dict[str, int], by: str = "head") -> Event:
    """One call that verifies so many nodes and accepts so many tokens."""
    tokens = [Token(1, call, by)] * accepted + [Token(1, call, None)]
    return Event(0, tokens, None, [Draft(call, nodes)] if nodes else [])


def ask(base: str, route: str, **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "abcd"}
    if route != ROUTES[0]:  # a template ends the turn with a line feed
        prompt = {"messages": [{"role": "user", "content": "abc"}]}
    asked = {"model": "tiny", "max_tokens": 5, "seed": 0, **prompt, **more}
    answer = HTTP.post(f"{base}/v1/{route}", json=asked)
    if not more.get("stream"):
        return answer.json()
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(lines[-1])


def test_the_example_of_vllms_documentation() -> None:
    # docs/features/speculative_decoding/acceptance_metrics.md of vLLM 0.29.
    speculation = Speculation()
    for call, accepted in enumerate([0] * 39 + [1] + [3] * 3):
        speculation.add(step(call, accepted, {"head": 3}), call)
    speculation.add(step(43, 0, {}), 43)  # without a draft, it is no step of speculation
    assert speculation.body(3) == {
        "mean_acceptance_length": 1.2325581395348837,
        "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
        "by_drafter": {"head": {"num_accepted_draft_tokens": 10, "num_draft_tokens": 129}},
    }


def test_the_documentation_explains_every_field() -> None:
    section = (ROOT / "docs" / "serving.md").read_text().split("### How an answer was drafted\n")[1]
    told: Any = Speculation().body(3)
    assert set(re.findall(r"^\| `(\w+)` \|", section.split("\n### ")[0], re.MULTILINE)) == {*told}
    example = json.loads(section.split("```json\n")[1].split("```")[0])
    assert told_of(example).keys() == told.keys()


def test_calls_after_the_end_of_an_answer_are_not_counted() -> None:
    speculation = Speculation()
    steps = [step(0, 0, {}), step(1, 2, {"head": 4, "lookup": 1}), step(2, 1, {"head": 4})]
    decided = [token for one in steps for token in one.decided]
    drafted = [draft for one in steps for draft in one.drafted]
    speculation.add(Event(0, decided, None, drafted), 1)
    told: Any = speculation.body(4)
    assert told["acceptance_histogram"] == [0, 0, 1, 0, 0]
    assert (told["num_draft_tokens"], told["mean_acceptance_length"]) == (5, 3.0)
    assert told["by_drafter"]["lookup"] == {"num_accepted_draft_tokens": 0, "num_draft_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_they_are_told_beside_the_usage_where_they_are_asked_for(
    base: str, route: str, stream: bool
) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    asked = options | {"stream": stream}
    answer = ask(base, route, **asked, speculative_metrics=True)
    assert told_of(answer) == {
        "mean_acceptance_length": 1 + 2 / 3,  # ab, ca and, at the limit, b
        "draft_acceptance_rate": 2 / 9,
        "acceptance_histogram": [1, 2],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 9,
        "num_spec_tokens": 1,
        "by_drafter": {"lookup": {"num_accepted_draft_tokens": 2, "num_draft_tokens": 9}},
    }
    assert answer["usage"]["completion_tokens"] == 5
    assert all("metrics" not in choice for choice in answer["choices"])
    assert "metrics" not in ask(base, route, **asked), "nobody gets a field unasked"


def test_of_several_choices_each_has_its_own_and_the_answer_their_sum(base: str) -> None:
    asked = {"n": 2, "stop": "da", "speculative_metrics": True}
    answer = post(base, json=body("abcd", 8, **asked)).json()
    # "abcd" ends at "da" in the third step; "bcd" in the second one.
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "bc"]
    own = [told_of(choice) for choice in answer["choices"]]
    assert [one["acceptance_histogram"] for one in own] == [[0, 3], [0, 2]]
    assert told_of(answer)["acceptance_histogram"] == [0, 5]
    with streamed(
        base, prompt="abcd", limit=8, **asked | {"stream_options": {"include_usage": True}}
    ) as events:
        *chunks, usage, _ = events
    ends = {
        chunk["choices"][0]["index"]: told_of(chunk["choices"][0])
        for chunk in chunks
        if "metrics" in chunk["choices"][0]
    }
    assert ends == dict(enumerate(own))
    assert told_of(usage) == told_of(answer)


def test_a_stream_that_tells_no_usage_has_no_place_for_them(base: str) -> None:
    answer = post(base, json=body(stream=True, speculative_metrics=True))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "speculative_metrics"
    assert '{"include_usage": true}' in error["message"]


def test_where_nothing_can_be_drafted_there_is_nothing_to_tell() -> None:
    engine = FakeEngine()
    engine.longest_path = 1
    with serving(engine) as base:
        answer = post(base, json=body(speculative_metrics=True)).json()
    assert answer["metrics"] == {"speculative_decoding": None}


@pytest.mark.parametrize("route", ROUTES)
def test_usage_says_how_much_of_a_prompt_was_cached(base: str, route: str) -> None:
    for asked in ({}, {"n": 2}, {"stream": True, "stream_options": {"include_usage": True}}):
        usage = ask(base, route, **asked)["usage"]
        assert usage["prompt_tokens"] == 4
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_every_prompt_counts_its_cached_tokens_once(base: str) -> None:
    usage = post(base, json=body(limit=3, n=2) | {"prompt": ["abcdef", "abcd"]}).json()["usage"]
    assert usage["prompt_tokens"] == 10
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3 + 2}
