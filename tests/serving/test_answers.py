"""The bodies of answers, word for word: whole, and as the chunks of a stream."""

from typing import Any

from servers import HTTP, body, post, streamed, text_of

HEAD = {"model": "tiny", "system_fingerprint": "fp_tiny", "seed": 0}
# Of three tokens.
CACHED = {"prompt_tokens_details": {"cached_tokens": 1}}
# In the tokenizer of bytes "!" is the first token, and "a" the 65th.
OTHER = {"token": "!", "logprob": -1.0, "bytes": [33]}
TRACE = [
    {"token": 64, "text": "a", "call": 0, "origin": "lookup"},
    {"token": 65, "text": "b", "call": 0, "origin": None},
]


def without_name(answer: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Without what differs each time."""
    assert answer.pop("id").startswith(prefix)
    assert isinstance(answer.pop("created"), int)
    return answer


def chat(base: str, **asked: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
    asked = {"model": "tiny", "messages": turns, "seed": 0, **asked}
    return HTTP.post(f"{base}/v1/chat/completions", json=asked).json()


def test_a_chat_with_all_that_can_be_told(base: str) -> None:
    answer = chat(base, max_tokens=2, logprobs=True, top_logprobs=2, draft_trace=True)
    entries = [
        {"token": text, "logprob": -0.5, "bytes": list(text.encode())} for text in ("a", "b")
    ]
    assert without_name(answer, "chatcmpl-") == HEAD | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": {
                    "content": [entry | {"top_logprobs": [entry, OTHER]} for entry in entries],
                    "refusal": None,
                },
                "finish_reason": "length",
                "draft_trace": TRACE,
            }
        ],
        "usage": CACHED | {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_tokens_that_are_parts_of_a_character_have_their_own_bytes(base: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    answer = chat(base, messages=[{"role": "user", "content": "é"}], **asked)["choices"][0]
    assert answer["message"]["content"] == "é\n"
    entries = answer["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], [0x0A]]
    assert [entry["top_logprobs"][0]["bytes"] for entry in entries] == [[0xC3], [0xA9], [0x0A]]
    told = post(base, json=body("é", 2, logprobs=1)).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_turns_as_openai_writes_them_itself_are_taken(base: str) -> None:
    turns = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "annotations": [], "refusal": None, "tool_calls": []},
        {"role": "user", "content": "a"},
    ]
    plain = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    plain[0]["role"] = "system"
    answers = [chat(base, messages=messages, max_tokens=9) for messages in (turns, plain)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_a_completions_likeliest_tokens_hold_the_drawn_one(base: str) -> None:
    told = post(base, json=body("abc", 1, logprobs=0)).json()["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [{"a": -0.5}]
    told = post(base, json=body("abc", 1, logprobs=2)).json()["choices"][0]["logprobs"]
    assert [list(tops.items()) for tops in told["top_logprobs"]] == [[("a", -0.5), ("!", -1.0)]]


def test_a_completion_up_to_a_stop_string(base: str) -> None:
    asked = body("abc", 9, stop=["cab"], logprobs=1)
    assert without_name(post(base, json=asked).json(), "cmpl-") == HEAD | {
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "logprobs": {
                    "tokens": list("abcab"),
                    "token_logprobs": [-0.5] * 5,
                    "top_logprobs": [{token: -0.5} for token in "abcab"],
                    "text_offset": [0, 1, 2, 2, 2],
                },
                "finish_reason": "stop",
            }
        ],
        "usage": CACHED | {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }
    with streamed(base, prompt="abc", limit=9, stop="cab") as events:
        assert text_of(events) == "ab"


def test_choices_of_a_stream_come_side_by_side(base: str) -> None:
    options = {"n": 2, "echo": True, "stream_options": {"include_usage": True}}
    with streamed(base, prompt="abc", limit=3, **options) as events:
        *chunks, usage, done = events

    def chunk(index: int, text: str, finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        return HEAD | {"object": "text_completion", "choices": [choice], "usage": None}

    assert [without_name(one, "cmpl-") for one in chunks] == [
        chunk(0, "abc", None),
        chunk(1, "abc", None),
        chunk(0, "ab", None),
        chunk(1, "bc", None),  # of seed 1
        chunk(0, "c", "length"),
        chunk(1, "a", "length"),
    ]
    assert usage["choices"] == []
    counts = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert usage["usage"] == CACHED | counts
    assert done == "[DONE]"
    whole = post(base, json=body("abc", 3, n=2)).json()
    assert [(one["index"], one["text"]) for one in whole["choices"]] == [(0, "abc"), (1, "bca")]
    assert whole["usage"] == usage["usage"]
    several = {"prompt": ["abc", [65, 66]], "echo": True}
    answers = post(base, json=body(limit=3, n=2) | several).json()["choices"]
    # A prompt may be token ids; all choices of one come before those of the next.
    assert [one["text"] for one in answers] == ["abcabc", "abcbca", "bcbcb", "bccbc"]
    last = post(base, json=body("abc", 3, n=2) | {"seed": 2**31 - 1}).json()["choices"]
    assert [one["text"] for one in last] == ["bca", "abc"], "after the last seed comes the first"
