"""Two replicas by real Ray on this machine, one of which is killed under load."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from engine_runs import ROOM, decoded_alone
from ray_processes import engines_of, served_by_replicas
from servers import HTTP, is_ready, measured, wait_until
from tiny_folders import PairFolders, add_template, decode

from redrafter_jax.models.target import Target

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]

CLIENTS, CONVERSATIONS, LIMIT = 32, 150, 20
SIZES = ["--context-length", str(ROOM), "--slots", "2", "--steps-per-call", "2", "--drain", "60"]
TREE = ["--beam-width", "2", "--draft-rounds", "2"]
REPLICAS = ["--replicas", "2", "--replica-cpus", "0.4"]
# A page holds 64 tokens; here one for each character.
LONG = 70


class Told(NamedTuple):
    """What a client was told: the text, whether it is whole, and the prompt's cached tokens."""

    text: str
    errors: list[str]
    cached: int


class Turn(NamedTuple):
    """One request: all turns so far, its seed, and what it was told."""

    turns: list[str]
    seed: int
    told: Told


def ask(base: str, turns: list[str], seed: int, limit: int) -> Told:
    """The streamed answer to a conversation whose last turn is the user's."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    body = {"model": "tiny", "messages": messages, "seed": seed, "max_tokens": limit}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with HTTP.stream("POST", f"{base}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            return Told("", [json.loads(answer.read())["error"]["code"]], 0)
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    bodies = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [one["error"]["code"] for one in bodies if "error" in one]
    assert (events[-1] == "[DONE]") == (not errors), "an error is the last event"
    chunks = [one for one in bodies if "error" not in one]
    text = "".join(
        choice["delta"].get("content") or "" for one in chunks for choice in one["choices"]
    )
    usage = chunks[-1].get("usage") or {"prompt_tokens_details": {"cached_tokens": 0}}
    return Told(text, errors, usage["prompt_tokens_details"]["cached_tokens"])


def turn_of(number: int, count: int) -> str:
    return decode([(7 * number + i) % 23 for i in range(count)])


def test_a_replica_that_is_killed_ends_its_streams_alone_and_comes_back(
    folders: PairFolders, habitual_target: Target, tmp_path: Path
) -> None:
    target = add_template(Path(folders.target), tmp_path)
    models = ["--target", target, "--drafter", folders.drafter, "--name", "tiny"]
    answered = threading.Semaphore(0)

    def talk(base: str, number: int) -> list[Turn]:
        """A conversation: every third has a second turn."""
        goes_on = number % 3 == 0
        turns = [turn_of(number, LONG if goes_on else 1 + number % 40)]
        first = Turn(turns, number, ask(base, turns, number, LIMIT))
        answered.release()
        if not goes_on or first.told.errors:
            return [first]
        more = [*turns, first.told.text, turn_of(number + 1, 5)]
        second = Turn(more, number, ask(base, more, number, LIMIT))
        answered.release()
        return [first, second]

    with served_by_replicas(*models, *SIZES, *TREE, *REPLICAS) as (base, process):
        before = engines_of(process)
        assert len(before) == 2
        lost = min(before)
        with ThreadPoolExecutor(CLIENTS) as clients:
            talking = [clients.submit(talk, base, number) for number in range(CONVERSATIONS)]
            for _ in range(CONVERSATIONS // 2):
                answered.acquire()
            os.kill(lost, signal.SIGKILL)
            asked = [turn for talk in talking for turn in talk.result()]
        wait_until(lambda: len(engines_of(process) - before) == 1)
        wait_until(lambda: len(replicas_told(base)) == 2)
        assert is_ready(base)
    whole = [turn for turn in asked if not turn.told.errors]
    assert len(asked) > 1.2 * CONVERSATIONS
    for turn in asked:
        assert turn.told.errors in ([], ["replica_lost"])
    assert len(asked) - len(whole) <= CLIENTS, "those alone that the lost replica was answering"
    for turn in whole:
        prompt = "".join(f"{text}\n" for text in turn.turns)
        tokens, _ = decoded_alone(habitual_target, prompt, LIMIT, turn.seed)
        assert turn.told.text == decode(tokens)
    later = [turn for turn in whole if len(turn.turns) > 1]
    # Those whose replica was killed between their turns were read anew.
    assert len([turn for turn in later if turn.told.cached]) >= len(later) - CLIENTS
    assert len(later) > CLIENTS


def replicas_told(base: str) -> set[str]:
    """The replicas of which the metrics tell."""
    return {name for name in measured(base) if name.startswith("redrafter_active_slots{")}
