"""The endpoint before replicas that fail, which stand-ins do here; Ray Serve itself is not run."""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

import httpx
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from redrafter_jax.serving.replicas.deployment import Endpoint, GuardedFront
from redrafter_jax.serving.replicas.front import Front
from redrafter_jax.serving.request_counts import RequestCounts

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
START = {"type": "http.response.start", "status": 200, "headers": STREAM}


def part(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Answer:
    """What a replica sends, ending with an error if one is among it."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self.messages, self.cancelled = messages, False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in self.messages:
            if isinstance(message, Exception):
                raise message
            await asyncio.sleep(0)
            yield message

    def cancel(self) -> None:
        self.cancelled = True


class Replicas(DeploymentHandle):
    """Answers calls in turn, and keeps what they were given."""

    def __init__(self, *answers: Answer) -> None:
        self.left, self.calls = list(answers), []
        self.answer: Any = SimpleNamespace(remote=self.call)

    def options(self, **_: Any) -> "Replicas":
        return self

    def call(self, *given: Any) -> Answer:
        self.calls.append(given)
        return self.left.pop(0)


def front(*answers: Sequence[Any]) -> tuple[Front, list[Any]]:
    """The endpoint before replicas that answer so, and what their calls were given."""
    replicas = Replicas(*map(Answer, answers))
    return Front(replicas), replicas.calls


def ask(
    app: Any, body: Any = None, route: str = "/v1/completions", **headers: str
) -> httpx.Response:
    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers
        ) as one:
            return await one.post(route, json=body or {"prompt": "a"})

    return asyncio.run(asked())


def test_an_answer_is_handed_on_as_it_is() -> None:
    app, calls = front([START, part(b"data: 1\n\n"), part(b"", more=False)])
    answer = ask(app)
    assert (answer.status_code, answer.text) == (200, "data: 1\n\n")
    ((key, scope, body),) = calls
    assert (scope["path"], scope["method"]) == ("/v1/completions", "POST")
    assert json.loads(body) == {"prompt": "a"}
    assert len(key) == 64
    json.dumps(scope, default=lambda value: value.decode())  # nothing that cannot be sent


def test_a_stream_of_a_lost_replica_ends_with_one_error_event() -> None:
    app, calls = front([START, part(b"data: 1\n\n"), ActorDiedError()])
    answer = ask(app)
    first, last = answer.text.strip().split("\n\n")
    assert first == "data: 1"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(calls) == 1


@pytest.mark.parametrize("told", [[], [START]])
def test_a_request_of_which_nothing_was_told_goes_to_another_replica_once(told: list[Any]) -> None:
    whole = [START, part(b"data: 2\n\n"), part(b"", more=False)]
    app, calls = front([*told, ActorDiedError()], whole)
    assert ask(app).text == "data: 2\n\n"
    assert len(calls) == 2
    app, calls = front([*told, ActorDiedError()], [ActorDiedError()])
    answer = ask(app)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert answer.headers["retry-after"] == "1"


def test_where_too_many_wait_the_client_is_told_to_come_again() -> None:
    app, _ = front([BackPressureError(num_queued_requests=4, max_queued_requests=4)])
    answer = ask(app)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


class Counting(Replicas):
    """Replicas that answer, and one of which tells its metrics."""

    def broadcast(self, method: str) -> Any:
        assert method == "metrics"
        return self

    async def results_async(self) -> list[tuple[str, str]]:
        counts = RequestCounts()
        counts.count("/v1/completions", "finished")
        return [("a", counts.page().decode())]


def test_requests_that_no_replica_counts_are_counted() -> None:
    busy = BackPressureError(num_queued_requests=4, max_queued_requests=4)
    answers: list[list[Any]] = [
        [busy],
        [ActorDiedError()],
        [ActorDiedError()],  # lost again
        [START, part(b"data: 1\n\n"), ActorDiedError()],
        # The replica counts these two; the second is lost when it has sent everything.
        [START, part(b"data: 2\n\n"), part(b"", more=False)],
        [START, part(b"data: 3\n\n"), part(b"", more=False), ActorDiedError()],
    ]
    replicas = Counting(*map(Answer, answers))
    endpoint = Endpoint("localhost", 8000, "key")
    app = GuardedFront(replicas, endpoint, max_body=100).__serve_build_asgi_app__()
    key = {"authorization": "Bearer key"}
    statuses = [
        ask(app).status_code,
        ask(app, **key, host="example.com").status_code,
        ask(app, {"prompt": "a" * 100}, **key).status_code,
        ask(app, route="/v1/nothing").status_code,  # counted as little as by a replica
        *(ask(app, **key).status_code for _ in range(4)),
    ]
    assert statuses == [401, 403, 413, 401, 429, 503, 200, 200]
    assert ask(app, **key).text == "data: 3\n\n"
    assert not replicas.left
    page = ask(app, route="/metrics", **key).text
    assert {
        (sample.labels["replica"], sample.labels["outcome"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "redrafter_requests_total"
    } == {
        ("front", "refused"): 3,
        ("front", "queue_full"): 1,
        ("front", "failed"): 2,
        ("a", "finished"): 1,
    }


def test_metrics_that_a_lost_replica_cannot_tell_are_to_be_asked_for_again() -> None:
    class Lost(Replicas):
        def broadcast(self, method: str) -> Any:
            assert method == "metrics"
            return self

        async def results_async(self) -> Any:
            raise ActorDiedError

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(Front(Lost()))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as one:
            return await one.get("/metrics")

    answer = asyncio.run(asked())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert answer.headers["retry-after"] == "1"


def test_a_client_that_leaves_cancels_its_request() -> None:
    class Endless(Answer):
        async def __aiter__(self) -> AsyncIterator[Any]:
            yield START
            await asyncio.Event().wait()

    endless = Endless([])
    messages = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pytest.fail("nothing is told")

    scope = {"type": "http", "path": "/", "headers": []}
    asyncio.run(Front(Replicas(endless))(scope, receive, send))
    assert endless.cancelled
