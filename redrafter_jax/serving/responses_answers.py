"""Answers of OpenAI's Responses API: a chat's answer as items, and as events about the items."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from redrafter_jax.serving.choices import Piece
from redrafter_jax.serving.openai_answers import ChatAnswer
from redrafter_jax.serving.openai_errors import ApiError
from redrafter_jax.serving.openai_schema import ChatRequest
from redrafter_jax.serving.responses_schema import ResponsesRequest
from redrafter_jax.serving.service import Service
from redrafter_jax.serving.tool_split import Part

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
# The one part of an item; its type names its events.
_PARTS: dict[str, Any] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}


class ResponsesAnswer(ChatAnswer):
    """The answer of `/v1/responses`, as a whole or as events.

    Items keep the order of the answer: text after a tool call becomes a new message item.

    Args:
      asked: the request of the Responses API.
      service: the service that answers the request.
      chat: the chat request into which the request was converted.
      seed: seed of the answer.
      prompts: token ids of the prompt, as a list with one row.
    """

    prefix, done = "resp_", ""

    def __init__(
        self,
        asked: ResponsesRequest,
        service: Service,
        chat: ChatRequest,
        seed: int,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(service, chat, seed, prompts)
        stated = asked.model_dump(include={"tool_choice"})
        form = asked.text.format.model_dump(by_alias=True, exclude_none=True)
        self._told: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._head["model"],
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": form},
            "tool_choice": stated["tool_choice"],
            "tools": [tool.model_dump() | {"strict": False} for tool in asked.tools],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": asked.metadata,
            "seed": seed,
            "system_fingerprint": self._head["system_fingerprint"],
        }
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item is unfinished
        self._pieces: list[str] = []  # pieces of the last item's text or arguments
        self._call = 0  # number of the last call
        self._cut = False

    def opening(self, index: int) -> list[dict[str, Any]]:
        del index
        return [self._state("created"), self._state("in_progress")]

    def chunks(self, index: int, piece: Piece, offset: int) -> list[dict[str, Any]]:
        (chunk,) = super().chunks(index, piece, offset)
        (choice,) = chunk["choices"]
        self._cut = choice["finish_reason"] == "length"
        return [*self._take(*choice["said"])]

    def _content(self, index: int, piece: Piece, whole: bool) -> dict[str, Any]:
        del whole
        return {"said": self._said(index, piece)}

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        events = [*self._end(usage)]
        return [*events, self._state(self._told["status"])]

    def failure(self, error: ApiError) -> dict[str, Any]:
        wrong = {"code": "server_error", "message": error.detail}
        if self._open:
            self._fill()
            self._items[-1]["status"] = self._status(cut=True)
        self._told |= {"status": "failed", "error": wrong, "output": self._items}
        return self._state("failed")

    def whole(self, choices: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        for piece in choices[0]:
            self.chunks(0, piece, 0)
        self.closing(usage)
        return self._told

    def _state(self, name: str) -> dict[str, Any]:
        """The event that holds the whole response in its current state."""
        return self._event(f"response.{name}", response=dict(self._told))

    def _event(self, kind: str, **told: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **told}

    def _take(self, reasoning: str, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        """The events for the reasoning, texts and calls that a step adds."""
        yield from self._take_text("reasoning", reasoning)
        for part in parts:
            if isinstance(part, str):
                yield from self._take_text("message", part)
                continue
            if part.name is not None:
                named = {"call_id": part.id, "name": part.name}
                yield from self._begin("function_call", **named, arguments="")
                self._call = part.number
            yield from self._add(part.arguments)

    def _take_text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if not self._open or self._items[-1]["type"] != kind:
            yield from self._begin(kind)
        yield from self._add(text)

    def _add(self, text: str) -> Iterator[dict[str, Any]]:
        """The event for text that is added to the last item."""
        self._pieces.append(text)
        yield self._part_event("delta", delta=text)

    def _begin(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events that end the previous item and begin a new one."""
        yield from self._end_item()
        item = {"id": _PREFIXES[kind] + secrets.token_hex(12), "type": kind} | fields
        item["status"] = "in_progress"
        if kind == "message":
            item["role"] = "assistant"
        if kind == "reasoning":
            item["summary"] = []
        if kind in _PARTS:
            item["content"] = []
        self._open, self._pieces = True, []
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=self._last, item=dict(item))
        if kind in _PARTS:
            item["content"] = [dict(_PARTS[kind])]
            yield self._content_event("added")

    def _end_item(self, cut: bool = False) -> Iterator[dict[str, Any]]:
        """The events that end the last item, if it is unfinished."""
        if not self._open:
            return
        self._open = False
        self._fill()
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._part_event("done", arguments=item["arguments"])
        else:
            yield self._part_event("done", text=item["content"][0]["text"])
            yield self._content_event("done")
        item["status"] = self._status(cut)
        yield self._event("response.output_item.done", output_index=self._last, item=dict(item))

    def _status(self, cut: bool) -> Literal["incomplete", "completed"]:
        """The status of the last item; a call is completed if its JSON is complete."""
        if self._items[-1]["type"] == "function_call":
            cut = not (self._calls and self._call in self._calls[0].complete)
        return "incomplete" if cut else "completed"

    def _fill(self) -> None:
        """Write the joined pieces into the last item.

        Appending each piece to the item would take quadratic time.
        """
        item, whole = self._items[-1], "".join(self._pieces)
        if item["type"] == "function_call":
            item["arguments"] = whole
        else:
            item["content"][0]["text"] = whole

    def _end(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events that end the last item; afterwards the response holds its final state."""
        if not self._items:
            yield from self._begin("message")
        yield from self._end_item(self._cut)
        prompt, new = usage["prompt_tokens"], usage["completion_tokens"]
        details = self._usage_details().get("completion_tokens_details", {"reasoning_tokens": 0})
        self._told |= {
            "status": "incomplete" if self._cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": new,
                "output_tokens_details": details,
                "total_tokens": usage["total_tokens"],
            },
        }
        if not self._cut:
            self._told["completed_at"] = int(time.time())
        self._told |= self._all_metrics()

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _part_event(self, step: Literal["delta", "done"], **told: Any) -> dict[str, Any]:
        """An event about the text or the arguments of the last item."""
        item = self._items[-1]
        place: dict[str, Any] = {"item_id": item["id"], "output_index": self._last}
        if item["type"] == "function_call":
            return self._event(f"response.function_call_arguments.{step}", **place, **told)
        part = item["content"][0]
        if "logprobs" in part:
            told |= {"logprobs": []}
        return self._event(f"response.{part['type']}.{step}", **place, content_index=0, **told)

    def _content_event(self, step: Literal["added", "done"]) -> dict[str, Any]:
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": self._last, "content_index": 0}
        part = dict(item["content"][0])
        return self._event(f"response.content_part.{step}", **place, part=part)
