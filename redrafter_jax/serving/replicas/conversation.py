"""Assigns conversations to replicas."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Number of first characters of a text that its key depends on; a shared cache page holds about this
# many.
_BEGINNING = 256


def conversation_key(body: bytes) -> str:
    """Return a key that all requests of a conversation share.

    The key is a digest of the tools and of the messages up to the first user turn, or of the
    beginning of a prompt. A body with neither gets a fixed key.

    Args:
      body: the body of the request, as JSON.
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
    if isinstance(items, str):  # later requests send the text back as an item
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
    """Return the replicas in a conversation's order of preference.

    Each key has its own order over all replicas (rendezvous hashing). So nothing is stored, and
    only the conversations of a lost replica move. A replica comes last if its number of requests
    exceeds the lowest number by more than `slack`.

    Args:
      key: the conversation's key.
      loads: number of unfinished requests by replica.
      slack: allowed difference in the number of requests.
    """
    least = min(loads.values(), default=0)

    def rank(replica: str) -> tuple[bool, bytes]:
        mixed = hashlib.sha256(f"{key} {replica}".encode()).digest()
        return loads[replica] > least + slack, mixed

    return sorted(loads, key=rank)
