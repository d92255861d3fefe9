"""Pages of several replicas as one that Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from redrafter_jax.serving.replicas.metric_pages import joined_pages

PAGE = """# HELP redrafter_requests_total HTTP requests.
# TYPE redrafter_requests_total counter
redrafter_requests_total{{outcome="finished"}} {count}.0
# HELP redrafter_active_slots Slots.
# TYPE redrafter_active_slots gauge
redrafter_active_slots {count}.0
# HELP redrafter_queue_seconds Seconds.
# TYPE redrafter_queue_seconds histogram
redrafter_queue_seconds_bucket{{le="+Inf"}} {count}.0
redrafter_queue_seconds_count {count}.0
redrafter_queue_seconds_sum 0.5
"""


def test_each_sample_says_whose_it_is() -> None:
    joined = joined_pages({"a": PAGE.format(count=1), "b": PAGE.format(count=2)}).decode()
    families = {family.name: family for family in text_string_to_metric_families(joined)}
    assert {name: family.type for name, family in families.items()} == {
        "redrafter_requests": "counter",
        "redrafter_active_slots": "gauge",
        "redrafter_queue_seconds": "histogram",
    }
    samples = families["redrafter_requests"].samples
    assert [(one.labels["replica"], one.labels["outcome"], one.value) for one in samples] == [
        ("a", "finished", 1.0),
        ("b", "finished", 2.0),
    ]
    assert joined.count("# TYPE redrafter_active_slots gauge") == 1
    assert 'redrafter_queue_seconds_sum{replica="b"} 0.5' in joined


def test_no_pages_are_an_empty_one() -> None:
    assert joined_pages({}) == b""
