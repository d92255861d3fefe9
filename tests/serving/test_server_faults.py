"""Clients that leave, stall or send nonsense, engines that fail: one clear error, and no leak."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from servers import LIMITS, serving, wait_until
from tiny_folders import byte_tokenizer
from tokenizers import Tokenizer

JSON = {"content-type": "application/json"}
ROOMY = LIMITS._replace(context_length=100_000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer) -> Iterator[str]:
    with serving(FakeEngine(slots=4, queue_limit=16), tokenizer) as base:
        yield base


# Making one takes longer than an answer.
HTTP = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))


def body(prompt: str = "hello", limit: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": limit, "seed": 0, **more}


def post(base: str, **options: Any) -> httpx.Response:
    return HTTP.post(f"{base}/v1/completions", **options)


def events(stream: httpx.Response) -> Iterator[Any]:
    for line in stream.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def outcomes(base: str) -> dict[str, float]:
    """How many requests for completions ended so."""
    lines = HTTP.get(f"{base}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("redrafter_requests_total")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b'{"model":', 400, "no JSON: Expecting value at character 9"),
        (b"\xff\xfe", 400, "no JSON"),
        (b"[" * 5000, 400, "cannot be read"),
        (b"[]", 400, "Send a JSON object"),
        (b"", 400, "Send a JSON object"),
        (b'{"model": "tiny"}', 400, "prompt is missing"),
        (b'{"model": "tiny", "prompt": "a", "tools": [1]}', 400, "tools is not supported"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', 400, "Send a JSON object"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "a lone surrogate"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "it must be finite"),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": "9"}', 400, "valid integer"),
        (b'{"model": "tiny", "prompt": [-1]}', 400, "none empty"),
        (b'{"model": "tiny", "prompt": {"file": "/etc/passwd"}}', 400, "give a text"),
        (b"x" * 10_000_000, 413, "larger than 10000 bytes"),
    ],
)
def test_a_body_that_cannot_be_read_is_one_sentence(
    base: str, content: bytes, status: int, words: str
) -> None:
    answer = post(base, content=content, headers=JSON)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_body_without_a_length_ends_at_the_limit(base: str) -> None:
    answer = post(base, content=iter([b"x" * 1000] * 50), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_what_asks_for_nothing_is_taken(base: str) -> None:
    nothing: dict[str, Any] = {
        "presence_penalty": 0,
        "logit_bias": {},
        "user": None,
        "best_of": 1,
        "stop": None,
    }
    assert post(base, json=body(**nothing)).json()["choices"][0]["text"] == "hellohel"


def test_a_form_of_another_site_is_not_read(base: str) -> None:
    plain = {"content-type": "text/plain"}
    answer = post(base, content=json.dumps(body()), headers=plain)
    assert (answer.status_code, "application/json" in answer.text) == (400, True)
    answer = HTTP.get(f"{base}/health", headers={"host": "rebound.example:8000"})
    assert (answer.status_code, "'rebound.example'" in answer.text) == (403, True)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]", "[::1]:8000"]
)
def test_every_name_of_this_machine_is_answered(base: str, host: str) -> None:
    assert HTTP.get(f"{base}/health", headers={"host": host}).status_code == 200


def test_unknown_routes_and_methods_are_told(base: str) -> None:
    assert "is no route" in HTTP.get(f"{base}/v1/files").json()["error"]["message"]
    answer = HTTP.get(f"{base}/v1/completions")
    assert (answer.status_code, answer.json()["error"]["message"][-9:]) == (405, "take GET.")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic s3cret"}, 401),
        ({"authorization": "Bearer s3cr\u00e9"}, 401),
        ({"authorization": "Bearer s3cr\u00e9t"}, 200),
    ],
)
def test_a_key_is_asked_for_where_there_is_one(
    keyed: str, headers: dict[str, str], status: int
) -> None:
    sent = httpx.Headers(headers, encoding="utf-8")
    answers = [HTTP.get(f"{keyed}{path}", headers=sent) for path in ("/v1/models", "/metrics")]
    assert [answer.status_code for answer in answers] == [status] * 2
    if status == 401:
        assert "Authorization: Bearer KEY" in answers[0].json()["error"]["message"]
    assert HTTP.get(f"{keyed}/").status_code == HTTP.get(f"{keyed}/health").status_code == 200


@pytest.fixture(scope="module")
def keyed(tokenizer: Tokenizer) -> Iterator[str]:
    with serving(FakeEngine(), tokenizer, api_key="s3cr\u00e9t") as base:
        yield base


def test_characters_of_several_tokens_come_whole(base: str) -> None:
    text = "aé€😀"
    stream = body(text, 22, stream=True)
    with HTTP.stream("POST", f"{base}/v1/completions", json=stream) as answer:
        pieces = [event["choices"][0]["text"] for event in events(answer) if event != "[DONE]"]
    # The limit cuts the last character after its first byte.
    assert "".join(pieces) == text * 2 + "a\N{REPLACEMENT CHARACTER}"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])


def test_a_full_queue_is_told_with_when_to_come_back(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(slots=1, queue_limit=1, seconds=0.02)
    with serving(engine, tokenizer, limits=ROOMY) as base:
        threads = [
            threading.Thread(target=post, args=(base,), kwargs={"json": body(limit=60)})
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.waiting == 1)
        answer = post(base, json=body())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "queue_full"
        # Of several that do not all fit none is taken.
        assert post(base, json=body(n=2)).status_code == 429
        assert len(engine.requests) == 2
        for thread in threads:
            thread.join()
        assert post(base, json=body()).status_code == 200
        assert outcomes(base) == {"finished": 3, "queue_full": 2}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_step(
    tokenizer: Tokenizer, stream: bool
) -> None:
    engine = FakeEngine(slots=1, seconds=0.05)
    with serving(engine, tokenizer, limits=ROOMY) as base:
        address = base.removeprefix("http://").split(":")
        asked = json.dumps(body(limit=90_000, stream=stream)).encode()
        client = socket.create_connection((address[0], int(address[1])))
        head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(asked)}"
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + asked)
        wait_until(lambda: engine.steps >= 2)
        client.close()
        left = engine.steps
        wait_until(lambda: not engine.busy)
        assert engine.steps - left <= 2  # the one that runs, and one more at most
        wait_until(lambda: outcomes(base) == {"client_gone": 1})


def test_a_client_that_is_killed_frees_its_slot(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(slots=1, seconds=0.01)
    with serving(engine, tokenizer, limits=ROOMY) as base:
        asked = body(limit=90_000, stream=True)
        code = f"""
import httpx
with httpx.stream("POST", "{base}/v1/completions", json={asked!r}) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""
        client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"data: ")
        client.send_signal(signal.SIGKILL)
        client.communicate()
        wait_until(lambda: not engine.busy)


def test_a_reader_that_stalls_delays_nobody_and_frees_its_slot(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(slots=2)
    with serving(engine, tokenizer, limits=ROOMY) as base:
        # More than the sockets hold.
        asked = body(limit=5_000, stream=True, draft_trace=True)
        with HTTP.stream("POST", f"{base}/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert post(base, json=body()).json()["choices"][0]["text"] == "hellohel"
            wait_until(lambda: not engine.busy)
            # All is there for when it reads on.
            assert list(lines)[-2] == "data: [DONE]"


def test_a_deadline_is_an_error_whole_or_streamed(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(slots=1, seconds=0.02)
    with serving(engine, tokenizer, limits=ROOMY._replace(deadline=0.1)) as base:
        answer = post(base, json=body(limit=90_000))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        stream = body(limit=90_000, stream=True)
        with HTTP.stream("POST", f"{base}/v1/completions", json=stream) as answer:
            *_, last = events(answer)
        assert "not complete after 0.1 seconds" in last["error"]["message"]
        assert outcomes(base) == {"deadline": 2}


def test_an_engine_that_fails_ends_every_request_and_the_server(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(slots=2, seconds=0.01, fails=10)
    answers: list[httpx.Response] = []

    def ask(base: str) -> None:
        answers.append(post(base, json=body(limit=90_000)))

    with serving(engine, tokenizer, limits=ROOMY) as base:
        threads = [threading.Thread(target=ask, args=(base,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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


def test_running_answers_end_before_the_server_does(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(slots=2, seconds=0.02)
    answers: list[str] = []

    def ask(base: str) -> None:
        answers.append(post(base, json=body(limit=40)).json()["choices"][0]["text"])

    with serving(engine, tokenizer, limits=ROOMY) as base:
        threads = [threading.Thread(target=ask, args=(base,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.waiting == 1)
    # The end of the block ends the server.
    for thread in threads:
        thread.join()
    assert answers == ["hello" * 8] * 3


def test_answers_that_take_longer_than_the_drain_are_told_so(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(slots=1, seconds=0.02)
    last: list[Any] = []

    def ask(base: str) -> None:
        stream = body(limit=90_000, stream=True)
        with HTTP.stream("POST", f"{base}/v1/completions", json=stream) as answer:
            last.extend(list(events(answer))[-1:])

    began = time.monotonic()
    with serving(engine, tokenizer, limits=ROOMY._replace(drain=0.2)) as base:
        thread = threading.Thread(target=ask, args=(base,))
        thread.start()
        wait_until(lambda: engine.steps > 1)
    thread.join()
    assert last[0]["error"]["code"] == "server_ends"
    assert time.monotonic() - began < 10


def test_nothing_is_answered_before_the_engine_is_warm(tokenizer: Tokenizer) -> None:
    warm = threading.Event()
    engine = FakeEngine(warm=warm)
    seen: list[Any] = []

    def watch(base: str) -> None:
        seen.append(HTTP.get(f"{base}/health"))
        seen.append(post(base, json=body()))
        warm.set()

    with serving(engine, tokenizer, listening=watch) as base:
        assert HTTP.get(f"{base}/health").json() == {"status": "ready"}
    assert [answer.status_code for answer in seen] == [503, 503]
    assert seen[0].json() == {"status": "warming up"}
    assert seen[1].headers["retry-after"] == "1"


@pytest.mark.parametrize("log_prompts", [False, True])
def test_logs_tell_what_was_asked_only_if_they_shall(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    caplog.set_level("INFO")
    with serving(FakeEngine(), tokenizer, log_prompts=log_prompts) as base:
        post(base, json=body("a secret"))
        post(base, json=body("a secret", tempo="a secret"))
    assert "finished, 8 prompt and 8 new tokens" in caplog.text
    assert ("a secret" in caplog.text) == log_prompts
