"""Counts of HTTP requests by route and outcome, for Prometheus."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, generate_latest

from redrafter_jax.serving.openai_errors import ApiError

NAME = "redrafter"
# The routes whose requests are counted.
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

Outcome = Literal["finished", "refused", "queue_full", "deadline", "client_gone", "failed"]


class RequestCounts:
    """Counts of HTTP requests since the server started, in a separate Prometheus registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "requests",
            "HTTP requests by outcome.",
            ["route", "outcome"],
            namespace=NAME,
            registry=self._registry,
        )

    def count(self, route: str, outcome: Outcome) -> None:
        """Count a request of this route that ended with this outcome."""
        self._requests.labels(route, outcome).inc()

    def count_refusal(self, route: str, error: ApiError) -> None:
        """Count a request that was answered with an error, if its route is one of `ROUTES`."""
        if route not in ROUTES:
            return
        match error.status_code, error.code:
            case 429, _:
                outcome = "queue_full"
            case _, "client_gone":
                outcome = "client_gone"
            case status, code if status < 500 or code == "not_ready":
                outcome = "refused"
            case _:
                outcome = "failed"
        self.count(route, outcome)

    def page(self) -> bytes:
        """All metrics of the registry in Prometheus's text format."""
        return generate_latest(self._registry)
