"""Answers of OpenAI's API, whole and as the chunks of a stream."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from redrafter_jax.engine.messages import PromptToken, Token
from redrafter_jax.serving.choices import Piece
from redrafter_jax.serving.openai_errors import ApiError
from redrafter_jax.serving.openai_messages import NamedTool
from redrafter_jax.serving.openai_schema import BaseRequest, ChatRequest
from redrafter_jax.serving.reasoning import ReasoningSplit, opens_reasoning
from redrafter_jax.serving.required_call import CALL_STYLE
from redrafter_jax.serving.service import Service
from redrafter_jax.serving.speculation import Speculation
from redrafter_jax.serving.tool_split import CallPiece, Part, ToolSplit

# JSON has no infinity.
_LOWEST = -9999.0


class Answer(ABC):
    """The JSON objects of the answer to one request.

    Args:
      service: the service that answers the request.
      request: the request.
      seed: seed of the first choice.
      prompts: token ids of each prompt.

    Attributes:
      id: identifier of the answer.
      prefix: beginning of `id`.
      kind: field `object` of a whole answer.
      chunk_kind: field `object` of a chunk of a stream.
      done: last event of a stream, which is not a JSON object.
    """

    prefix: str
    kind: str
    chunk_kind: str
    done: ClassVar[str] = "data: [DONE]\n\n"

    def __init__(
        self,
        service: Service,
        request: BaseRequest,
        seed: int,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self.id = self.prefix + secrets.token_hex(12)
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": service.model.name,
            "system_fingerprint": service.model.fingerprint,
            "seed": seed,
        }
        self._spell = service.spell
        self._top = request.top
        self._prompt_top = request.prompt_logprobs
        self._choices_each = request.n
        self._draft_trace = request.draft_trace
        self._include_usage = request.stream_options.include_usage
        self._speculative_metrics = request.speculative_metrics
        self._depth = service.draft_depth
        self._several = request.n * len(prompts) > 1
        self._speculation = Speculation()

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return the chunks of a stream that precede the first token of a choice."""
        del index
        return []

    def chunks(self, index: int, piece: Piece, offset: int) -> list[dict[str, Any]]:
        """Return the chunks for one piece of choice `index`.

        The piece begins at character `offset` of the choice's text.
        """
        content = self._content(index, piece, whole=False)
        return [self._chunk([self._choice(index, piece, offset, content)])]

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the last chunks of a stream, after all choices have ended."""
        if not self._include_usage:
            return []
        told = {"usage": usage | self._usage_details()}
        return [self._chunk([]) | told | self._all_metrics()]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the last chunk of a stream that fails."""
        return error.body()

    def whole(self, choices: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the whole answer as one JSON object, from all pieces of each choice."""
        objects = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            tokens = [token for piece in pieces for token in piece.tokens]
            piece = pieces[-1]._replace(text=text, tokens=tokens)
            objects.append(self._choice(index, piece, 0, self._content(index, piece, whole=True)))
        told = {"object": self.kind, "choices": objects, "usage": usage | self._usage_details()}
        if self._prompt_top is not None:
            own = range(0, len(choices), self._choices_each)
            read = [[token for piece in choices[i] for token in piece.prompt] for i in own]
            told |= self._of_prompts([[None, *map(self._prompt_entry, one)] for one in read], told)
        return self._head | told | self._all_metrics()

    def _of_prompts(self, read: list[list[Any]], told: dict[str, Any]) -> dict[str, Any]:
        """The prompts' log-probabilities, repeated in every choice of a prompt, as in vLLM."""
        each = self._choices_each
        return {
            "choices": [
                choice | {"prompt_logprobs": read[index // each]}
                for index, choice in enumerate(told["choices"])
            ]
        }

    def _prompt_entry(self, token: PromptToken) -> dict[str, Any]:
        """Return the log-probabilities of the likeliest tokens and of the prompt's token, by id."""
        ranked = [(*pair, rank) for rank, pair in enumerate(token.top[: self._prompt_top], start=1)]
        return {
            str(id): {
                "logprob": max(log_prob, _LOWEST),
                "rank": rank,
                "decoded_token": self._spell(id).text,
            }
            for id, log_prob, rank in [*ranked, (token.id, token.log_prob, token.rank)]
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._include_usage else {}
        return self._head | {"object": self.chunk_kind, "choices": choices} | usage

    def _choice(
        self, index: int, piece: Piece, offset: int, content: dict[str, Any]
    ) -> dict[str, Any]:
        log_probs = None if self._top is None else self._log_probs(piece.tokens, offset)
        choice = {"index": index, **content, "logprobs": log_probs}
        choice["finish_reason"] = self._finish(index, piece)
        if self._draft_trace:
            choice["draft_trace"] = [
                {"token": token.id, "text": token.text, "call": token.call, "origin": token.origin}
                for token in piece.tokens
            ]
        if piece.speculation is not None:
            self._speculation.include(piece.speculation)
            if self._several:
                choice |= self._metrics(piece.speculation)
        return choice

    def _all_metrics(self) -> dict[str, Any]:
        return self._metrics(self._speculation)

    def _metrics(self, speculation: Speculation) -> dict[str, Any]:
        """Return the given drafting statistics as a field, if the request asks for them."""
        if not self._speculative_metrics:
            return {}
        return {"metrics": {"speculative_decoding": speculation.body(self._depth)}}

    def _usage_details(self) -> dict[str, Any]:
        return {}

    def _finish(self, index: int, piece: Piece) -> str | None:
        """Return the `finish_reason` of a piece; None if the choice goes on after the piece."""
        del index
        return piece.finish

    @abstractmethod
    def _content(self, index: int, piece: Piece, whole: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _log_probs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]: ...


class ChatAnswer(Answer):
    """Answers of `/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        request: BaseRequest,
        seed: int,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(service, request, seed, prompts)
        form = service.model.format
        # One per choice, if the template marks reasoning; a grammar does not allow the marks.
        self._splits: list[ReasoningSplit] | None = None
        if form.template.thinks and request.form is None:
            opened = opens_reasoning(form.tokenizer, prompts[0])
            self._splits = [ReasoningSplit(opened) for _ in range(request.n)]
        # Like OpenAI and vLLM, finish with "stop" if the request names the tool to call.
        self._named = isinstance(request, ChatRequest) and isinstance(
            request.tool_choice, NamedTool
        )
        # One per choice, if tools are offered.
        self._calls: list[ToolSplit] | None = None
        if request.offered and service.model.tools is not None:
            style, names = service.model.tools.style, [one.function.name for one in request.offered]
            single = isinstance(request, ChatRequest) and not request.parallel_tool_calls
            if isinstance(request, ChatRequest) and request.required:
                style = CALL_STYLE
            self._calls = [
                ToolSplit(style, names, streams=request.stream, single=single)
                for _ in range(request.n)
            ]

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk([choice])]

    def _of_prompts(self, read: list[list[Any]], told: dict[str, Any]) -> dict[str, Any]:
        """The prompt's log-probabilities, beside the choices, because a chat has one prompt."""
        del told
        return {"prompt_logprobs": read[0]}

    def _content(self, index: int, piece: Piece, whole: bool) -> dict[str, Any]:
        reasoning, parts = self._said(index, piece)
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [_call(part, whole) for part in parts if isinstance(part, CallPiece)]
        told: dict[str, Any] = {"content": text or None if whole and calls else text}
        if self._splits is not None and (reasoning or whole):
            told["reasoning_content"] = reasoning or None
        if calls:
            told["tool_calls"] = calls
        if whole:
            return {"message": {"role": "assistant", **told, "refusal": None}}
        return {"delta": told if any(told.values()) or piece.tokens else {}}

    def _said(self, index: int, piece: Piece) -> tuple[str, list[Part]]:
        """Return the reasoning that a piece adds, and its texts and pieces of calls, in order."""
        reasoning, text = "", piece.text
        if self._splits is not None:
            reasoning, text = _split(self._splits[index], piece)
        if self._calls is None:
            return reasoning, [text]
        parts = self._calls[index].push(text)
        if piece.finish is not None:
            parts += self._calls[index].finish()
        return reasoning, parts

    def _finish(self, index: int, piece: Piece) -> str | None:
        called = self._calls is not None and self._calls[index].called and not self._named
        return "tool_calls" if called and piece.finish == "stop" else piece.finish

    def _usage_details(self) -> dict[str, Any]:
        if self._splits is None:
            return {}
        count = sum(split.tokens for split in self._splits)
        return {"completion_tokens_details": {"reasoning_tokens": count}}

    def _log_probs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        del offset

        def entry(id: int, log_prob: float, chosen: Token) -> dict[str, Any]:
            text, raw = self._spell(id)
            raw = chosen.raw if id == chosen.id else raw
            return {"token": text, "logprob": log_prob, "bytes": list(raw)}

        return {
            "content": [
                entry(token.id, token.log_prob, token)
                | {"top_logprobs": [entry(*other, token) for other in token.top[: self._top]]}
                for token in tokens
            ],
            "refusal": None,
        }


def _split(split: ReasoningSplit, piece: Piece) -> tuple[str, str]:
    """The reasoning and the answer that a piece adds."""
    pairs = [split.push(token.text) for token in piece.tokens]
    if piece.finish is not None:
        pairs.append(split.finish())
    return "".join(one for one, _ in pairs), "".join(other for _, other in pairs)


def _call(piece: CallPiece, whole: bool) -> dict[str, Any]:
    """The JSON object of a tool call, or of a piece of a tool call."""
    place = {} if whole else {"index": piece.number}
    function = {"arguments": piece.arguments}
    if piece.name is None:
        return place | {"function": function}
    function = {"name": piece.name} | function
    return place | {"id": piece.id, "type": "function", "function": function}


class CompletionAnswer(Answer):
    """Answers of `/v1/completions`, whose chunks have the same format as whole answers."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def _content(self, index: int, piece: Piece, whole: bool) -> dict[str, Any]:
        del index, whole
        return {"text": piece.text}

    def _log_probs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self._spell(token.id).escaped for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [self._top_log_probs(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top_log_probs(self, token: Token) -> dict[str, float]:
        """Log-probabilities of the likeliest tokens, best first, and of the chosen token."""
        log_probs: dict[str, float] = {}
        for other, log_prob in [*token.top[: self._top], (token.id, token.log_prob)]:
            log_probs.setdefault(self._spell(other).escaped, log_prob)  # two tokens may read alike
        return log_probs
