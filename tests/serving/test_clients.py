"""Clients that leave, stall or come too late, and texts that cannot be shown: no leak, no hang."""

import json
import threading
from dataclasses import replace
from http.client import HTTPConnection

import pytest
from fake_engine import FakeEngine
from servers import (
    ENDLESS,
    JSON,
    ROOMY,
    body,
    outcomes,
    post,
    serving,
    streamed,
    text_of,
    wait_until,
)
from tiny_folders import byte_tokenizer
from tokenizers import decoders

from redrafter_jax.engine.messages import Event, Token
from redrafter_jax.serving.choices import Choice


def test_characters_of_several_tokens_come_whole() -> None:
    text = "aé€😀"
    with serving(FakeEngine()) as base, streamed(base, prompt=text, limit=22) as events:
        pieces = [event["choices"][0]["text"] for event in events if event != "[DONE]"]
    # The limit cuts the last character after its first byte.
    assert "".join(pieces) == text * 2 + "a\N{REPLACEMENT CHARACTER}"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])


def test_a_stop_string_that_the_limit_completes_ends_the_answer() -> None:
    tokenizer = byte_tokenizer()
    first, part, *_ = tokenizer.encode("x\N{EURO SIGN}").ids
    choice = Choice(tokenizer, tokenizer.encode("a").ids, ["x\N{REPLACEMENT CHARACTER}"])
    tokens = [Token(id, 0, None, -1.0) for id in (first, part)]
    piece = choice.take(Event(0, tokens, "length"))
    assert (piece.text, piece.finish) == ("", "stop")


def test_what_a_template_writes_before_an_answer_is_left_out_once() -> None:
    tokenizer = byte_tokenizer()
    tokens = [Token(id, 0, None, -1.0) for id in tokenizer.encode(" a b").ids]
    choice = Choice(tokenizer, tokenizer.encode("a").ids, [], gap=" ")
    assert choice.take(Event(0, tokens, "length")).text == "a b"


def test_a_choice_that_a_stop_string_ends_frees_its_slot_and_no_other() -> None:
    engine = FakeEngine(slots=2)
    asked = {"prompt": ["abc", "de"], "limit": ENDLESS, "stop": "cab"}
    with serving(engine, limits=ROOMY) as base, streamed(base, **asked):
        wait_until(lambda: len(engine.requests) == 1, seconds=60)
        steps = engine.steps
        wait_until(lambda: engine.steps > steps + 9, seconds=60)


def test_a_text_that_its_tokenizer_changes_as_it_grows_is_an_error_in_the_stream() -> None:
    tokenizer = byte_tokenizer()
    steps = decoders.ByteLevel(), decoders.Fuse(), decoders.Replace("lo", "0")
    tokenizer.decoder = decoders.Sequence([*steps])
    with serving(FakeEngine(), tokenizer=tokenizer) as base:
        with streamed(base, prompt="hello") as events:
            *_, last = events
        assert "detokenize changes" in last["error"]["message"]
        assert outcomes(base) == {"failed": 1}


def test_a_full_queue_is_told_with_when_to_come_back() -> None:
    engine = FakeEngine(slots=1, queue_limit=1, seconds=0.01)
    with serving(engine, limits=replace(ROOMY, slots=26)) as base:
        with streamed(base, limit=ENDLESS), streamed(base, limit=ENDLESS):
            assert (engine.active, engine.waiting) == (1, 1)
            answer = post(base, json=body())
            # The engine says 2.1 seconds for each.
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
            assert answer.json()["error"]["code"] == "queue_full"
            assert post(base, json=body(n=2)).headers["retry-after"] == "5"
            many = body(n=2) | {"prompt": ["a"] * 15}
            assert post(base, json=many).headers["retry-after"] == "60"
        wait_until(lambda: not engine.busy)
        with streamed(base, limit=ENDLESS):
            assert post(base, json=body(n=2)).status_code == 429
            assert len(engine.requests) == 1, "of several that do not all fit none is taken"
        wait_until(lambda: outcomes(base) == {"client_gone": 3, "queue_full": 4})


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_step(stream: bool) -> None:
    gate = threading.Semaphore(2)
    engine = FakeEngine(slots=1, gate=gate)
    with serving(engine, limits=ROOMY) as base:
        client = HTTPConnection(base.removeprefix("http://"))
        asked = json.dumps(body(limit=ENDLESS, stream=stream))
        client.request("POST", "/v1/completions", asked, JSON)
        wait_until(lambda: engine.steps == 2)
        client.close()
        wait_until(lambda: outcomes(base) == {"client_gone": 1})
        gate.release()  # for the step that runs
        wait_until(lambda: not engine.busy)
        assert engine.steps == 3


def test_a_client_that_leaves_within_its_body_is_counted_so() -> None:
    with serving(FakeEngine()) as base:
        client = HTTPConnection(base.removeprefix("http://"))
        client.putrequest("POST", "/v1/completions")
        client.putheader("content-length", "100")
        client.endheaders(b'{"model"')
        client.close()
        wait_until(lambda: outcomes(base) == {"client_gone": 1}, seconds=60)


def test_a_reader_that_stalls_delays_nobody_and_frees_its_slot() -> None:
    engine = FakeEngine(slots=2)
    # More than the sockets hold.
    asked = {"limit": 1_500, "draft_trace": True}
    with serving(engine, limits=ROOMY) as base, streamed(base, **asked) as events:
        first = next(events)["choices"][0]["text"]
        assert post(base, json=body()).json()["choices"][0]["text"] == "hellohel"
        wait_until(lambda: not engine.busy)
        assert first + text_of(events) == "hello" * 300, "all is there when it reads on"


def test_a_deadline_is_an_error_whole_or_streamed() -> None:
    engine = FakeEngine(slots=1, seconds=0.02)
    with serving(engine, limits=replace(ROOMY, deadline=0.1)) as base:
        answer = post(base, json=body(limit=ENDLESS))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        with streamed(base, limit=ENDLESS) as events:
            *_, last = events
        assert "not complete after 0.1 seconds" in last["error"]["message"]
        assert outcomes(base) == {"deadline": 2}
