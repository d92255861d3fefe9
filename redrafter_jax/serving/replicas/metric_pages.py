"""Joins the Prometheus pages of several replicas."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def joined_pages(pages: Mapping[str, str]) -> bytes:
    """Join the Prometheus pages of several replicas, each given by the replica's name.

    Each sample gets the name of its replica as the label `replica`.
    """
    families: dict[str, Metric] = {}
    for name, page in pages.items():
        for family in text_string_to_metric_families(page):
            joined = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            joined.samples += [
                sample._replace(labels=sample.labels | {"replica": name})
                for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
