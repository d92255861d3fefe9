"""By real Ray on this machine: more replicas while requests wait."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from engine_runs import ROOM, decoded_alone
from ray_processes import engines_of, served_by_replicas
from servers import HTTP, measured, wait_until
from tiny_folders import PairFolders, decode

from redrafter_jax.models.target import Target

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]

SIZES = ["--context-length", str(ROOM), "--slots", "2", "--drain", "60", "--replica-cpus", "0.4"]
TREE = ["--beam-width", "2", "--draft-rounds", "2"]
LIMIT = 20


def models_of(folders: PairFolders) -> list[str]:
    return ["--target", folders.target, "--drafter", folders.drafter, "--name", "tiny"]


def prompt_of(number: int) -> str:
    return decode([(7 * number + at) % 23 for at in range(1 + number % 40)])


def ask(base: str, number: int) -> tuple[int, str]:
    """The status and the text of an answer that is not streamed."""
    body = {"prompt": prompt_of(number), "seed": number, "temperature": 1, "max_tokens": LIMIT}
    answer = HTTP.post(f"{base}/v1/completions", json=body | {"model": "tiny"})
    told = answer.json()
    return answer.status_code, told["choices"][0]["text"] if "choices" in told else str(told)


class Clients:
    """Eight clients that ask one question after the other until they are told to stop."""

    def __init__(self, base: str) -> None:
        self._pool, self._base = ThreadPoolExecutor(8), base
        self._stopped = False
        self._talks: list[Future[Any]] = [self._pool.submit(self._talk, at) for at in range(8)]

    def _talk(self, first: int) -> dict[int, tuple[int, str]]:
        told: dict[int, tuple[int, str]] = {}
        number = first
        while not self._stopped:
            told[number] = ask(self._base, number)
            number += 8
        return told

    def stop(self) -> dict[int, tuple[int, str]]:
        """What each question was answered."""
        self._stopped = True
        told = [talk.result() for talk in self._talks]
        self._pool.shutdown()
        return {number: answer for one in told for number, answer in one.items()}


def assert_all_answered(told: dict[int, tuple[int, str]], target: Target) -> None:
    assert len(told) > 8
    assert {status for status, _ in told.values()} == {200}
    for number in sorted(told)[:: 1 + len(told) // 20]:
        tokens, _ = decoded_alone(target, prompt_of(number), LIMIT, number)
        assert told[number][1] == decode(tokens)


def replicas_with_answers(base: str) -> set[str]:
    """The replicas that count tokens of answers."""
    name = "redrafter_completion_tokens_total{"
    return {told for told, value in measured(base).items() if told.startswith(name) and value > 0}


def test_a_replica_is_added_while_requests_wait(
    folders: PairFolders, habitual_target: Target
) -> None:
    options = [*models_of(folders), *SIZES, *TREE, "--replicas", "1", "--max-replicas", "2"]
    with served_by_replicas(*options) as (base, process):
        assert len(engines_of(process)) == 1
        clients = Clients(base)
        try:
            wait_until(lambda: len(engines_of(process)) == 2)
            wait_until(lambda: len(replicas_with_answers(base)) == 2)
        finally:
            told = clients.stop()
        assert_all_answered(told, habitual_target)
