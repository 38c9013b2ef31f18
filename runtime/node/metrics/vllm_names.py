"""A node's load under vLLM's metric names, for what routes by these: llm-d's picker as it is shipped, vLLM's router.

A gauge of the node as one engine: requests that wait for a worker or for room, requests that run, KV use where it is
highest. (`engine = "vllm"` exports what its processes say themselves, and needs none of this.)
"""

from collections.abc import Collection, Iterator

from prometheus_client.core import Metric

from runtime.node.figures import Figure
from runtime.node.metrics.columns import DecodeMetrics, FrontendMetrics, Gauge, PrefillMetrics
from runtime.node.metrics.table import WorkerTable


class VllmMetrics:
    WAITING = Figure("vllm:num_requests_waiting", "Requests that wait for a worker or for room", "engine")
    RUNNING = Figure("vllm:num_requests_running", "Requests in prefill and in decode", "engine")
    KV_USED = Figure("vllm:kv_cache_usage_perc", "Share of KV blocks in use where it is highest, 0 to 1", "engine")


def vllm_families(tables: Collection[WorkerTable]) -> Iterator[Metric]:
    """From the workers' tables. A node in front of other servers runs all that it has taken, and holds no KV."""
    decodes = _values(tables, DecodeMetrics.KV_USED)
    waiting = sum(_values(tables, PrefillMetrics.WAITING)) + sum(_values(tables, DecodeMetrics.WAITING))
    running = sum(_values(tables, PrefillMetrics.RUNNING)) + sum(_values(tables, DecodeMetrics.RUNNING))
    yield VllmMetrics.WAITING.of({"0": waiting})
    yield VllmMetrics.RUNNING.of({"0": running if decodes else sum(_values(tables, FrontendMetrics.IN_FLIGHT))})
    if decodes:
        yield VllmMetrics.KV_USED.of({"0": max(decodes)})


def _values(tables: Collection[WorkerTable], gauge: Gauge) -> list[float]:
    return [table.read(gauge)[0] for table in tables if gauge in table]
