"""Jobs, which turn an HTTP request into engine requests, and the engine's events into text."""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter_jax.config import SamplingConfig
from redrafter_jax.config.limits import FieldError
from redrafter_jax.engine.messages import QueueFull, Request
from redrafter_jax.errors import InputError
from redrafter_jax.serving.choices import Choice, Piece
from redrafter_jax.serving.metrics import Metrics
from redrafter_jax.serving.openai_errors import ApiError, server_ends
from redrafter_jax.serving.openai_schema import BaseRequest, CompletionRequest
from redrafter_jax.serving.request_counts import Outcome
from redrafter_jax.serving.service import Service
from redrafter_jax.serving.worker import EngineFailedError, EventQueue
from redrafter_jax.text.grammars import CompiledGrammar
from redrafter_jax.text.tokenizer import split_stops

_SEEDS = 2**31
# In seconds; OpenAI's client gives up if Retry-After is more than 120.
_LONGEST_WAIT = 60


@dataclass
class Job:
    """The choices (answers) of one HTTP request, which are decoded together.

    Attributes:
      service: the service that answers the request.
      event_queue: queue of the engine's events for the choices.
      choices: the text converter of each choice, by the choice's index in the request.
      seed: seed of the first choice.
      prompt_tokens: number of tokens of all prompts together.
      choices_each: number of choices per prompt.
      began: arrival time of the request on the monotonic clock, in seconds.
      cached_tokens: number of prompt tokens that were already cached when the first choice of each
        prompt began.
      completion_tokens: number of new tokens so far, over all choices.
      outcome: how the request ended; "client_gone" until the outcome is known.
    """

    service: Service
    event_queue: EventQueue
    choices: Sequence[Choice]
    seed: int
    prompt_tokens: int
    choices_each: int
    began: float
    cached_tokens: int = 0
    completion_tokens: int = 0
    outcome: Outcome = "client_gone"

    @property
    def usage(self) -> dict[str, Any]:
        """The counts of tokens, as in the field `usage` of OpenAI's answers."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the index of a choice and its next piece, until all choices have ended.

        Raises:
          ApiError: the deadline has passed, the engine has ended, or a choice cannot be converted
            to text.
        """
        metrics, unfinished = self.service.metrics, len(self.choices)
        times = [_Times(self.began) for _ in self.choices]
        unread = set(range(0, len(self.choices), self.choices_each))
        try:
            while unfinished:
                step = await self.event_queue.get()
                if isinstance(step, Exception):
                    raise step
                for index, event, cached in step:
                    choice = self.choices[index]
                    if index in unread:  # count each prompt once, with its first choice
                        unread.remove(index)
                        self.cached_tokens += cached
                    if choice.ended:
                        continue
                    piece = choice.take(event)
                    self.completion_tokens += len(piece.tokens)
                    times[index].add(piece, metrics)
                    if event.ended == "deadline":
                        self.outcome = "deadline"
                        raise _deadline_exceeded(self.service.limits.deadline or math.inf)
                    if choice.ended:
                        unfinished -= 1
                        times[index].observe(metrics)
                        if event.ended is None:  # the engine does not know stop strings
                            self.service.worker.cancel(self.event_queue, index)
                    yield index, piece
            self.outcome = "finished"
        except EngineFailedError:
            self.outcome = "failed"
            raise server_ends() from None
        except InputError as error:
            self.outcome = "failed"
            raise ApiError(500, str(error)) from None

    def end(self) -> None:
        """Cancel unfinished choices, and add the number of new tokens to the metrics."""
        self.service.worker.cancel(self.event_queue)
        self.service.metrics.completion_tokens.inc(self.completion_tokens)


class _Times:
    """The arrival times of a choice's tokens."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._first = self._last = 0.0
        self._tokens = self._calls = self._after_first = 0

    def add(self, piece: Piece, metrics: Metrics) -> None:
        if not piece.tokens:
            return
        self._last = time.monotonic()
        if not self._tokens:
            self._first = self._last
            metrics.first_token.observe(self._first - self._began)
        else:
            self._after_first += len(piece.tokens)
        self._tokens += len(piece.tokens)
        self._calls = piece.tokens[-1].call

    def observe(self, metrics: Metrics) -> None:
        """Add the times to the metrics, after the choice has ended."""
        if self._after_first:
            metrics.output_token.observe((self._last - self._first) / self._after_first)
        if self._calls:
            metrics.acceptance_length.observe((self._tokens - 1) / self._calls)


def check(service: Service, request: BaseRequest) -> None:
    """Refuse a request with `ApiError` if the engine is not ready or a number is out of range.

    These checks do not need the tokenized prompts.
    """
    status, limits = service.worker.status, service.limits
    if status in ("failed", "closed"):
        raise server_ends()
    if status != "ready":
        raise ApiError(
            503,
            f"The engine is {status}; ask again when /health says that it is ready.",
            code="not_ready",
            headers={"Retry-After": "1"},
        )
    choices = request.n * (len(request.prompt) if isinstance(request, CompletionRequest) else 1)
    if choices > limits.choices:
        raise ApiError(
            400,
            f"{request.prompt_field} and n ask for {choices} answers, but a request may have "
            f"{limits.choices} at most; ask for fewer.",
            field="n",
        )
    own = "top_logprobs" if "top_logprobs" in type(request).model_fields else "logprobs"
    for field, top in ((own, request.top), ("prompt_logprobs", request.prompt_logprobs)):
        if (top or 0) > limits.max_logprobs:
            raise ApiError(
                400,
                f"{field} is {top}, but this server returns {limits.max_logprobs} at most; ask for "
                f"fewer, or start the server with --max-logprobs {top}.",
                field=field,
            )
    if (token := max(request.logit_bias, default=0)) >= service.worker.vocab_size:
        raise ApiError(
            400,
            f"logit_bias holds token {token}, outside the vocabulary of "
            f"{service.worker.vocab_size} tokens; leave it out.",
            field="logit_bias",
        )


async def start_job(
    service: Service,
    request: BaseRequest,
    prompts: Sequence[Sequence[int]],
    began: float,
    gap: str = "",
) -> Job:
    """Submit a request that has passed `check` to the engine.

    Args:
      service: the service that answers the request.
      request: the request; each of its prompts gets `request.n` choices.
      prompts: token ids of each prompt.
      began: arrival time of the request on the monotonic clock, in seconds; the deadline counts
        from this time.
      gap: text that `Choice` removes from the start of each answer.

    Raises:
      ApiError: a value is out of range, a prompt is too long, the queue is full, or the engine has
        ended.
    """
    seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
    try:
        ends, strings = split_stops(service.model.format.tokenizer, request.stop)
    except InputError as error:
        raise ApiError(400, str(error), field="stop") from None
    sampling = _sampling(request)
    rows = [(prompt, _limit(service, request, prompt)) for prompt in prompts]
    least = min(limit for _, limit in rows)
    if request.min_tokens > least:
        raise ApiError(
            400,
            f"min_tokens is {request.min_tokens}, but the limit on new tokens is {least}; ask for "
            "fewer.",
            field="min_tokens",
        )
    grammar = await asyncio.to_thread(_compile, service, request)
    own_ends = () if request.ignore_eos else service.model.format.stop_tokens
    requests = [
        Request(
            list(prompt),
            limit,
            (seed + choice) % _SEEDS,
            sampling,
            stop_tokens=(*own_ends, *ends),
            deadline=began + (service.limits.deadline or math.inf),
            speculate=request.speculation,
            grammar=grammar,
            scores_prompt=request.prompt_logprobs is not None and choice % request.n == 0,
            priority=request.priority,
        )
        for choice, (prompt, limit) in enumerate(row for row in rows for _ in range(request.n))
    ]
    tokenizer, spell = service.model.format.tokenizer, service.spell
    if request.offered and service.model.tools is not None:
        tokenizer = service.model.tools.tokenizer  # also decodes the marks of calls
    least = request.min_tokens
    choices = [Choice(tokenizer, one.prompt, strings, gap, spell, least) for one in requests]
    try:
        event_queue = await service.worker.submit(requests)
    except QueueFull as error:
        # The time until all choices fit into the queue, up to a limit that clients accept.
        wait = min(max(1, math.ceil(len(requests) * error.seconds)), _LONGEST_WAIT)
        headers = {"Retry-After": str(wait)}
        raise ApiError(429, str(error), code="queue_full", headers=headers) from None
    except InputError as error:
        raise ApiError(400, str(error), field=request.prompt_field) from None
    except EngineFailedError:
        raise server_ends() from None
    tokens = sum(map(len, prompts))
    return Job(service, event_queue, choices, seed, tokens, request.n, began)


def _compile(service: Service, request: BaseRequest) -> CompiledGrammar | None:
    """Compile the request's grammar, if any; a large schema takes a second."""
    if request.form is None:
        return None
    field, grammar = request.form
    try:
        return service.grammars.compile(grammar)
    except InputError as error:
        raise ApiError(400, f"{field}: {error}", field=field) from None


def _sampling(request: BaseRequest) -> SamplingConfig:
    try:
        return SamplingConfig(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=request.logit_bias or None,
            min_tokens=request.min_tokens,
        )
    except FieldError as error:
        raise ApiError(400, f"{error.field} {error.problem}", field=error.field) from None


def _limit(service: Service, request: BaseRequest, prompt: Sequence[int]) -> int:
    """Return the requested limit on new tokens, or the number that fits after the prompt."""
    most = service.model.context_length
    limit = request.max_tokens or max(1, most - len(prompt))
    if len(prompt) + limit > most:
        # If the prompt alone fits, name the client's limit in the error.
        names = [] if len(prompt) >= most else ["max_completion_tokens", "max_tokens"]
        blamed = next(
            (name for name in names if name in request.model_fields_set), request.prompt_field
        )
        ones = "one is" if limit == 1 else "ones are"
        raise ApiError(
            400,
            f"{request.prompt_field} has {len(prompt)} tokens and {limit} new {ones} asked for, "
            f"but prompt and answer together have room for {most}; shorten the prompt, or ask "
            "for fewer new tokens.",
            field=blamed,
            code="context_length_exceeded",
        )
    return limit


def _deadline_exceeded(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"The answer was not complete after {seconds:g} seconds, the server's limit; ask for fewer "
        "tokens, or send the request again when the server is less busy.",
        code="deadline_exceeded",
    )
