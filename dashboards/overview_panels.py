"""Series and panels of both dashboards, of the selected nodes and models."""

from typing import Any

from dashboards import queries as q
from dashboards.grafana import Panel, Query
from runtime.node.supervisor_metrics import NamedMetric

WORKER = ("node", "worker")  # worker names repeat across nodes
OF_WORKER = "{{node}} {{worker}}"
HERE = 'node=~"$node",model_name=~"$model"'


def here(metric: NamedMetric, **labels: str) -> str:
    return q.series(metric, HERE, **labels)


def nixl(name: str) -> str:
    """Return a series of vLLM's NIXL connector: the queries of these have no result without it."""
    return q.series(f"vllm:nixl_{name}", HERE)


def lines(title: str, description: str, queries: list[Query], unit: str, width: int = 6, **look: Any) -> Panel:
    return Panel("timeseries", title, description, queries, unit, width, **look)


def tile(title: str, description: str, expr: str, unit: str = "short", width: int = 4, **look: Any) -> Panel:
    return Panel("stat", title, description, [Query(expr)], unit, width, height=4, **look)


def percentiles(title: str, description: str, histogram: NamedMetric) -> Panel:
    queries = [Query(q.quantile(p, histogram, HERE), f"p{round(100 * p)}") for p in (0.5, 0.95, 0.99)]
    return lines(title, description, queries, "s", 8)


def burn_rates(**look: Any) -> Panel:
    queries = [Query(q.burn_rate(HERE), "{{node}} {{slo}}")]
    return lines("Burn rate", "Error budget burn rate; alerts page at 14.4 and at 6", queries, "short", **look)
