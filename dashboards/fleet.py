"""All nodes at once: what they do together, who has the load, and which of them is worst off."""

from dashboards import queries as q
from dashboards.grafana import Json, Panel, Query, Row, dashboard, label_variable
from dashboards.overview import HERE
from dashboards.overview import UID as OVERVIEW
from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, PrefillMetrics
from runtime.node.supervisor_metrics import NamedMetric, NodeMetrics, ProcessMetrics

UID = "trinity-fleet"
_NODE = ("node",)


def fleet() -> Json:
    """The dashboard of several nodes; the overview tells more of one."""
    variables = [
        label_variable("node", "Node", NodeMetrics.INFO, "node"),
        label_variable("model", "Model", NodeMetrics.INFO, "model_name"),
    ]
    return dashboard(UID, "Trinity: fleet", [_together(), _nodes(), _load(), _worst()], variables)


def _s(metric: NamedMetric, **labels: str) -> str:
    return q.series(metric, HERE, **labels)


def _by_node(kind: str, metric: NamedMetric) -> str:
    return f"{kind} by (node) ({_s(metric)})"


def _waiting() -> str:
    stages = f"{_by_node('sum', PrefillMetrics.WAITING)} + {_by_node('sum', DecodeMetrics.WAITING)}"
    return f"{stages} or 0 * {_by_node('sum', FrontendMetrics.IN_FLIGHT)}"


def _running() -> str:
    """A node in front of other servers has no such stages: what it has taken runs."""
    stages = f"{_by_node('sum', PrefillMetrics.RUNNING)} + {_by_node('sum', DecodeMetrics.RUNNING)}"
    return f"{stages} or {_by_node('sum', FrontendMetrics.IN_FLIGHT)}"


def _tile(title: str, description: str, expr: str, unit: str = "short", bad_from: float | None = None) -> Panel:
    thresholds = ((0.0, "green"), *([(bad_from, "red")] if bad_from is not None else []))
    return Panel("stat", title, description, [Query(expr)], unit, width=3, height=4, thresholds=thresholds)


def _lines(title: str, about: str, expr: str, unit: str, legend: str = "{{node}}", stacked: bool = False) -> Panel:
    return Panel("timeseries", title, about, [Query(expr, legend)], unit, width=6, stacked=stacked)


def _together() -> Row:
    return Row(
        "All of them",
        [
            _tile("Nodes", "That Prometheus reaches", f"count(count by (node) ({_s(NodeMetrics.INFO)}))"),
            _tile(
                "Not reached",
                "Targets that Prometheus cannot scrape, whatever Node and Model say: it knows their addresses alone",
                'count(up{job="trinity"} == 0) or vector(0)',
                bad_from=1,
            ),
            _tile(
                "Draining", "Nodes whose health fails because somebody wants it to", f"sum({_s(NodeMetrics.DRAINING)})"
            ),
            _tile("Workers not ready", "Of all nodes' plans", f"sum(1 - {_s(ProcessMetrics.UP)})", bad_from=1),
            _tile("Waiting", "Requests, for a worker or for room", f"sum({_waiting()})"),
            _tile("Requests", "Generations that ended, a second", q.rate(_s(FrontendMetrics.REQUESTS)), "reqps"),
            _tile("Errors", "Share that failed or was refused", q.failing(HERE), "percentunit", bad_from=0.01),
            _tile(
                "Fullest KV", "Of any decode worker", f"max({_s(DecodeMetrics.KV_USED)})", "percentunit", bad_from=0.98
            ),
        ],
    )


def _nodes() -> Row:
    columns = [
        Query(_by_node("max", NodeMetrics.DRAINING), "draining"),
        Query(f"sum by (node) (1 - {_s(ProcessMetrics.UP)})", "not ready"),
        Query(_by_node("max", ProcessMetrics.HEARTBEAT_AGE), "oldest heartbeat", "s"),
        Query(_waiting(), "waiting"),
        Query(_running(), "running"),
        Query(_by_node("max", DecodeMetrics.KV_USED), "fullest KV", "percentunit"),
        Query(_by_node("min", NodeMetrics.MEMORY_AVAILABLE), "memory left", "bytes"),
    ]
    about = "A row each; the worst of its workers, and the sum of their requests. A node's name leads to its overview"
    links = (("node", "/d/" + OVERVIEW + "?var-node=${__value.text}&${__url_time_range}"),)
    table = Panel("table", "Nodes", about, columns, width=24, height=8, column_links=links)
    return Row("Which node?", [table])


def _load() -> Row:
    requests = q.rate(_s(FrontendMetrics.REQUESTS), _NODE)
    return Row(
        "Who has the load?",
        [
            _lines("Requests", "Generations that ended, a second", requests, "reqps", stacked=True),
            _lines("Waiting", "For a worker, or for room", _waiting(), "short", stacked=True),
            _lines("Running", "In prefill and in decode", _running(), "short", stacked=True),
            _lines("Fullest KV", "Of its decode workers", _by_node("max", DecodeMetrics.KV_USED), "percentunit"),
        ],
    )


def _worst() -> Row:
    first = q.quantile(0.95, DecodeMetrics.TTFT, HERE, _NODE)
    between = q.quantile(0.95, DecodeMetrics.INTER_TOKEN, HERE, _NODE)
    return Row(
        "Who is worst?",
        [
            _lines("Burn rate", "Pages at 14.4 and 6", q.burn(HERE), "short", "{{node}} {{slo}}"),
            _lines("Errors", "Share that failed or was refused", q.failing(HERE, _NODE), "percentunit"),
            _lines("Time to first token", "p95", first, "s"),
            _lines("Inter-token latency", "p95", between, "s"),
        ],
    )
