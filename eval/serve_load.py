"""`python -m eval serve-load`: how long a server takes to answer, by the rate of requests.

The load is open: requests arrive at random times, whether or not those before are answered, as from
independent users. So a server that is too slow gets a queue, and the latencies show it.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from typing import Any

import httpx
import numpy as np
from rich.table import Table

from redrafter_jax.acceptance import FEW, repeats_itself
from redrafter_jax.command_line import make_folder
from redrafter_jax.commands.terminal import log
from redrafter_jax.errors import InputError
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import read_prompts

from .config import ServeLoadSettings
from .report import describe_sampling, make_table, number, show, write_report
from .served import DEFINITION, compare_rates, verdict

METHODS = {"speculative": True, "baseline": False}
DEFINITIONS = {
    "prompts": "every rate and method asks those that follow in the file, so that no cache of the "
    "server holds them: methods are compared over many prompts, not prompt by prompt",
    "rate": "requests per second, of a Poisson process: the gaps between two are independent",
    "sent": "requests that arrived",
    "errors": "those without a whole answer, by the server's code or by what broke",
    "tokens_per_second": "of whole answers, from the first arrival to the last answer",
    "latency": "seconds from arrival to the end of the answer: percentiles 50, 90, 99",
    "first_token": "seconds from arrival to the first token: percentiles 50, 90, 99",
    "output_token": "seconds from the first token to the last, by tokens after the first: "
    "percentiles 50, 90, 99",
    "acceptance_length": "mean tokens gained per target call after prefill",
    **DEFINITION,
    "device": "of this side, that asked; the server's is not known",
}
_PERCENTILES = (50, 90, 99)
# The longest time that a server may compile.
_WARM_UP_SECONDS = 600


@dataclass
class RequestResult:
    """What became of a request; times are seconds since its arrival.

    Attributes:
      latency: time to its end.
      first_token: time to its first token; None if there was none.
      tokens: of the answer.
      calls: target calls after prefill.
      accepted_by: tokens of the answer by the drafter that proposed them.
      repeating: whether it repeats itself.
      short: whether it has few tokens.
      error: None for a complete answer.
    """

    latency: float = 0.0
    first_token: float | None = None
    tokens: int = 0
    calls: int = 0
    accepted_by: dict[str, int] = field(default_factory=dict)
    repeating: bool = False
    short: bool = False
    error: str | None = None


def measure_load(settings: ServeLoadSettings) -> None:
    """Ask at every rate, with and without speculation in turns; write a report and a chart.

    Raises:
      InputError: the server cannot be reached, does not become ready or answers no request, or the
        prompts cannot be read.
    """
    from .charts import write_load_chart  # matplotlib is slow to import

    prompts = [prompt.turns[0] for prompt in read_prompts(settings.prompts, settings.prompt_count)]
    make_folder(settings.report_dir, "report_dir")
    model = _find_model(settings)
    # Each method goes first at every other rate.
    orders = cycle([list(METHODS), list(METHODS)[::-1]])
    cases = [(rate, name) for rate in settings.rates for name in next(orders)]
    runs = []
    # A prompt that was asked just before may still be in a cache of the server.
    following = cycle(prompts)
    for rate, name in track(cases, len(cases), "rates"):
        arrivals = arrival_times(rate, settings.seconds, settings.max_requests, settings.first_seed)
        asked = list(islice(following, len(arrivals)))
        answers = asyncio.run(_ask_all(settings, model, asked, arrivals, METHODS[name]))
        seconds = max(
            at + answer.latency for at, answer in zip(arrivals, answers, strict=True)
        ) - min(arrivals)
        measures = summarize(answers, seconds)
        runs.append(
            {"rate": rate, "method": name, **measures, "answers": list(map(asdict, answers))}
        )
    if not any(run["latency"] for run in runs):
        kinds = sum((Counter(run["errors"]) for run in runs), Counter[str]())
        told = ", ".join(f"{kind} {count} times" for kind, count in kinds.most_common())
        raise InputError(
            f"url={settings.url} answered none of {sum(kinds.values())} requests ({told}); the "
            "server's log says why."
        )
    path = settings.report_dir / "serve_load.json"
    speedups = [rate._asdict() for rate in compare_rates(runs)]
    found = {"model": model, "runs": runs, "speedups": speedups, "verdict": verdict(runs)}
    report = write_report(path, found, settings, DEFINITIONS)
    title = f"{model['id']}, {describe_sampling(settings.sampling)}"
    write_load_chart(report, title, settings.report_dir / "serve_load.png")
    show(path, _table(title, runs), *_error_tables(runs))
    print(report["verdict"])


def arrival_times(rate: float, seconds: float, most: int, seed: int) -> list[float]:
    """Arrival times of a Poisson process, in seconds after the first, which is 0.

    Args:
      rate: mean requests per second.
      seconds: end of the window; all arrive before it.
      most: largest number of requests, 1 or more.
      seed: the same one gives the same times.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, most)
    times = np.cumsum(gaps) - gaps[0]
    return times[times < seconds].tolist()


def summarize(answers: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    """The measures of one rate; `DEFINITIONS` explains them.

    Args:
      answers: to all requests.
      seconds: from the first arrival to the last answer.
    """
    whole = [answer for answer in answers if answer.error is None]
    calls = sum(answer.calls for answer in whole)
    gained = sum(answer.tokens - 1 for answer in whole)
    return {
        "sent": len(answers),
        "errors": dict(Counter(answer.error for answer in answers if answer.error)),
        "tokens_per_second": sum(answer.tokens for answer in whole) / seconds,
        "latency": _percentiles([answer.latency for answer in whole]),
        "first_token": _percentiles([one.first_token for one in whole if one.first_token]),
        "output_token": _percentiles(
            [
                (answer.latency - answer.first_token) / (answer.tokens - 1)
                for answer in whole
                if answer.first_token and answer.tokens > 1
            ]
        ),
        "acceptance_length": gained / calls if calls else None,
    }


def _percentiles(values: Sequence[float]) -> list[float] | None:
    return np.percentile(values, _PERCENTILES).tolist() if values else None


def _find_model(settings: ServeLoadSettings) -> dict[str, Any]:
    """What is served, once the server is ready: while it warms up it refuses every request."""
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
        # Later lines of httpx's message are no help.
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"url={settings.url} is no server that is ready within {_WARM_UP_SECONDS} s "
            f"({reason}); start one with `redrafter serve`, give its address as url and its key as "
            "REDRAFTER_API_KEY, or see its log."
        ) from None


def _client[Client: (httpx.Client, httpx.AsyncClient)](
    settings: ServeLoadSettings, kind: type[Client]
) -> Client:
    # Not a setting: reports state all settings.
    key = os.environ.get("REDRAFTER_API_KEY")
    return kind(
        base_url=settings.url,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        timeout=settings.timeout,
        limits=httpx.Limits(max_connections=None),
    )


async def _ask_all(
    settings: ServeLoadSettings,
    model: dict[str, Any],
    prompts: Sequence[str],
    arrivals: Sequence[float],
    speculation: bool,
) -> list[RequestResult]:
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
                # Other lines of server-sent events are comments, which proxies keep alive with.
                if answer.error is None and line.startswith("data:"):
                    now = time.monotonic() - arrived
                    tokens += _read_event(answer, line.removeprefix("data:"), now)
        if not answer.tokens:  # another kind of server, which ignores unknown fields
            answer.error = answer.error or "no draft_trace"
    except httpx.HTTPError as error:
        answer.error = type(error).__name__
    answer.latency = time.monotonic() - arrived
    answer.repeating, answer.short = repeats_itself(tokens), len(tokens) <= FEW
    return answer


def _read_event(answer: RequestResult, data: str, now: float) -> list[int]:
    """The ids of the event's tokens; the answer so far counts them."""
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
            case _:  # the end, or another server's
                pass
    return tokens


def _kind_of(body: Any) -> str | None:
    """What an error calls itself, which gateways write in their own ways; None if it does not."""
    match body:
        case {"error": {"code": str() | int() as kind}} | {"error": {"type": str() as kind}}:
            return str(kind)
        case _:
            return None


def _parsed(text: str) -> Any:
    """What JSON holds; None of other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _table(title: str, runs: Sequence[dict[str, Any]]) -> Table:
    latencies = [f"p{share} s" for share in _PERCENTILES]
    columns = ["rate", "method", "sent", "errors", "tok/s", *latencies, "first", "len"]
    return make_table(
        f"{title}: latency, median time to the first token, acceptance length",
        columns,
        (
            (
                f"{run['rate']:g}",
                run["method"],
                str(run["sent"]),
                str(sum(run["errors"].values())),
                f"{run['tokens_per_second']:.0f}",
                *(number(value, ".2f") for value in run["latency"] or [None] * 3),
                number((run["first_token"] or [None])[0], ".2f"),
                number(run["acceptance_length"], ".2f"),
            )
            for run in runs
        ),
        text_columns=2,
    )


def _error_tables(runs: Sequence[dict[str, Any]]) -> list[Table]:
    """What the errors were; none where there were none."""
    rows = [
        (f"{run['rate']:g}", run["method"], kind, str(count))
        for run in runs
        for kind, count in run["errors"].items()
    ]
    columns = ("rate", "method", "error", "requests")
    return [make_table("Requests without a whole answer", columns, rows, 3)] if rows else []
