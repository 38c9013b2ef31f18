"""The workers' tables and the supervisor's own figures, in Prometheus's text format.

Every sample says which node and which model it is of, so that one Prometheus can hold many nodes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from runtime.node.metrics.columns import Histogram
from runtime.node.metrics.table import WorkerTable

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class NodeCollector(Collector):
    """Exports every worker's table, and what `more` gives, with `constant` labels on all of it."""

    def __init__(
        self,
        tables: Mapping[str, WorkerTable],
        more: Iterable[Callable[[], Iterable[Family]]] = (),
        constant: Mapping[str, str] | None = None,
    ) -> None:
        self._tables = tables
        self._more = tuple(more)
        self._constant = dict(constant or {})

    def collect(self) -> Iterator[Family]:
        for family in self._families():
            family.samples = [sample._replace(labels=self._constant | sample.labels) for sample in family.samples]
            yield family

    def _families(self) -> Iterator[Family]:
        yield from _of_tables(self._tables)
        for families in self._more:
            yield from families()


def _of_tables(tables: Mapping[str, WorkerTable]) -> Iterable[Family]:
    families: dict[str, Family] = {}
    for name, table in tables.items():
        for metric in table.metrics:
            labels = ("worker", *(label for label, _ in metric.labels))
            values = (name, *(value for _, value in metric.labels))
            read = table.read(metric)
            if isinstance(metric, Histogram):
                histogram = families.setdefault(
                    metric.exported, HistogramMetricFamily(metric.exported, metric.help, labels=labels)
                )
                assert isinstance(histogram, HistogramMetricFamily)
                *counts, total = read
                histogram.add_metric(values, _cumulated(metric.buckets, counts), total)
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = families.setdefault(metric.exported, kind(metric.exported, metric.help, labels=labels))
            assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
            family.add_metric(values, read[0])
    return families.values()


def _cumulated(edges: tuple[float, ...], counts: list[float]) -> list[tuple[str, float]]:
    total = 0.0
    buckets = []
    for edge, count in zip([*map(str, edges), "+Inf"], counts, strict=True):
        total += count
        buckets.append((edge, total))
    return buckets


def render(collector: NodeCollector) -> str:
    """All metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()
