"""Prometheus alerts as code. Each has a section with its name in docs/runbook.md.

Burn-rate pages are the multi-window ones of the SRE workbook (chapter 5, table 5-8): 14.4 times the allowed rate over
an hour and five minutes, 6 times over six hours and thirty minutes. An alert is `value op limit`, in separate fields,
so that tests can query the value of an alert that does not fire.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dashboards import queries as q
from runtime.node.metrics.worker_metrics import DecodeMetrics, KvMetrics, PoolMetrics, RetrievingMetrics
from runtime.node.supervisor_metrics import ControlMetrics, NodeMetrics, ProcessMetrics

RUNBOOK = "docs/runbook.md"


@dataclass(frozen=True)
class Condition:
    """A PromQL value, an operator and the limit at which the condition holds."""

    value: str
    op: Literal[">", "<", "=="]
    limit: float

    @property
    def expr(self) -> str:
        return f"({self.value}) {self.op} {self.limit:g}"


@dataclass(frozen=True)
class Alert:
    """Fires if all `conditions` hold for `for_s` seconds. "page" is urgent, "ticket" is not."""

    name: str
    conditions: Sequence[Condition]
    for_s: float
    severity: Literal["page", "ticket"]
    summary: str

    @property
    def expr(self) -> str:
        return " and ".join(condition.expr for condition in self.conditions)


def alerts(scale: float = 1.0) -> list[Alert]:
    """Return every alert. `scale` shortens all windows and durations, for tests."""

    def window(seconds: float) -> str:
        return f"{max(1, round(seconds * scale * 1000))}ms" if scale != 1 else _duration(seconds)

    def burning(times: float, long_s: float, short_s: float) -> list[Condition]:
        return [Condition(q.burn_rate(window=window(seconds)), ">", times) for seconds in (long_s, short_s)]

    node, by_node = ("node",), "by (node)"
    five = window(300)
    stalled = q.rate(DecodeMetrics.STALL_SECONDS, node, five)
    missed = q.rate(PoolMetrics.DEADLINE_MISSES, node, five)
    wait = q.quantile(0.95, PoolMetrics.WAIT, 'stage="prefill"', node, five)
    return [
        Alert(
            "TrinitySLOBurnsFast",
            burning(14.4, 3600, 300),
            120 * scale,
            "page",
            "{{ $labels.slo }} on {{ $labels.node }} spends a month's error budget in two days",
        ),
        Alert(
            "TrinitySLOBurnsSlowly",
            burning(6, 6 * 3600, 1800),
            900 * scale,
            "page",
            "{{ $labels.slo }} on {{ $labels.node }} spends a month's error budget in five days",
        ),
        Alert(
            "TrinityNodeDown",
            [Condition('up{job="trinity"}', "==", 0)],
            60 * scale,
            "page",
            "Prometheus cannot scrape {{ $labels.instance }}",
        ),
        Alert(
            "TrinityNodeDrains",
            [Condition(str(NodeMetrics.DRAINING), "==", 1)],
            1800 * scale,
            "ticket",
            "{{ $labels.node }} has been draining for half an hour",
        ),
        Alert(
            "TrinityWorkerDown",
            [Condition(str(ProcessMetrics.UP), "==", 0)],
            120 * scale,
            "page",
            "{{ $labels.worker }} of {{ $labels.node }} is not ready",
        ),
        Alert(
            "TrinityWorkerCannotRun",
            [Condition(str(ProcessMetrics.FAILED_STARTS), ">", 2)],
            0,
            "page",
            "{{ $labels.worker }} of {{ $labels.node }} cannot start; the node runs without it",
        ),
        Alert(
            "TrinityCollectionUnavailable",
            [Condition(f"{PoolMetrics.UNAVAILABLE} or {RetrievingMetrics.WITHOUT_DOCUMENTS}", ">", 0)],
            30 * scale,
            "page",
            "{{ $labels.worker }} of {{ $labels.node }} cannot serve a collection",
        ),
        Alert(
            "TrinityWorkerRestarts",
            [Condition(f"increase({ProcessMetrics.RESTARTS}[{window(900)}])", ">", 3)],
            0,
            "ticket",
            "{{ $labels.worker }} of {{ $labels.node }} has restarted more than three times in 15 minutes",
        ),
        Alert(
            "TrinityHeartbeatOld",
            # The supervisor kills the worker after half a minute; the window covers a scrape interval of one minute.
            [Condition(f"max_over_time({ProcessMetrics.HEARTBEAT_AGE}[{window(120)}])", ">", 15)],
            0,
            "ticket",
            "The loop of {{ $labels.worker }} on {{ $labels.node }} hung within the last two minutes",
        ),
        Alert(
            "TrinityRequestsFail",
            [Condition(q.failure_ratio("", node, five), ">", 0.01)],
            300 * scale,
            "page",
            "More than 1 % of the generations on {{ $labels.node }} fail or are refused",
        ),
        Alert(
            "TrinityPrefillWaits",
            [Condition(f"{wait} / max {by_node} ({ControlMetrics.WAIT_TARGET})", ">", 2)],
            600 * scale,
            "ticket",
            "Prefill queries on {{ $labels.node }} wait over twice the target, and the control loop cannot correct it",
        ),
        Alert(
            "TrinityDeadlinesMissed",
            [Condition(f"{missed} / {q.rate(PoolMetrics.QUERIES, node, five)}", ">", 0.01)],
            600 * scale,
            "ticket",
            "More than 1 % of the pool's queries on {{ $labels.node }} miss their deadline",
        ),
        Alert(
            "TrinityPoolRefuses",
            [
                Condition(
                    q.rate(q.series(PoolMetrics.REFUSED, 'reason="overloaded"'), node, five),
                    ">",
                    0,
                )
            ],
            300 * scale,
            "ticket",
            "The pool of {{ $labels.node }} refuses queries because its queues are full",
        ),
        Alert(
            "TrinityDecodeStalls",
            [
                Condition(
                    f"{stalled} / {q.rate(DecodeMetrics.ROW_SECONDS, node, five)}"
                    f" / max {by_node} ({ControlMetrics.STALL_TARGET})",
                    ">",
                    1.5,
                )
            ],
            900 * scale,
            "ticket",
            "Decode rows on {{ $labels.node }} are stalled by probes for over 1.5 times the target",
        ),
        Alert(
            "TrinityKVFull",
            [
                Condition(str(DecodeMetrics.KV_USED), ">", 0.98),
                Condition(str(DecodeMetrics.WAITING), ">", 0),
            ],
            600 * scale,
            "ticket",
            "{{ $labels.worker }} of {{ $labels.node }} has no free KV blocks, and hand-overs wait",
        ),
        Alert(
            "TrinityModelUncompiled",
            [Condition(str(KvMetrics.UNCOMPILED), "==", 1)],
            600 * scale,
            "ticket",
            "The model of {{ $labels.worker }} of {{ $labels.node }} runs uncompiled, several times slower",
        ),
        Alert(
            "TrinityMemoryLow",
            [Condition(f"{NodeMetrics.MEMORY_AVAILABLE} / {NodeMetrics.MEMORY}", "<", 0.05)],
            300 * scale,
            "page",
            "{{ $labels.node }} has less than 5 % of its memory left",
        ),
    ]


def rules_yaml(scale: float = 1.0, interval_s: float | None = None) -> str:
    """Return the Prometheus rule file. `interval_s`: the evaluation interval, default Prometheus's own."""
    lines = [
        "# Generated by `trinity dashboards export`; see dashboards/rules.py.",
        "groups:",
        "- name: trinity",
        *([f"  interval: {round(interval_s * 1000)}ms"] if interval_s else []),
        "  rules:",
    ]
    for alert in alerts(scale):
        lines += [
            f"  - alert: {alert.name}",
            f"    expr: {json.dumps(alert.expr)}",
            *([f"    for: {_duration(alert.for_s)}"] if alert.for_s else []),
            "    labels:",
            f"      severity: {alert.severity}",
            "    annotations:",
            f"      summary: {json.dumps(alert.summary)}",
            f"      runbook: {RUNBOOK}#{alert.name.lower()}",
        ]
    return "\n".join(lines) + "\n"


def _duration(seconds: float) -> str:
    """Format a duration as Prometheus does."""
    for unit, size in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= size and seconds % size == 0:
            return f"{round(seconds / size)}{unit}"
    return f"{round(seconds * 1000)}ms"
