"""Who may ask, by which name of the server, and how much."""

import json
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from fake_engine import FakeEngine
from servers import HTTP, JSON, body, post, serving


@pytest.fixture(scope="module")
def keyed() -> Iterator[str]:
    with serving(FakeEngine(), api_key="s3cr\u00e9t") as base:
        yield base


def test_a_body_without_a_length_ends_at_the_limit(base: str) -> None:
    answer = post(base, content=iter([b"x" * 1000] * 50), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_headers_have_a_limit(base: str) -> None:
    with suppress(httpx.TransportError):  # the connection is closed while it sends
        answer = HTTP.get(f"{base}/health", headers={"x-long": "x" * 200_000})
        assert answer.status_code == 400


def test_a_form_of_another_site_is_not_read(base: str) -> None:
    answer = post(base, content=json.dumps(body()), headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "header Content-Type: application/json" in answer.text
    answer = HTTP.get(f"{base}/health", headers={"host": "rebound.example:8000"})
    assert answer.status_code == 403
    assert "'rebound.example'" in answer.text


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]", "[::1]:8000"]
)
def test_every_name_of_this_machine_is_answered(base: str, host: str) -> None:
    assert HTTP.get(f"{base}/health", headers={"host": host}).status_code == 200


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


def test_what_is_kept_out_is_counted() -> None:
    with serving(FakeEngine(), api_key="key") as base:
        assert post(base, json=body()).status_code == 401
        told = HTTP.get(f"{base}/metrics", headers={"authorization": "Bearer key"}).text
    assert 'redrafter_requests_total{outcome="refused",route="/v1/completions"} 1.0' in told
