"""`python -m eval serve-load`: an open load on a server whose answers take a known time."""

import asyncio
import json
import threading
from dataclasses import replace
from itertools import batched, pairwise
from pathlib import Path
from string import ascii_lowercase

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine
from servers import LIMITS, serving

from eval import load
from eval.commands import evaluate
from eval.load import RequestResult, _ask, arrival_times
from redrafter_jax.engine.messages import Request
from redrafter_jax.errors import InputError


def words(folder: Path, url: str) -> list[str]:
    """A command line, whose files are written."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in ascii_lowercase))
    config = {
        "url": url,
        "prompts": str(prompts),
        "report_dir": str(folder / "report"),
        "rates": [20, 200],
        "seconds": 0.5,
        "max_requests": 8,
        "max_new_tokens": 21,
    }
    (folder / "load.yaml").write_text(json.dumps(config))
    return ["serve-load", "--config", str(folder / "load.yaml")]


def test_arrivals_are_a_poisson_process_with_an_end() -> None:
    times = arrival_times(rate=50.0, seconds=1000.0, most=20_000, seed=0)
    gaps = np.diff(times)
    # Of an exponential distribution mean and deviation are equal.
    np.testing.assert_allclose([gaps.mean(), gaps.std()], 1 / 50, rtol=0.05)
    assert times[0] == 0
    assert len(arrival_times(rate=50.0, seconds=1000.0, most=7, seed=0)) == 7
    assert max(arrival_times(rate=50.0, seconds=0.2, most=1000, seed=0)) < 0.2
    assert arrival_times(rate=50.0, seconds=1e-9, most=1000, seed=0) == [0]


@pytest.mark.long
def test_the_report_states_what_the_server_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two slots and one place to wait, so that some of eight at once are refused.
    engine = FakeEngine(2, 1, seconds=0.02)
    asked: list[int] = []

    def submit(request: Request) -> int:
        asked.append(request.prompt[0])
        return FakeEngine.submit(engine, request)

    monkeypatch.setattr(engine, "submit", submit)
    with serving(engine) as base:
        evaluate(words(tmp_path, base))
    # What a case asked may lie in a cache of the server: the next one asks the prompts after.
    assert len(asked) == 4 * 8
    assert all(not {*before} & {*after} for before, after in pairwise(batched(asked, 8)))
    report = json.loads((tmp_path / "report" / "serve_load.json").read_text())
    cases = [(run["rate"], run["method"]) for run in report["runs"]]
    methods = ["speculative", "baseline"]
    # At every other rate the other method goes first.
    assert cases == [*((20, name) for name in methods), *((200, name) for name in methods[::-1])]
    for run in report["runs"]:
        assert run["sent"] == len(run["answers"]) == 8
        whole = [answer for answer in run["answers"] if answer["error"] is None]
        assert {answer["tokens"] for answer in whole} == {21}
        # Two tokens in each of the engine's calls but the last, counted from 0.
        assert run["acceptance_length"] == 20 / 10
        # A step takes 20 ms, and an answer eleven of them.
        assert run["latency"][0] > 0.2
        assert run["latency"][0] > run["first_token"][0] >= 0.02
        assert run["errors"].get("queue_full", 0) == 8 - len(whole)
    assert any("queue_full" in run["errors"] for run in report["runs"][2:])
    assert (tmp_path / "report" / "serve_load.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "tiny, greedy" in told
    assert "queue_full" in told
    # A prompt of one letter is answered by that letter alone.
    lost = sum(run["errors"].get("queue_full", 0) for run in report["runs"])
    whole = 32 - lost
    assert told.splitlines()[-1] == report["verdict"]
    assert report["verdict"].startswith(f"Too little data to tell: {whole} of {whole} texts repeat")
    assert f"; {lost} of 32 requests, from " in report["verdict"]


@pytest.mark.long
def test_the_load_waits_for_a_server_that_warms_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warm = threading.Event()
    told: list[str] = []

    def log(text: str) -> None:
        told.append(text)
        warm.set()

    monkeypatch.setattr(load, "log", log)
    with serving(
        FakeEngine(8, 8, warm=warm), listening=lambda base: evaluate(words(tmp_path, base))
    ):
        pass
    report = json.loads((tmp_path / "report" / "serve_load.json").read_text())
    assert [run["errors"] for run in report["runs"]] == [{}] * 4
    assert told == ["the server warms up: 0 s"]
    assert "without a whole answer" not in capsys.readouterr().out


def test_a_warm_up_without_end_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.load._WARM_UP_SECONDS", 1)
    warm = threading.Event()

    def ask(base: str) -> None:
        with pytest.raises(InputError, match=r"within 1 s \(.* '503 Service Unavailable'.*health"):
            evaluate(words(tmp_path, base))
        warm.set()

    with serving(FakeEngine(warm=warm), listening=ask):
        pass


def test_a_run_without_an_answer_is_one_sentence(tmp_path: Path) -> None:
    with (
        serving(FakeEngine(), limits=replace(LIMITS, deadline=1e-9)) as base,
        pytest.raises(InputError, match=r"none of 32 requests \((deadline_exceeded|queue_full) "),
    ):
        evaluate(words(tmp_path, base))


def test_where_no_server_is_the_way_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No server is ready at url=http://127.0.0.1:9"):
        evaluate(words(tmp_path, "http://127.0.0.1:9"))
    with (
        serving(FakeEngine(), api_key="key") as base,
        pytest.raises(InputError, match=r"'401 Unauthorized' for url '\S*'\)\. .* REDRAFTER"),
    ):
        evaluate(words(tmp_path, base))


def answered(status: int, content: str) -> RequestResult:
    async def ask() -> RequestResult:
        answer = httpx.MockTransport(lambda _: httpx.Response(status, text=content))
        async with httpx.AsyncClient(transport=answer, base_url="http://server") as client:
            return await _ask(client, "/v1/completions", {}, 0.0)

    return asyncio.run(ask())


def test_comments_between_events_are_no_error() -> None:
    first, second = (
        {"token": 5, "text": "a", "call": call, "origin": origin}
        for call, origin in ((0, None), (3, "lookup"))
    )
    event = f"data:{json.dumps({'choices': [{'draft_trace': [first, second]}]})}"
    result = answered(200, f": a gateway waits\n\nevent: chunk\n{event}\n\ndata: [DONE]\n\n")
    assert (result.error, result.tokens, result.calls) == (None, 2, 3)
    assert (result.accepted_by, result.short, result.repeating) == ({"lookup": 1}, True, False)


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (500, '{"error": {"code": null, "type": "server_error"}}', "server_error"),
        (429, '{"error": {"code": "queue_full", "type": "rate_limit_error"}}', "queue_full"),
        (503, '{"error": {"code": 503, "type": "unavailable_error"}}', "503"),
        (502, '{"error": "overloaded"}', "HTTP 502"),
        (502, "null", "HTTP 502"),
        (502, "<html>Bad gateway</html>", "HTTP 502"),
        (404, '{"detail": "Not Found"}', "HTTP 404"),
        (503, "", "HTTP 503"),
        (200, 'data: {"error": {"code": null, "type": "server_error"}}\n\n', "server_error"),
        (429, '{\n "error": {\n  "code": "queue_full"\n }\n}', "queue_full"),
        (200, 'data: {"error": "overloaded"}\n\n', "error"),
        (200, 'data: "the upstream server has an error"\n\n', "no event of the API"),
        (200, "data: upstream request timeout\n\n", "no event of the API"),
        (200, 'data: {"choices": ["overloaded"]}\n\n', "no draft_trace"),
        (200, 'data: {"choices": [{"draft_trace": ["a"]}]}\n\n', "no draft_trace"),
        (200, 'data: {"choices": "overloaded"}\n\n', "no event of the API"),
        (200, "no healthy upstream", "no draft_trace"),
        (200, f"data: {'[' * 100_000}\n\n", "no event of the API"),
        (200, 'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', "no draft_trace"),
    ],
)
def test_what_is_refused_is_no_whole_answer(status: int, content: str, error: str) -> None:
    assert answered(status, content).error == error
