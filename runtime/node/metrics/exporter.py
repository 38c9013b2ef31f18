"""The workers' tables and the supervisor's own figures, in Prometheus's text format.

Every sample says which node and which model it is of, so that one Prometheus can hold many nodes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.node.metrics.columns import Histogram
from runtime.node.metrics.table import WorkerTable

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class NodeCollector(Collector):
    """Exports every worker's table, and what `more` gives, with `constant` labels on all of it."""

    def __init__(
        self,
        tables: Mapping[str, WorkerTable],
        more: Iterable[Callable[[], Iterable[Metric]]] = (),
        constant: Mapping[str, str] | None = None,
    ) -> None:
        self._tables = tables
        self._more = tuple(more)
        self._constant = dict(constant or {})

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            family.samples = [sample._replace(labels=self._constant | sample.labels) for sample in family.samples]
            yield family

    def _families(self) -> Iterator[Metric]:
        yield from _of_tables(self._tables)
        for families in self._more:
            yield from families()


_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


def _of_tables(tables: Mapping[str, WorkerTable]) -> Iterable[Family]:
    families: dict[str, Any] = {}
    for name, table in tables.items():
        for metric in table.metrics:
            label, value = ((metric.label[0],), (metric.label[1],)) if metric.label else ((), ())
            if metric.name not in families:
                families[metric.name] = _KINDS[metric.kind](metric.name, metric.help, labels=("worker", *label))
            *counts, last = table.read(metric)  # a histogram's buckets and its sum, or one value
            more = (_cumulated(table.edges(metric), counts),) if isinstance(metric, Histogram) else ()
            families[metric.name].add_metric((name, *value), *more, last)
    return families.values()


def _cumulated(edges: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    return list(zip([*map(str, edges), "+Inf"], accumulate(counts), strict=True))


def render(collector: NodeCollector) -> str:
    """All metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()
