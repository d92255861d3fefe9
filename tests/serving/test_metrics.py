"""What Prometheus reads of a server, and what a dashboard and the documentation name of it."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import yaml
from fake_engine import FakeEngine
from places import ROOT
from prometheus_client.parser import text_string_to_metric_families
from servers import HTTP, body, measured, post, serving

from redrafter_jax.serving.openai_api import ROUTES

DASHBOARD = ROOT / "docs" / "grafana.json"
# What Prometheus adds to every sample that it reads.
ADDED = {"instance", "job"}


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The metrics of a server that has answered a request and refused one."""
    with serving(FakeEngine()) as base:
        assert post(base, json=body()).status_code == 200
        assert post(base, json=body(top_k="a")).status_code == 400
        yield HTTP.get(f"{base}/metrics").text


@pytest.fixture(scope="module")
def labels(page: str) -> dict[str, set[str]]:
    """By name of a sample, the labels that it has."""
    families = text_string_to_metric_families(page)
    return {sample.name: set(sample.labels) for one in families for sample in one.samples}


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


@pytest.fixture(scope="module")
def guide() -> str:
    return (ROOT / "docs" / "serving.md").read_text()


def test_sums_of_the_engine_are_told_by_drafter_and_by_depth() -> None:
    engine = FakeEngine()
    engine.longest_path = 4
    with serving(engine) as base:
        told = measured(base)
        # Of all that may come: a rate misses what a series begins with.
        assert told['redrafter_drafted_tokens_total{drafter="lookup"}'] == 0
        assert told['redrafter_accepted_tokens_total{drafter="lookup"}'] == 0
        depths = [f'redrafter_accepted_tokens_at_depth_total{{depth="{n}"}}' for n in (1, 2, 3)]
        assert [told[depth] for depth in depths] == [0, 0, 0]
        engine.counters.drafted.update(lookup=9)
        engine.counters.accepted.update(lookup=5)
        engine.counters.accepted_at.update({1: 3, 2: 2})
        engine.counters.drafted_calls = 3
        told = measured(base)
    assert told['redrafter_drafted_tokens_total{drafter="lookup"}'] == 9
    assert told['redrafter_accepted_tokens_total{drafter="lookup"}'] == 5
    assert [told[depth] for depth in depths] == [3, 2, 0]
    assert told["redrafter_drafted_calls_total"] == 3
    assert told["redrafter_cache_page_tokens"] == 64


def test_every_query_of_the_dashboard_names_what_a_server_tells(
    panels: list[dict[str, Any]], labels: dict[str, set[str]]
) -> None:
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"redrafter_\w+", query)
        assert names
        for name in names:
            assert name in labels, f"{name} of {query!r} is none of a server's"
        grouped = re.findall(r"by \((\w+)\) \(rate\((\w+)", query)
        assert len(grouped) == query.count("by (")
        for label, name in grouped:
            assert label in labels[name] | ADDED, f"{query!r}: {name} has no label {label}"
        for name in re.findall(r"rate\((\w+)", query):
            assert name.endswith(("_total", "_bucket")), f"{query!r}: a gauge has no rate"
        assert query.count("(") == query.count(")")


def test_the_dashboard_is_one_that_grafana_can_lay_out(panels: list[dict[str, Any]]) -> None:
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Load", "Latency", "Speculation", "Prompt cache"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: list[set[tuple[int, int]]] = []
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        across = range(place["x"], place["x"] + place["w"])
        down = range(place["y"], place["y"] + place["h"])
        cells.append({(x, y) for x in across for y in down})
    assert not any(one & other for one, other in combinations(cells, 2)), "panels overlap"
    variables = {one["name"] for one in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert [one["refId"] for one in panel["targets"]] == list("ABC")[
                : len(panel["targets"])
            ]
            assert all(one["legendFormat"] for one in panel["targets"])
            used = {
                name for one in panel["targets"] for name in re.findall(r"\$(\w+)", one["expr"])
            }
            assert used <= variables | {"__rate_interval"}


def test_the_documentation_lists_every_metric_and_no_other(page: str, guide: str) -> None:
    table = guide.split("| name (`redrafter_...`) | |\n")[1].split("\n\n")[0]
    listed = {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    told = set()
    for family in text_string_to_metric_families(page):
        total = "_total" if family.type == "counter" else ""
        told.add(family.name.removeprefix("redrafter_") + total)
    # Each of the client's counters and histograms also tells when it began.
    assert listed == {name for name in told if not name.endswith("_created")}


def test_an_endpoint_picker_is_given_gauges_that_a_server_tells(page: str, guide: str) -> None:
    blocks = [block.split("```")[0] for block in guide.split("```yaml\n")[1:]]
    (config,) = [yaml.safe_load(block) for block in blocks if "EndpointPickerConfig" in block]
    types = [plugin["type"] for plugin in config["plugins"]]
    assert {one["pluginRef"] for one in config["schedulingProfiles"][0]["plugins"]} <= set(types)
    parameters = config["plugins"][types.index("core-metrics-extractor")]["parameters"]
    (engine,) = parameters["engineConfigs"]
    assert parameters["defaultEngine"] == engine["name"]
    gauges = {
        family.name for family in text_string_to_metric_families(page) if family.type == "gauge"
    }
    assert {name for key, name in engine.items() if key.endswith("Spec")} <= gauges


def test_requests_are_counted_by_route_and_outcome(page: str) -> None:
    for outcome in ("finished", "refused"):
        line = f'redrafter_requests_total{{outcome="{outcome}",route="{ROUTES[1]}"}} 1.0'
        assert line in page.splitlines()
