"""The fleet dashboard: totals, a table of nodes, load, and SLOs and latency by node.

Where llm-d's endpoint picker chooses the node and its flow control is on, the panels show its queue too; without it
these queries have no result.
"""

from math import inf
from typing import Any

from dashboards import queries as q
from dashboards.grafana import Json, Panel, Query, Row, dashboard, label_variable
from dashboards.overview import UID as OVERVIEW
from dashboards.overview_panels import HERE, burn_rates, here, lines, tile
from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, PrefillMetrics
from runtime.node.supervisor_metrics import NamedMetric, NodeMetrics, ProcessMetrics

UID = "trinity-fleet"
_NODE = ("node",)
_LLM_D = ("llm_d_epp", "inference_extension")


def fleet() -> Json:
    """Return the dashboard of several nodes; the overview shows one node in detail."""
    variables = [
        label_variable("node", "Node", NodeMetrics.INFO, "node"),
        label_variable("model", "Model", NodeMetrics.INFO, "model_name"),
    ]
    return dashboard(UID, "Trinity: fleet", [_totals(), _nodes(), _load(), _slos()], variables)


def _by_node(kind: str, metric: NamedMetric) -> str:
    return f"{kind} by (node) ({here(metric)})"


def _waiting() -> str:
    stages = f"{_by_node('sum', PrefillMetrics.WAITING)} + {_by_node('sum', DecodeMetrics.WAITING)}"
    return f"{stages} or 0 * {_by_node('sum', FrontendMetrics.IN_FLIGHT)}"


def _running() -> str:
    """Return running requests; a node without its own prefill and decode counts all requests in flight."""
    stages = f"{_by_node('sum', PrefillMetrics.RUNNING)} + {_by_node('sum', DecodeMetrics.RUNNING)}"
    return f"{stages} or {_by_node('sum', FrontendMetrics.IN_FLIGHT)}"


def _tile(title: str, description: str, expr: str, unit: str = "short", bad_from: float = inf) -> Panel:
    limits = () if bad_from == inf else ((bad_from, "red"),)
    return tile(title, description, expr, unit, width=3, thresholds=((0.0, "green"), *limits))


def _llm_d(function: str, name: str) -> str:
    """Apply a function to one of llm-d's flow-control metrics, by its name or the one before."""
    return " or ".join(f"{function}({prefix}_flow_control_{name})" for prefix in _LLM_D)


def _by_nodes(title: str, about: str, expr: str, unit: str, *more: Query, **look: Any) -> Panel:
    return lines(title, about, [Query(expr, "{{node}}"), *more], unit, **look)


def _totals() -> Row:
    return Row(
        "Fleet",
        _tile("Nodes", "Nodes that Prometheus scrapes", f"count(count by (node) ({here(NodeMetrics.INFO)}))"),
        _tile(
            "Down",
            "Targets that Prometheus cannot scrape; not filtered by Node and Model, which are unknown for them",
            'count(up{job="trinity"} == 0) or vector(0)',
            bad_from=1,
        ),
        _tile("Draining", "Nodes whose health check fails because they drain", f"sum({here(NodeMetrics.DRAINING)})"),
        _tile(
            "Workers not ready",
            "Workers of all nodes' plans that do not serve",
            f"sum(1 - {here(ProcessMetrics.UP)})",
            bad_from=1,
        ),
        _tile("Waiting", "Requests that wait for a worker or for KV blocks", f"sum({_waiting()})"),
        _tile("Requests", "Completed generations per second", q.rate(here(FrontendMetrics.REQUESTS)), "reqps"),
        _tile(
            "Errors",
            "Share of generations that failed or were refused",
            q.failure_ratio(HERE),
            "percentunit",
            bad_from=0.01,
        ),
        _tile(
            "Fullest KV",
            "KV in use of the fullest decode worker",
            f"max({here(DecodeMetrics.KV_USED)})",
            "percentunit",
            bad_from=0.98,
        ),
    )


def _nodes() -> Row:
    columns = [
        Query(_by_node("max", NodeMetrics.DRAINING), "draining"),
        Query(f"sum by (node) (1 - {here(ProcessMetrics.UP)})", "not ready"),
        Query(_by_node("max", ProcessMetrics.HEARTBEAT_AGE), "oldest heartbeat", "s"),
        Query(_waiting(), "waiting"),
        Query(_running(), "running"),
        Query(_by_node("max", DecodeMetrics.KV_USED), "fullest KV", "percentunit"),
        Query(_by_node("min", NodeMetrics.MEMORY_AVAILABLE), "memory left", "bytes"),
    ]
    about = "One row per node: worst value over its workers, sum of their requests. Names link to the overview"
    links = (("node", "/d/" + OVERVIEW + "?var-node=${__value.text}&${__url_time_range}"),)
    table = Panel("table", "Nodes", about, columns, width=24, height=8, column_links=links)
    return Row("Nodes", table)


def _load() -> Row:
    requests = q.rate(here(FrontendMetrics.REQUESTS), _NODE)
    queue = Query(_llm_d("sum", "queue_size"), "llm-d's queue")
    saturation = Query(_llm_d("max", "pool_saturation"), "llm-d's saturation of the nodes")
    return Row(
        "Load",
        _by_nodes("Requests", "Completed generations per second", requests, "reqps", stacked=True),
        _by_nodes(
            "Waiting",
            "Requests that wait for a worker or for KV blocks, or at llm-d's endpoint picker, if there is one",
            _waiting(),
            "short",
            queue,
            stacked=True,
        ),
        _by_nodes("Running", "Requests in prefill and decode", _running(), "short", stacked=True),
        _by_nodes(
            "Fullest KV",
            "KV in use of the node's fullest decode worker",
            _by_node("max", DecodeMetrics.KV_USED),
            "percentunit",
            saturation,
        ),
    )


def _slos() -> Row:
    first = q.quantile(0.95, DecodeMetrics.TTFT, HERE, _NODE)
    held = " or ".join(
        f"histogram_quantile(0.95, {q.rate(f'{prefix}_flow_control_request_queue_duration_seconds_bucket', ('le',))})"
        for prefix in _LLM_D
    )
    between = q.quantile(0.95, DecodeMetrics.INTER_TOKEN, HERE, _NODE)
    return Row(
        "SLOs and latency",
        burn_rates(),
        _by_nodes(
            "Errors", "Share of generations that failed or were refused", q.failure_ratio(HERE, _NODE), "percentunit"
        ),
        _by_nodes(
            "Time to first token",
            "Time from the request's arrival at the node to its first token, p95",
            first,
            "s",
            Query(held, "before, in llm-d's queue"),
        ),
        _by_nodes("Inter-token latency", "Time between two consecutive tokens, p95", between, "s"),
    )
