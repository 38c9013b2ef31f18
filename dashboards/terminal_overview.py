"""Content of `trinity top`: the Grafana overview's sections as text, computed from /metrics without Prometheus."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, KvMetrics, PoolMetrics, PrefillMetrics
from runtime.node.supervisor_metrics import ControlMetrics, GpuMetrics, NamedMetric, NodeMetrics, ProcessMetrics
from runtime.serving.stages import BATCHED, RERANKED, SEARCHED, TO_FIRST_TOKEN

# ---- a sliding window of /metrics: values, rates and quantiles over the last half minute


Labels = Mapping[str, str]


@dataclass(frozen=True)
class Snapshot:
    """All samples of one scrape at `at_s` (seconds of a monotonic clock): name → (labels, value)."""

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    @classmethod
    def parse(cls, at_s: float, text: str) -> "Snapshot":
        """Parse Prometheus's text format. Raises `ValueError`."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(at_s, samples)

    def select(self, name: str | NamedMetric, labels: Labels) -> Iterator[tuple[Labels, float]]:
        for found, value in self.samples.get(str(name), ()):
            if labels.items() <= found.items():
                yield found, value


class MetricWindow:
    """The snapshots of the last `span_s` seconds. Methods return None without data, or before a second snapshot."""

    def __init__(self, span_s: float = 30.0) -> None:
        self._span_s = span_s
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and self._snapshots[1].at_s <= snapshot.at_s - self._span_s:
            self._snapshots.popleft()

    @property
    def now(self) -> Snapshot:
        """The latest snapshot; there must be one."""
        return self._snapshots[-1]

    def value(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Return the sum of a gauge's (or counter's) series."""
        found = [value for _, value in self.now.select(name, labels)]
        return sum(found) if found else None

    def highest(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Return the maximum of its series."""
        return max((value for _, value in self.now.select(name, labels)), default=None)

    def increase(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Return a counter's increase over the window; a decrease is a reset."""
        if len(self._snapshots) < 2:
            return None
        found = [
            (sum(now for found, now in last.select(name, labels)), sum(was for _, was in first.select(name, labels)))
            for first, last in zip(self._snapshots, list(self._snapshots)[1:], strict=False)
            if any(True for _ in last.select(name, labels))
        ]
        return sum(now - was if now >= was else now for now, was in found) if found else None

    def rate(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Return a counter's increase per second."""
        elapsed_s = self.now.at_s - self._snapshots[0].at_s
        increase = self.increase(name, **labels)
        return None if increase is None or elapsed_s <= 0 else increase / elapsed_s

    def ratio(self, part: str | NamedMetric, whole: str | NamedMetric, **labels: str) -> float | None:
        """Return one counter's increase divided by another's."""
        numerator, denominator = self.increase(part, **labels), self.increase(whole, **labels)
        return None if numerator is None or not denominator else numerator / denominator

    def mean(self, histogram: str | NamedMetric, **labels: str) -> float | None:
        """Return the mean of a histogram's observations."""
        return self.ratio(f"{histogram}_sum", f"{histogram}_count", **labels)

    def quantile(self, q: float, histogram: str | NamedMetric, **labels: str) -> float | None:
        """Return a quantile as histogram_quantile does: linear within a bucket, the last finite edge beyond it."""
        name = f"{histogram}_bucket"
        edges = sorted({found["le"] for found, _ in self.now.select(name, labels)}, key=float)
        counts = [self.increase(name, le=edge, **labels) or 0.0 for edge in edges]
        if not counts or not counts[-1]:
            return None
        rank, below, lower = q * counts[-1], 0.0, 0.0
        for edge, count in zip(map(float, edges), counts, strict=True):
            if count >= rank:
                return lower if math.isinf(edge) else lower + (edge - lower) * (rank - below) / (count - below)
            below, lower = count, edge
        return lower


Status = Literal["good", "warn", "bad", "plain"]
NO_DATA = "–"


@dataclass(frozen=True)
class Line:
    """A named value as text, and its status."""

    name: str
    text: str
    status: Status = "plain"


@dataclass(frozen=True)
class Section:
    """A titled group of lines."""

    title: str
    lines: Sequence[Line]


def sections(window: MetricWindow) -> list[Section]:
    """Return all sections except the table of workers; collections only if the node writes to any."""
    found = [
        _slos(window),
        _health(window),
        _queues(window),
        _saturation(window),
        _latency(window),
        _control_loop(window),
    ]
    return [*found, _collections(window)] if window.value(FrontendMetrics.COLLECTION_LOG_BYTES) else found


WORKER_COLUMNS = ("worker", "device", "state", "restarts", "heartbeat", "memory", "threads", "fds")


def worker_rows(window: MetricWindow) -> list[tuple[str, ...]]:
    """Return the rows of the table of workers, by role: `WORKER_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for labels, _ in window.now.select(ProcessMetrics.INFO, {}):
        name = labels["worker"]
        states = [state["state"] for state, _ in window.now.select(ProcessMetrics.STATE, {"worker": name})]
        rows.append(
            (
                name,
                labels["device"],
                states[0] if states else NO_DATA,
                count(window.value(ProcessMetrics.RESTARTS, worker=name)),
                seconds(window.value(ProcessMetrics.HEARTBEAT_AGE, worker=name)),
                size(window.value(ProcessMetrics.RESIDENT, worker=name)),
                count(window.value(ProcessMetrics.THREADS, worker=name)),
                count(window.value(ProcessMetrics.OPEN_FDS, worker=name)),
            )
        )
    return rows


def title(window: MetricWindow) -> str:
    """Return the node's name and model."""
    for labels, _ in window.now.select(NodeMetrics.INFO, {}):
        return " ".join(part for part in ("node", labels.get("node", ""), labels.get("model_name", "")) if part)
    return "no node"


def _slos(window: MetricWindow) -> Section:
    budget = 1 - (window.highest(NodeMetrics.SLO_OBJECTIVE) or 0.99)
    lines = []
    for slo in ("all", "ttft", "tpot", "search"):
        violations = window.ratio(FrontendMetrics.SLO_VIOLATIONS, FrontendMetrics.SLO_REQUESTS, slo=slo)
        burn = None if violations is None else violations / budget
        shown = NO_DATA if violations is None else f"{percent(1 - violations)}, burns {burn:.1f}×"
        lines.append(Line(slo, shown, _status(burn, 6, 14.4)))
    ttft = window.quantile(0.95, DecodeMetrics.TTFT)
    limit = window.highest(NodeMetrics.SLO_LIMIT, slo="ttft") or 1.0
    lines.append(Line("TTFT p95", seconds(ttft), _status(ttft, limit, 2 * limit)))
    lines.append(Line("inter-token p95", seconds(window.quantile(0.95, DecodeMetrics.INTER_TOKEN))))
    return Section("SLOs", lines)


def _health(window: MetricWindow) -> Section:
    names = [labels["worker"] for labels, _ in window.now.select(ProcessMetrics.UP, {})]
    up = window.value(ProcessMetrics.UP) or 0.0
    oldest = window.highest(ProcessMetrics.HEARTBEAT_AGE)
    ended = window.increase(FrontendMetrics.REQUESTS)
    bad = sum(window.increase(FrontendMetrics.REQUESTS, outcome=how) or 0.0 for how in ("failed", "refused"))
    errors = None if not ended else bad / ended
    http = window.increase(FrontendMetrics.HTTP_RESPONSES)
    http_errors = None if not http else (window.increase(FrontendMetrics.HTTP_RESPONSES, status="5xx") or 0.0) / http
    return Section(
        "Health",
        [
            Line("workers ready", f"{up:.0f} of {len(names)}", "good" if up == len(names) else "bad"),
            Line("oldest heartbeat", seconds(oldest), _status(oldest, 5, 15)),
            Line("restarts", count(window.value(ProcessMetrics.RESTARTS))),
            Line("requests/s", number(window.rate(FrontendMetrics.REQUESTS))),
            Line("errors", percent(errors), _status(errors, 0.001, 0.01)),
            Line("HTTP 5xx", percent(http_errors), _status(http_errors, 0.001, 0.01)),
        ],
    )


def _queues(window: MetricWindow) -> Section:
    target = window.highest(ControlMetrics.WAIT_TARGET) or 0.01
    lines = []
    for stage, short in (("prefill", "Q_pre"), ("decode", "Q_dec")):
        wait = window.quantile(0.95, PoolMetrics.WAIT, stage=stage)
        status = _status(wait, target, 2 * target) if stage == "prefill" else "plain"
        depth = count(window.value(PoolMetrics.QUEUE_DEPTH, stage=stage))
        lines.append(Line(short, f"{depth} waiting, p95 {seconds(wait)}", status))
    return Section(
        "Queues",
        [
            *lines,
            Line("prefill queue", count(window.value(PrefillMetrics.WAITING))),
            Line("prefill running", count(window.value(PrefillMetrics.RUNNING))),
            Line("decode queue", count(window.value(DecodeMetrics.WAITING))),
            Line("decode running", count(window.value(DecodeMetrics.RUNNING))),
        ],
    )


def _saturation(window: MetricWindow) -> Section:
    slots = window.ratio(PoolMetrics.SLOT_STEPS, PoolMetrics.EXTENDS)
    kv = window.highest(DecodeMetrics.KV_USED)
    bandwidth = window.highest(GpuMetrics.MEMORY_BUSY)
    link = window.rate(DecodeMetrics.LINK_BUSY_SECONDS)
    hits = [percent(window.ratio(m.PREFIX_HIT_TOKENS, m.PREFIX_QUERY_TOKENS)) for m in (PrefillMetrics, DecodeMetrics)]
    tiers = KvMetrics.TIER_BYTES
    reasons = [labels["reason"] for labels, value in window.now.select(GpuMetrics.NVML_UP, {}) if not value]
    return Section(
        "Saturation",
        [
            Line("slots per step", f"{number(slots)} of {count(window.value(PoolMetrics.SLOTS))}"),
            Line("paused slots", count(window.value(PoolMetrics.PAUSED_SLOTS))),
            Line("KV in use", percent(kv), _status(kv, 0.9, 0.98)),
            Line("prefix hits p, d", ", ".join(hits)),
            Line(f"KV {', '.join(tiers)}", ", ".join(size(window.highest(held)) for held in tiers.values())),
            Line("link", f"{percent(link)}, target {percent(window.highest(ControlMetrics.LINK_TARGET))}"),
            Line("GPU bandwidth", reasons[0] if reasons and bandwidth is None else percent(bandwidth)),
        ],
    )


def _latency(window: MetricWindow) -> Section:
    rare = (BATCHED, SEARCHED, RERANKED)  # short, or of few nodes, and a screen has few lines
    shown = [stage for stage in TO_FIRST_TOKEN if stage.end not in rare]
    stages = [Line(stage.name, seconds(window.mean(stage.time))) for stage in shown]
    return Section("Latency", stages)


def _control_loop(window: MetricWindow) -> Section:
    stalled = window.ratio(DecodeMetrics.STALL_SECONDS, DecodeMetrics.ROW_SECONDS)
    target = window.highest(ControlMetrics.STALL_TARGET) or 0.25
    return Section(
        "Control loop",
        [
            Line("reserve r", percent(window.highest(ControlMetrics.RESERVE))),
            Line("flush τ_pre", seconds(window.highest(ControlMetrics.FLUSH_PREFILL))),
            Line("decode stalled", percent(stalled), _status(stalled, target, 1.5 * target)),
            Line("preemptions/s", number(window.rate(PoolMetrics.PREEMPTIONS))),
            Line("missed/s", number(window.rate(PoolMetrics.DEADLINE_MISSES))),
            Line("changes", count(window.value(ControlMetrics.CHANGES))),
        ],
    )


def _collections(window: MetricWindow) -> Section:
    return Section(
        "Collections",
        [
            Line("writes p95", seconds(window.quantile(0.95, FrontendMetrics.WRITE_TIME))),
            Line("segments", count(window.value(FrontendMetrics.COLLECTION_SEGMENTS))),
            Line("documents", count(window.value(FrontendMetrics.COLLECTION_DOCUMENTS))),
            Line("building", count(window.value(FrontendMetrics.COLLECTION_BUILDING))),
            Line("growing rows", count(window.value(FrontendMetrics.COLLECTION_GROWING))),
            Line("tombstones", count(window.value(FrontendMetrics.COLLECTION_TOMBSTONES))),
            Line("log", size(window.value(FrontendMetrics.COLLECTION_LOG_BYTES))),
        ],
    )


def _status(value: float | None, warn: float, bad: float) -> Status:
    if value is None:
        return "plain"
    return "bad" if value >= bad else "warn" if value >= warn else "good"


def seconds(value: float | None) -> str:
    """Format seconds in s, ms or µs."""
    if value is None:
        return NO_DATA
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.0f} µs" if value else "0 s"


def size(value: float | None) -> str:
    """Format bytes in MiB or GiB."""
    if value is None:
        return NO_DATA
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def percent(value: float | None) -> str:
    return NO_DATA if value is None else f"{100 * value:.1f} %"


def number(value: float | None) -> str:
    return NO_DATA if value is None else f"{value:.1f}"


def count(value: float | None) -> str:
    return NO_DATA if value is None else f"{value:.0f}"
