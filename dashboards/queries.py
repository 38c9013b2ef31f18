"""PromQL expressions shared by dashboards and alerts."""

from collections.abc import Sequence

from runtime.node.metrics.worker_metrics import FrontendMetrics
from runtime.node.supervisor_metrics import NamedMetric, NodeMetrics

RATE = "$__rate_interval"


def series(metric: str | NamedMetric, where: str = "", **labels: str) -> str:
    """Return a metric with label matchers; `where`: further matchers as PromQL."""
    selectors = [*([where] if where else []), *(f'{name}="{value}"' for name, value in labels.items())]
    return f"{metric}{{{','.join(selectors)}}}" if selectors else str(metric)


def rate(counter: str | NamedMetric, by: Sequence[str] = (), window: str = RATE) -> str:
    """Return a counter's rate, summed by labels."""
    return f"{_sum(by)}(rate({counter}[{window}]))"


def quantile(q: float, histogram: NamedMetric, where: str = "", by: Sequence[str] = (), window: str = RATE) -> str:
    """Return the q-quantile of a histogram's observations within the window."""
    return f"histogram_quantile({q}, {rate(series(f'{histogram}_bucket', where), ('le', *by), window)})"


def mean(histogram: NamedMetric, where: str = "") -> str:
    """Return the mean of a histogram's observations within the rate interval."""
    total, count = (rate(series(f"{histogram}_{part}", where)) for part in ("sum", "count"))
    return f"{total} / {count}"


def violation_ratio(where: str = "", window: str = RATE) -> str:
    """Return the share of requests that violated their SLO, by node and SLO."""
    by = ("node", "slo")
    violations = rate(series(FrontendMetrics.SLO_VIOLATIONS, where), by, window)
    return f"{violations} / {rate(series(FrontendMetrics.SLO_REQUESTS, where), by, window)}"


def failure_ratio(where: str = "", by: Sequence[str] = (), window: str = RATE) -> str:
    """Return the share of generations that failed or were refused."""
    bad = series(FrontendMetrics.REQUESTS, ",".join(filter(None, (where, 'outcome=~"failed|refused"'))))
    return f"{rate(bad, by, window)} / {rate(series(FrontendMetrics.REQUESTS, where), by, window)}"


def burn_rate(where: str = "", window: str = RATE) -> str:
    """Return the burn rate of the error budget: at 1 the budget is used up exactly."""
    budget = f"(1 - max by (node) ({series(NodeMetrics.SLO_OBJECTIVE, _without_slo(where))}))"
    return f"({violation_ratio(where, window)}) / on (node) group_left () {budget}"


def _sum(by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) " if by else "sum"


def _without_slo(where: str) -> str:
    """Remove the SLO matcher: the objective applies to all SLOs."""
    return ",".join(part for part in where.split(",") if part and not part.startswith("slo"))
