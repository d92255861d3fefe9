"""A server's start, its log and its end."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from servers import (
    ENDLESS,
    HTTP,
    JSON,
    ROOMY,
    body,
    measured,
    outcomes,
    post,
    serving,
    streamed,
    text_of,
    wait_until,
)

from redrafter_jax.engine.messages import Request
from redrafter_jax.parallel.links import LostProcessError
from redrafter_jax.serving.worker import EngineFailedError, Worker


def test_nothing_is_answered_before_the_engine_is_warm() -> None:
    warm = threading.Event()
    seen: list[Any] = []

    def watch(base: str) -> None:
        seen.append(HTTP.get(f"{base}/health"))
        seen.append(post(base, json=body()))
        warm.set()

    with serving(FakeEngine(warm=warm), listening=watch) as base:
        assert HTTP.get(f"{base}/health").json() == {"status": "ready"}
        assert outcomes(base) == {"refused": 1}
    assert [answer.status_code for answer in seen] == [503, 503]
    assert seen[0].json() == {"status": "warming up"}
    assert seen[1].headers["retry-after"] == "1"


def test_the_queues_time_ends_where_the_prompt_is_admitted() -> None:
    with serving(FakeEngine(slots=1, seconds=0.5)) as base:
        post(base, json=body(limit=2))
        told = measured(base)
    assert told["redrafter_queue_seconds_count"] == 1
    assert told["redrafter_time_to_first_token_seconds_count"] == 1
    # The step that reads the prompt takes longer.
    assert told["redrafter_queue_seconds_sum"] < 0.4


def test_a_server_that_ends_while_it_compiles_waits_for_the_compiler() -> None:
    worker = Worker(FakeEngine(warm=threading.Event()))
    worker.start()
    asyncio.run(worker.close())
    assert worker.status == "closed"


def test_answers_that_run_or_wait_end_before_the_server_does() -> None:
    engine = FakeEngine(slots=2, seconds=0.02)
    engine.paused = True
    with ExitStack() as clients:
        with serving(engine, limits=replace(ROOMY, drain=60.0)) as base:
            streams = [clients.enter_context(streamed(base, limit=40)) for _ in range(3)]
            assert (engine.active, engine.waiting) == (2, 1)
            engine.paused = False
        # The end of the block has ended the server.
        assert [text_of(events) for events in streams] == ["hello" * 8] * 3


def test_answers_that_take_longer_than_the_drain_are_told_so() -> None:
    with ExitStack() as clients:
        limits = replace(ROOMY, drain=0.2)
        with serving(FakeEngine(slots=1, seconds=0.02), limits=limits) as base:
            streams = [clients.enter_context(streamed(base, limit=ENDLESS)) for _ in range(2)]
        codes = [list(events)[-1]["error"]["code"] for events in streams]
    assert codes == ["server_ends"] * 2, "one that ran, and one that waited"


@pytest.mark.long
def test_a_client_that_stalls_in_its_body_is_told_and_does_not_keep_the_server() -> None:
    with ExitStack() as clients:
        with serving(FakeEngine(), limits=replace(ROOMY, drain=1000.0)) as base:
            client = clients.enter_context(closing(HTTPConnection(base.removeprefix("http://"))))
            client.putrequest("POST", "/v1/completions")
            for name, value in JSON.items() | {("content-length", "100")}:
                client.putheader(name, value)
            client.endheaders(b'{"model"')
            HTTP.get(f"{base}/health")  # after the server has read as much
        # The end of the block has ended the server.
        answer = client.getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (503, "server_ends")


@pytest.mark.long
def test_a_reader_that_stalls_does_not_keep_the_server() -> None:
    with ExitStack() as clients:
        with serving(FakeEngine(), limits=replace(ROOMY, drain=3.0)) as base:
            asked = {"limit": ENDLESS, "draft_trace": True}
            events = clients.enter_context(streamed(base, **asked))
            next(events)
        # The end of the block has ended the server.
        with pytest.raises(httpx.TransportError):
            list(events)


@pytest.mark.long
def test_the_end_of_the_drain_is_told_after_a_step_that_takes_longer() -> None:
    answers = []
    with serving(FakeEngine(seconds=3.5), limits=replace(ROOMY, drain=0.2)) as base:
        asking = threading.Thread(
            target=lambda: answers.append(post(base, json=body(limit=ENDLESS)))
        )
        asking.start()
        wait_until(lambda: measured(base)["redrafter_active_slots"] == 1)
    asking.join()
    assert [answer.json()["error"]["code"] for answer in answers] == ["server_ends"]


def test_an_engine_that_fails_ends_every_request_and_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(slots=2, fails=10)
    engine.paused = True
    with serving(engine, limits=ROOMY) as base, ThreadPoolExecutor() as clients:
        waiting = [clients.submit(post, base, json=body(limit=ENDLESS)) for _ in range(3)]
        wait_until(lambda: engine.waiting == 1)
        engine.paused = False
        answers = [answer.result() for answer in waiting]
        # It ends by itself.
        wait_until(lambda: _refuses(base))
    assert [answer.status_code for answer in answers] == [503] * 3
    assert {answer.json()["error"]["code"] for answer in answers} == {"server_ends"}
    assert "the device is gone" in caplog.text


def _refuses(base: str) -> bool:
    try:
        HTTP.get(f"{base}/health")
    except httpx.TransportError:
        return True
    return False


def test_who_waits_for_an_engine_that_hangs_is_told_when_it_is_taken_for_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, ended = threading.Semaphore(0), list[str]()
    engine = FakeEngine(gate=gate)
    worker = Worker(engine, on_failure=lambda: ended.append("told"))

    async def ask() -> None:
        worker.start()
        while worker.status != "ready":
            await asyncio.sleep(0.01)
        asked = Request([1, 2], 8, 0)
        events = await worker.submit([asked])
        while not engine.told:  # it is in its first step from then on
            await asyncio.sleep(0.01)
        await asyncio.to_thread(worker.fail, LostProcessError("process 1"))
        assert isinstance(await events.get(), EngineFailedError)
        with pytest.raises(EngineFailedError):
            await worker.submit([asked])
        await asyncio.wait_for(worker.close(), timeout=10)
        gate.release()
        await asyncio.to_thread(worker._thread.join)
        assert events.empty(), "nothing follows the error"

    asyncio.run(ask())
    assert (worker.status, ended) == ("failed", ["told"])
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["The server ends: process 1 is gone; start all processes again."]


@pytest.mark.parametrize("log_prompts", [False, True])
def test_logs_tell_what_was_asked_only_if_they_shall(
    caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    caplog.set_level("INFO")
    with serving(FakeEngine(), log_prompts=log_prompts) as base:
        post(base, json=body("a secret"))
        post(base, json=body("a secret", tempo="a secret"))
    assert "finished, 8 prompt and 8 new tokens" in caplog.text
    assert ("a secret" in caplog.text) == log_prompts
