"""Assigns conversations to replicas."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Number of a text's first characters in its key: about as many as a shared cache page holds.
_BEGINNING = 256


def conversation_key(body: bytes) -> str:
    """A key that all requests of one conversation share: a digest up to its first user turn.

    For a prompt, the key is a digest of its beginning; other bodies have fixed keys.
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
    """The replicas in a conversation's order of preference.

    Each key has its own order over all replicas (rendezvous hashing), so nothing is stored, and
    when a replica is lost, only its conversations move. Replicas with over `slack` requests more
    than the least loaded replica come last.

    Args:
      key: the conversation's key.
      loads: number of requests by replica.
      slack: allowed difference in the number of requests.
    """
    least = min(loads.values(), default=0)

    def rank(replica: str) -> tuple[bool, bytes]:
        mixed = hashlib.sha256(f"{key} {replica}".encode()).digest()
        return loads[replica] > least + slack, mixed

    return sorted(loads, key=rank)
