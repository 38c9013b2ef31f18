"""The workers' tables and the supervisor's own figures, in Prometheus's text format."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from runtime.node.config import Role
from runtime.node.metrics import METRICS, Histogram, Metric
from runtime.node.table import WorkerTable


class NodeCollector(Collector):
    """Exports every worker's table, the supervisor's own figures of them, and what `more` gives."""

    def __init__(
        self,
        tables: dict[str, WorkerTable],
        node: "NodeFigures",
        more: Callable[[], Iterable[CounterMetricFamily | GaugeMetricFamily]] = tuple,
    ) -> None:
        self._tables = tables
        self._node = node
        self._more = more

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        by_role: dict[Role, list[str]] = {}
        for name, table in self._tables.items():
            by_role.setdefault(table.role, []).append(name)
        for role, names in by_role.items():
            for metric in METRICS[role]:
                yield self._family(metric, names)
        yield from self._node.families()
        yield from self._more()

    def _family(
        self, metric: Metric, names: Iterable[str]
    ) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
        if isinstance(metric, Histogram):
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=["worker"])
            for name in names:
                *counts, total = self._tables[name].read(metric)
                histogram.add_metric([name], _cumulated(metric.buckets, counts), total)
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=["worker"])
        for name in names:
            family.add_metric([name], self._tables[name].read(metric)[0])
        return family


def _cumulated(edges: tuple[float, ...], counts: list[float]) -> list[tuple[str, float]]:
    total = 0.0
    buckets = []
    for edge, count in zip([*map(str, edges), "+Inf"], counts, strict=True):
        total += count
        buckets.append((edge, total))
    return buckets


@dataclass
class NodeFigures:
    """What the supervisor knows of its workers: up or not, heartbeat age, restarts, memory."""

    up: dict[str, bool]
    heartbeat_age_s: dict[str, float]
    restarts: dict[str, int]
    resident_bytes: dict[str, int]

    def families(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        up = GaugeMetricFamily("trinity_worker_up", "1 while the worker is ready", labels=["worker"])
        age = GaugeMetricFamily(
            "trinity_worker_heartbeat_age_seconds", "Since the worker's last heartbeat", labels=["worker"]
        )
        restarts = CounterMetricFamily("trinity_worker_restarts_total", "Restarts of the worker", labels=["worker"])
        memory = GaugeMetricFamily("trinity_worker_resident_memory_bytes", "Resident memory", labels=["worker"])
        for name in self.up:
            up.add_metric([name], float(self.up[name]))
            age.add_metric([name], self.heartbeat_age_s[name])
            restarts.add_metric([name], self.restarts[name])
            memory.add_metric([name], self.resident_bytes[name])
        yield from (up, age, restarts, memory)


def render(collector: NodeCollector) -> str:
    """All metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()
