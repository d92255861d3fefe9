"""`python -m eval serve-load`: latency of a server at different request rates.

Requests arrive at random times, like those of independent users, whether or not earlier requests
have been answered. If the server is too slow, a queue builds up and latencies rise.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from typing import Any

import numpy as np
from rich.table import Table

from redrafter_jax.command_line import make_folder
from redrafter_jax.errors import InputError
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import read_prompts

from .config import ServeLoadSettings
from .load import RequestResult, arrival_times, ask_all, find_model
from .report import describe_sampling, make_table, number, show, write_report
from .served import DEFINITION, compare_rates, verdict

METHODS = {"speculative": True, "baseline": False}
DEFINITIONS = {
    "prompts": "every rate and method takes the next prompts of the file, so that the server has "
    "not cached them: methods are compared over many prompts, not prompt by prompt",
    "rate": "requests per second of a Poisson process, in which the gaps are independent",
    "sent": "number of requests",
    "errors": "number of requests without a complete answer, by the server's error code or the "
    "exception",
    "tokens_per_second": "tokens of complete answers per second from the first arrival to the last "
    "answer",
    "latency": "seconds from arrival to the end of the answer: percentiles 50, 90, 99",
    "first_token": "seconds from arrival to the first token: percentiles 50, 90, 99",
    "output_token": "seconds per token after the first: percentiles 50, 90, 99",
    "acceptance_length": "mean tokens gained per target call after prefill",
    **DEFINITION,
    "device": "of the client; the server's device is not known",
}
_PERCENTILES = (50, 90, 99)


def measure_load(settings: ServeLoadSettings) -> None:
    """Send requests at every rate, once with and once without speculation; write the report.

    Raises:
      InputError: the server cannot be reached, does not become ready or answers no request, or the
        prompts cannot be read.
    """
    from .charts import write_load_chart  # matplotlib is slow to import

    prompts = [prompt.turns[0] for prompt in read_prompts(settings.prompts, settings.prompt_count)]
    make_folder(settings.report_dir, "report_dir")
    model = find_model(settings)
    # Each method is first at every other rate.
    orders = cycle([list(METHODS), list(METHODS)[::-1]])
    cases = [(rate, name) for rate in settings.rates for name in next(orders)]
    runs = []
    # Take further prompts each time, since the server may cache recent ones.
    following = cycle(prompts)
    for rate, name in track(cases, len(cases), "rates"):
        arrivals = arrival_times(rate, settings.seconds, settings.max_requests, settings.first_seed)
        asked = list(islice(following, len(arrivals)))
        answers = asyncio.run(ask_all(settings, model, asked, arrivals, METHODS[name]))
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
            f"url={settings.url} answered none of {sum(kinds.values())} requests ({told}); find "
            "the cause in the server's log."
        )
    path = settings.report_dir / "serve_load.json"
    speedups = [rate._asdict() for rate in compare_rates(runs)]
    found = {"model": model, "runs": runs, "speedups": speedups, "verdict": verdict(runs)}
    report = write_report(path, found, settings, DEFINITIONS)
    title = f"{model['id']}, {describe_sampling(settings.sampling)}"
    write_load_chart(report, title, settings.report_dir / "serve_load.png")
    show(path, _table(title, runs), *_error_tables(runs))
    print(report["verdict"])


def summarize(answers: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    """Compute the measures of one method at one rate; see `DEFINITIONS`.

    Args:
      answers: results of all requests.
      seconds: seconds from the first arrival to the last answer.
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
    """A table of the errors; no table if there are no errors."""
    rows = [
        (f"{run['rate']:g}", run["method"], kind, str(count))
        for run in runs
        for kind, count in run["errors"].items()
    ]
    columns = ("rate", "method", "error", "requests")
    return [make_table("Requests without a whole answer", columns, rows, 3)] if rows else []
