"""The server's metrics for Prometheus."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import MirrorCounts
from redrafter_jax.models.attention import PAGE
from redrafter_jax.serving.request_counts import NAME, RequestCounts

# Bucket bounds, from one decode step of a small model to the minutes of a long answer.
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_GAINED = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10)


class Metrics(RequestCounts, Collector):
    """Counts and times since the server's start, and the engine's counts at the time of reading."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        named: Any = {"namespace": NAME, "registry": self._registry}
        count = partial(Counter, **named)
        histogram = partial(Histogram, buckets=_SECONDS, **named)
        self.completion_tokens = count("completion_tokens", "Tokens of answers.")
        self.queue = histogram(
            "queue_seconds", "From a request to the admission of its prompt into a slot."
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "From a request to the first token of an answer, the queue included.",
        )
        self.output_token = histogram(
            "time_per_output_token_seconds", "Seconds per token after the first, of one answer."
        )
        self.acceptance_length = histogram(
            "acceptance_length",
            "Of an answer, tokens gained per target call after prefill.",
            buckets=_GAINED,
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read from the engine."""
        engine, sums = self._engine, self._engine.counters
        mirror = MirrorCounts() if engine.mirror is None else engine.mirror.counts
        for name, text, value in (
            ("active_slots", "Requests that have a slot.", engine.active),
            ("waiting_requests", "Requests that wait for a slot.", engine.waiting),
            ("cache_pages", "Pages of the cache.", engine.pages),
            ("cache_page_tokens", "Tokens that a page of the cache holds.", PAGE),
            ("cache_pages_used", "Pages that running requests have.", engine.pages_used),
            (
                "cache_usage",
                "Share of the cache's pages that running requests have, from 0 to 1.",
                engine.pages_used / engine.pages,
            ),
            (
                "compiled_after_warm_up",
                "Programs that were compiled since the warm-up; more than 0 is a fault.",
                sums.compiled,
            ),
        ):
            yield GaugeMetricFamily(f"{NAME}_{name}", text, value)
        for name, text, value in (
            (
                "target_calls",
                "Target calls, each counted for every row decoded.",
                sums.target_calls,
            ),
            (
                "drafted_calls",
                "Target calls that had a draft to verify, each counted for every row decoded.",
                sums.drafted_calls,
            ),
            (
                "gained_tokens",
                "Tokens gained by target calls; over target_calls it is the acceptance length.",
                sums.gained,
            ),
            (
                "preemptions",
                "Times that a request gave up its slot, to go on later, because pages ran out.",
                engine.preemptions,
            ),
            ("steps", "Decode steps, whatever their number of rows.", sums.steps),
            ("prompt_tokens", "Prompt tokens of requests that got a slot.", sums.prompt_tokens),
            (
                "reused_prompt_tokens",
                "Prompt tokens that were in a cache already.",
                sums.reused_tokens,
            ),
            (
                "mirror_outcomes",
                "Decode steps of rows that go on, with drafting while the target verifies.",
                mirror.outcomes,
            ),
            (
                "mirror_prepared",
                "Those of mirror_outcomes whose next tree was ready.",
                mirror.prepared,
            ),
        ):
            yield CounterMetricFamily(f"{NAME}_{name}", text, value)
        # Labels that may occur have a value from the start, or rates would miss their first counts.
        depths = range(1, engine.longest_path)
        # Drafters that have drafted too: a grammar proposes only for requests that have one.
        by = dict.fromkeys((*engine.drafted_by, *+sums.drafted))
        for name, text, label, counts in (
            (
                "drafted_tokens",
                "Nodes that a drafter proposed.",
                "drafter",
                {drafter: sums.drafted[drafter] for drafter in by},
            ),
            (
                "accepted_tokens",
                "Drafted tokens that the target chose too.",
                "drafter",
                {drafter: sums.accepted[drafter] for drafter in by},
            ),
            (
                "accepted_tokens_at_depth",
                "Drafted tokens that the target chose too, by their depth in the tree, from 1 on.",
                "depth",
                {str(depth): sums.accepted_at[depth] for depth in depths},
            ),
        ):
            family = CounterMetricFamily(f"{NAME}_{name}", text, labels=[label])
            for key, count in counts.items():
                family.add_metric([key], count)
            yield family
