"""Export of the workers' tables and the supervisor's metrics in Prometheus's text format.

Every sample has labels of its node and model, so that one Prometheus can scrape many nodes.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from runtime.files import read_regular
from runtime.node.metrics.kinds import Counter, Gauge, Histogram
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, PrefillMetrics
from runtime.node.supervisor_metrics import SupervisorMetric

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class _Labelled(Collector):
    def __init__(self, families: Iterable[Metric], labels: Mapping[str, str]) -> None:
        self._families, self._labels = families, labels

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            family.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in family.samples]
            yield family


def render(families: Iterable[Metric], labels: Mapping[str, str] = {}) -> str:
    """Return metrics in Prometheus's text format; every sample has `labels`, too."""
    return generate_latest(_Labelled(families, labels)).decode()


# ---- the workers' tables


_KINDS = {Counter: CounterMetricFamily, Gauge: GaugeMetricFamily, Histogram: HistogramMetricFamily}


def table_families(tables: Mapping[str, WorkerTable]) -> Iterable[Family]:
    """Return the families of the workers' tables, by the workers' names."""
    families: dict[str, Any] = {}
    for name, table in tables.items():
        for metric in table.metrics:
            label, value = ((metric.label[0],), (metric.label[1],)) if metric.label else ((), ())
            if metric.name not in families:
                families[metric.name] = _KINDS[type(metric)](metric.name, metric.help, labels=("worker", *label))
            *counts, last = table.read(metric)  # a histogram's buckets and its sum, or one value
            more = (_cumulative(table.edges(metric), counts),) if isinstance(metric, Histogram) else ()
            families[metric.name].add_metric((name, *value), *more, last)
    return families.values()


def _cumulative(edges: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    return list(zip([*map(str, edges), "+Inf"], accumulate(counts), strict=True))


# ---- metrics of external engines, labelled with their worker


_MAX_SCRAPE_BYTES = 64 << 20
_PREFIX = "vllm:"  # other metrics of the process (garbage collection, HTTP) are skipped


def engine_families(files: Mapping[str, Path]) -> Iterator[Metric]:
    """Yield the metrics of external engines by worker, from the files of their last scrape. Malformed files are
    skipped."""
    families: dict[str, Metric] = {}
    for worker, file in files.items():
        with contextlib.suppress(OSError, ValueError):  # ValueError: malformed text
            parsed = text_string_to_metric_families(read_regular(file, _MAX_SCRAPE_BYTES).decode())
            for family in [
                its_own for its_own in parsed if its_own.name.startswith(_PREFIX)
            ]:  # parsed completely before any is merged
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [s._replace(labels={"worker": worker} | s.labels) for s in family.samples]
    yield from families.values()


# ---- the node's load under vLLM's metric names, for routers that use them: llm-d's endpoint picker, vLLM's router
# They describe the node as one engine. (With `engine = "vllm"` vLLM's own metrics are exported instead.)


class VllmMetrics:
    WAITING = SupervisorMetric(
        "vllm:num_requests_waiting", "Requests that wait for a worker or for KV blocks", "engine"
    )
    RUNNING = SupervisorMetric("vllm:num_requests_running", "Requests in prefill and in decode", "engine")
    KV_USED = SupervisorMetric(
        "vllm:kv_cache_usage_perc", "Share of KV blocks in use, highest of all decode workers, 0 to 1", "engine"
    )


def vllm_families(tables: Collection[WorkerTable]) -> Iterator[Metric]:
    """Derive vLLM's gauges from the workers' tables. A node in front of other servers runs all accepted requests and
    holds no KV."""
    decodes = _values(tables, DecodeMetrics.KV_USED)
    waiting = sum(_values(tables, PrefillMetrics.WAITING)) + sum(_values(tables, DecodeMetrics.WAITING))
    running = sum(_values(tables, PrefillMetrics.RUNNING)) + sum(_values(tables, DecodeMetrics.RUNNING))
    yield VllmMetrics.WAITING.of({"0": waiting})
    yield VllmMetrics.RUNNING.of({"0": running if decodes else sum(_values(tables, FrontendMetrics.IN_FLIGHT))})
    if decodes:
        yield VllmMetrics.KV_USED.of({"0": max(decodes)})


def _values(tables: Collection[WorkerTable], gauge: Gauge) -> list[float]:
    return [table.read(gauge)[0] for table in tables if gauge in table]
