"""An open-loop load on a server: requests arrive at random times, independent of the answers."""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np

from redrafter_jax.acceptance import FEW, repeats_itself
from redrafter_jax.commands.terminal import log
from redrafter_jax.errors import InputError

from .config import ServeLoadSettings

# Maximum warm-up time of a server.
_WARM_UP_SECONDS = 600


@dataclass
class RequestResult:
    """The result of a request; times are in seconds since the arrival of the request.

    Attributes:
      latency: time until the end of the answer.
      first_token: time until the first token; None if there is no token.
      tokens: number of tokens of the answer.
      calls: number of target calls after prefill.
      accepted_by: number of accepted tokens of the answer, by the drafter that proposed them.
      repeating: whether the answer repeats itself, as `repeats_itself` defines it.
      short: whether the answer has at most `FEW` tokens.
      error: kind of the error; None for a complete answer.
    """

    latency: float = 0.0
    first_token: float | None = None
    tokens: int = 0
    calls: int = 0
    accepted_by: dict[str, int] = field(default_factory=dict)
    repeating: bool = False
    short: bool = False
    error: str | None = None


def arrival_times(rate: float, seconds: float, most: int, seed: int) -> list[float]:
    """Draw arrival times of a Poisson process, in seconds; the first request arrives at 0.

    Args:
      rate: mean number of requests per second.
      seconds: length of the time in which requests arrive.
      most: maximum number of requests, at least 1.
      seed: random seed.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, most)
    times = np.cumsum(gaps) - gaps[0]
    return times[times < seconds].tolist()


def find_model(settings: ServeLoadSettings) -> dict[str, Any]:
    """Wait until the server is ready, and return its entry of `/v1/models`.

    Raises:
      InputError: no server is ready in time.
    """
    try:
        with _client(settings, httpx.Client) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]
            found = {"chat": False, **model, "id": model["id"]}
            for seconds in range(_WARM_UP_SECONDS):
                if client.get("/health").status_code != 503:
                    break
                if seconds % 10 == 0:
                    log(f"the server warms up: {seconds} s")
                time.sleep(1)
            client.get("/health").raise_for_status()
            return found
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
        # Later lines of httpx's message do not help.
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"No server is ready at url={settings.url} within {_WARM_UP_SECONDS} s "
            f"({reason}). If one is running, see its log; otherwise start one with `redrafter "
            "serve`, and set url to its address and REDRAFTER_API_KEY to its key."
        ) from None


def _client[Client: (httpx.Client, httpx.AsyncClient)](
    settings: ServeLoadSettings, kind: type[Client]
) -> Client:
    # The key is not a setting, since reports contain all settings.
    key = os.environ.get("REDRAFTER_API_KEY")
    return kind(
        base_url=settings.url,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        timeout=settings.timeout,
        limits=httpx.Limits(max_connections=None),
    )


async def ask_all(
    settings: ServeLoadSettings,
    model: dict[str, Any],
    prompts: Sequence[str],
    arrivals: Sequence[float],
    speculation: bool,
) -> list[RequestResult]:
    """Send each prompt at its arrival time, and read all answers to their end.

    Args:
      settings: address of the server and settings of the requests.
      model: the served model, from `find_model`.
      prompts: one prompt for each arrival.
      arrivals: arrival times in seconds, from `arrival_times`.
      speculation: whether the server may draft.

    Returns:
      The results in the order of the prompts.
    """
    async with _client(settings, httpx.AsyncClient) as client:
        began = time.monotonic()

        async def arrive(number: int, at: float) -> RequestResult:
            await asyncio.sleep(at - (time.monotonic() - began))
            seed = settings.first_seed + number
            body = _body(settings, model, prompts[number], seed, speculation)
            path = "/v1/chat/completions" if model["chat"] else "/v1/completions"
            return await _ask(client, path, body, began + at)

        return await asyncio.gather(*map(arrive, range(len(arrivals)), arrivals))


def _body(
    settings: ServeLoadSettings, model: dict[str, Any], prompt: str, seed: int, speculation: bool
) -> dict[str, Any]:
    turn = {"role": "user", "content": prompt}
    asked = {"messages": [turn]} if model["chat"] else {"prompt": prompt}
    sampling = {
        name: value for name, value in asdict(settings.sampling).items() if value is not None
    }
    return {
        "model": model["id"],
        **asked,
        **sampling,
        "max_tokens": settings.max_new_tokens,
        "seed": seed,
        "stream": True,
        "speculation": speculation,
        "draft_trace": True,
    }


async def _ask(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], arrived: float
) -> RequestResult:
    answer, tokens = RequestResult(), []
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                answer.error = _kind_of(_parsed(response.text)) or f"HTTP {response.status_code}"
            async for line in response.aiter_lines():
                # Other lines are comments, by which proxies keep the connection alive.
                if answer.error is None and line.startswith("data:"):
                    now = time.monotonic() - arrived
                    tokens += _read_event(answer, line.removeprefix("data:"), now)
        if not answer.tokens:  # another server, which ignores unknown fields
            answer.error = answer.error or "no draft_trace"
    except httpx.HTTPError as error:
        answer.error = type(error).__name__
    answer.latency = time.monotonic() - arrived
    answer.repeating, answer.short = repeats_itself(tokens), len(tokens) <= FEW
    return answer


def _read_event(answer: RequestResult, data: str, now: float) -> list[int]:
    """Add an event to the answer; return the ids of the tokens in the event."""
    tokens: list[int] = []
    if not data.strip() or data.strip() == "[DONE]":
        return tokens
    event = _parsed(data)
    choices = event.get("choices") if isinstance(event, dict) else None
    if not isinstance(choices, list):
        unnamed = "error" if isinstance(event, dict) and "error" in event else "no event of the API"
        answer.error = _kind_of(event) or unnamed
        return tokens
    for choice in choices:
        match choice:
            case {"draft_trace": [*_, {"token": int(), "call": int(call), "origin": _}] as trace}:
                answer.first_token = answer.first_token or now
                answer.tokens += len(trace)
                answer.calls = call
                tokens += [one["token"] for one in trace]
                for source in (one["origin"] for one in trace if one["origin"]):
                    answer.accepted_by[source] = answer.accepted_by.get(source, 0) + 1
            case _:  # the last event, or one of another server
                pass
    return tokens


def _kind_of(body: Any) -> str | None:
    """The code or the type of an error, in the formats of several gateways; None without one."""
    match body:
        case {"error": {"code": str() | int() as kind}} | {"error": {"type": str() as kind}}:
            return str(kind)
        case _:
            return None


def _parsed(text: str) -> Any:
    """Parse JSON; None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
