"""Which replica a conversation belongs to."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Characters of a text's beginning: a shared page holds about as many.
_BEGINNING = 256


def conversation_key(body: bytes) -> str:
    """What all requests of one conversation have alike: its turns up to the first of the user.

    Of a text it is the beginning; a body of another kind has a key of its own.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    turns = asked.get("messages")
    if isinstance(turns, list):
        return _digest([asked.get("tools"), _opening(turns)])
    items = asked.get("input")
    if isinstance(items, str):  # as it is sent back with later turns
        items = [{"role": "user", "content": items}]
    if isinstance(items, list):
        return _digest([asked.get("tools"), asked.get("instructions"), _opening(items)])
    prompt = asked.get("prompt")
    return _digest(prompt[:_BEGINNING] if isinstance(prompt, str | list) else None)


def _opening(turns: Sequence[Any]) -> Sequence[Any]:
    of_user = [isinstance(turn, dict) and turn.get("role") == "user" for turn in turns]
    return turns[: of_user.index(True) + 1] if True in of_user else turns


def _digest(value: Any) -> str:
    stated = json.dumps(value, sort_keys=True)
    return hashlib.sha256(stated.encode()).hexdigest()


def ranked(key: str, loads: Mapping[str, int], slack: int) -> list[str]:
    """The replicas for a conversation, the one it belongs to first.

    Each conversation has an order of its own over all replicas (rendezvous hashing), which nobody
    needs to remember: when one is lost, its conversations alone go to others. Replicas with over
    `slack` requests more than the least loaded one come last.

    Args:
      key: the conversation's key.
      loads: by replica, the requests that it has.
      slack: requests.
    """
    least = min(loads.values(), default=0)

    def rank(replica: str) -> tuple[bool, bytes]:
        mixed = hashlib.sha256(f"{key} {replica}".encode()).digest()
        return loads[replica] > least + slack, mixed

    return sorted(loads, key=rank)
