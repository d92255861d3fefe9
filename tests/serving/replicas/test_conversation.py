"""Conversations stay with one replica, and spread over all of them."""

import json
from typing import Any

import pytest

from redrafter_jax.serving.replicas.conversation import conversation_key, ranked

SYSTEM = {"role": "system", "content": "Be brief."}
NAMES = [f"replica{number}" for number in range(4)]


def key_of(**asked: Any) -> str:
    return conversation_key(json.dumps(asked).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_turns_of_one_conversation_have_one_key() -> None:
    first = key_of(messages=[SYSTEM, user("a")], seed=1)
    later = [SYSTEM, user("a"), {"role": "assistant", "content": "b"}, user("c")]
    assert key_of(messages=later, seed=2, model="x") == first
    assert key_of(messages=[SYSTEM, user("b")]) != first
    assert key_of(messages=[user("a")]) != first
    assert key_of(messages=[SYSTEM, user("a")], tools=[{"type": "function"}]) != first


def test_the_items_of_one_conversation_have_one_key() -> None:
    first = key_of(input="a", instructions="Be brief.")
    answer = {"type": "message", "role": "assistant", "content": [{"text": "b"}]}
    later = [user("a"), answer, user("c")]
    assert key_of(input=later, instructions="Be brief.", seed=2) == first
    assert key_of(input="b", instructions="Be brief.") != first
    assert key_of(input="a") != first


def test_a_text_has_the_key_of_its_beginning() -> None:
    begun = "x" * 300
    assert key_of(prompt=begun) == key_of(prompt=begun + "y")
    assert key_of(prompt="x") != key_of(prompt="y")
    assert key_of(prompt=[1, 2]) != key_of(prompt=[1, 3])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"messages": 7}', b'{"input": 7}', b"\xff", b"[" * 100_000]
)
def test_any_body_has_a_key(body: bytes) -> None:
    assert isinstance(conversation_key(body), str)


def test_a_lost_replica_moves_its_own_conversations_alone() -> None:
    idle = dict.fromkeys(NAMES, 0)
    keys = [str(number) for number in range(200)]
    before = {key: ranked(key, idle, 2)[0] for key in keys}
    counts = [list(before.values()).count(name) for name in NAMES]
    assert min(counts) > 30, "50 each but for chance"
    rest = {name: 0 for name in NAMES if name != before["0"]}
    moved = [key for key in keys if ranked(key, rest, 2)[0] != before[key]]
    assert moved == [key for key in keys if before[key] == before["0"]]


def test_a_replica_with_many_requests_more_than_another_comes_last() -> None:
    idle = dict.fromkeys(NAMES, 1)
    first, *rest = ranked("a", idle, 2)
    assert ranked("a", idle | {first: 3}, 2) == [first, *rest]
    assert ranked("a", idle | {first: 4}, 2) == [*rest, first]
    assert ranked("a", {}, 2) == []
