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
    """Counts and times since the start of the server, and counts that are read from the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        named: Any = {"namespace": NAME, "registry": self._registry}
        count = partial(Counter, **named)
        histogram = partial(Histogram, buckets=_SECONDS, **named)
        self.completion_tokens = count("completion_tokens", "Tokens of answers.")
        self.queue = histogram(
            "queue_seconds", "Seconds from the arrival of a request until it gets a slot."
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "Seconds from the arrival of a request to an answer's first token, the queue included.",
        )
        self.output_token = histogram(
            "time_per_output_token_seconds",
            "Seconds per token of one answer after its first token.",
        )
        self.acceptance_length = histogram(
            "acceptance_length",
            "Tokens of an answer gained per target call after prefill.",
            buckets=_GAINED,
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the engine."""
        engine, sums = self._engine, self._engine.counters
        mirror = MirrorCounts() if engine.mirror is None else engine.mirror.counts
        for name, text, value in (
            ("active_slots", "Requests that have a slot in the batch.", engine.active),
            ("waiting_requests", "Requests that wait for a slot.", engine.waiting),
            ("cache_pages", "Pages of the cache.", engine.pages),
            ("cache_page_tokens", "Tokens that a page of the cache holds.", PAGE),
            ("cache_pages_used", "Cache pages that running requests use.", engine.pages_used),
            (
                "cache_usage",
                "Share of the cache pages that running requests use, from 0 to 1.",
                engine.pages_used / engine.pages,
            ),
            (
                "compiled_after_warm_up",
                "Programs that were compiled after the warm-up; a value above 0 is a fault.",
                sums.compiled,
            ),
        ):
            yield GaugeMetricFamily(f"{NAME}_{name}", text, value)
        for name, text, value in (
            (
                "target_calls",
                "Target calls, counted once for every request that a call decodes.",
                sums.target_calls,
            ),
            (
                "drafted_calls",
                "Target calls with a draft to verify, counted once for every request with a draft.",
                sums.drafted_calls,
            ),
            (
                "gained_tokens",
                "Tokens gained by target calls; over target_calls, this is the acceptance length.",
                sums.gained,
            ),
            (
                "preemptions",
                "Number of times that a request lost its slot because cache pages ran out.",
                engine.preemptions,
            ),
            ("steps", "Decode steps, counted once for the whole batch.", sums.steps),
            ("prompt_tokens", "Prompt tokens of requests that got a slot.", sums.prompt_tokens),
            (
                "reused_prompt_tokens",
                "Prompt tokens that were already in the cache.",
                sums.reused_tokens,
            ),
            (
                "mirror_outcomes",
                "Times that a request needed its next tree, with --mirror-layer.",
                mirror.outcomes,
            ),
            (
                "mirror_prepared",
                "Times in mirror_outcomes at which the next tree had been drafted ahead.",
                mirror.prepared,
            ),
        ):
            yield CounterMetricFamily(f"{NAME}_{name}", text, value)
        # Labels that may occur have a value from the start, because rates would otherwise miss
        # their first counts.
        depths = range(1, engine.longest_path)
        # Other drafters get a label once they have drafted: a grammar, if a request has one.
        by = dict.fromkeys((*engine.drafted_by, *+sums.drafted))
        for name, text, label, counts in (
            (
                "drafted_tokens",
                "Tree nodes that a drafter proposed.",
                "drafter",
                {drafter: sums.drafted[drafter] for drafter in by},
            ),
            (
                "accepted_tokens",
                "Drafted tokens that the target accepted.",
                "drafter",
                {drafter: sums.accepted[drafter] for drafter in by},
            ),
            (
                "accepted_tokens_at_depth",
                "Drafted tokens that the target accepted, by their depth in the tree, from 1 on.",
                "depth",
                {str(depth): sums.accepted_at[depth] for depth in depths},
            ),
        ):
            family = CounterMetricFamily(f"{NAME}_{name}", text, labels=[label])
            for key, count in counts.items():
                family.add_metric([key], count)
            yield family
