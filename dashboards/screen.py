"""The first screen as text: the same questions, in the same order, as the Grafana overview; from /metrics alone."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, KvMetrics, PoolMetrics, PrefillMetrics
from runtime.node.supervisor_metrics import ControlMetrics, GpuMetrics, NamedMetric, NodeMetrics, ProcessMetrics
from runtime.serving.stages import TO_FIRST_TOKEN

# ---- A node's /metrics as it changes: values, rates and quantiles over the last half minute, without a Prometheus


Labels = Mapping[str, str]


@dataclass(frozen=True)
class Snapshot:
    """All samples at a moment (seconds of any steady clock): name → (labels, value)."""

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    @classmethod
    def parse(cls, at_s: float, text: str) -> "Snapshot":
        """From Prometheus's text format. Raises `ValueError` for what is none."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(at_s, samples)

    def select(self, name: str | NamedMetric, labels: Labels) -> Iterator[tuple[Labels, float]]:
        for found, value in self.samples.get(str(name), ()):
            if labels.items() <= found.items():
                yield found, value


class Live:
    """The latest snapshots, up to `span_s` seconds of them. What cannot be said yet, or has no data, is None."""

    def __init__(self, span_s: float = 30.0) -> None:
        self._span_s = span_s
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and self._snapshots[1].at_s <= snapshot.at_s - self._span_s:
            self._snapshots.popleft()

    @property
    def now(self) -> Snapshot:
        """The last one; there must be one."""
        return self._snapshots[-1]

    def value(self, name: str | NamedMetric, **labels: str) -> float | None:
        """The sum of a gauge's (or counter's) series."""
        found = [value for _, value in self.now.select(name, labels)]
        return sum(found) if found else None

    def highest(self, name: str | NamedMetric, **labels: str) -> float | None:
        """The largest of its series."""
        return max((value for _, value in self.now.select(name, labels)), default=None)

    def increase(self, name: str | NamedMetric, **labels: str) -> float | None:
        """By how much a counter has grown; one that fell began anew."""
        if len(self._snapshots) < 2:
            return None
        found = [
            (sum(now for found, now in last.select(name, labels)), sum(was for _, was in first.select(name, labels)))
            for first, last in zip(self._snapshots, list(self._snapshots)[1:], strict=False)
            if any(True for _ in last.select(name, labels))
        ]
        return sum(now - was if now >= was else now for now, was in found) if found else None

    def rate(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Its growth a second."""
        passed_s = self.now.at_s - self._snapshots[0].at_s
        grown = self.increase(name, **labels)
        return None if grown is None or passed_s <= 0 else grown / passed_s

    def ratio(self, part: str | NamedMetric, whole: str | NamedMetric, **labels: str) -> float | None:
        """One counter's growth by another's."""
        over, under = self.increase(part, **labels), self.increase(whole, **labels)
        return None if over is None or not under else over / under

    def mean(self, histogram: str | NamedMetric, **labels: str) -> float | None:
        """The mean of what was observed."""
        return self.ratio(f"{histogram}_sum", f"{histogram}_count", **labels)

    def quantile(self, q: float, histogram: str | NamedMetric, **labels: str) -> float | None:
        """As Prometheus's histogram_quantile: linear within the bucket, the last edge for what lies beyond it."""
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


Mood = Literal["good", "warn", "bad", "plain"]
NOTHING = "–"


@dataclass(frozen=True)
class Line:
    """A figure with its name, and how it is."""

    name: str
    text: str
    mood: Mood = "plain"


@dataclass(frozen=True)
class Section:
    """One question and its answers."""

    title: str
    lines: Sequence[Line]


def sections(live: Live) -> list[Section]:
    """All but the table of workers; what is written only where there is something to write to."""
    found = [_promises(live), _up(live), _queues(live), _saturation(live), _latency(live), _controller(live)]
    return [*found, _written(live)] if live.value(FrontendMetrics.LIVE_LOG_BYTES) else found


WORKER_COLUMNS = ("worker", "device", "state", "restarts", "heartbeat", "memory", "threads", "fds")


def workers(live: Live) -> list[tuple[str, ...]]:
    """The rows of the table of workers, by role: `WORKER_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for labels, _ in live.now.select(ProcessMetrics.INFO, {}):
        name = labels["worker"]
        states = [state["state"] for state, _ in live.now.select(ProcessMetrics.STATE, {"worker": name})]
        rows.append(
            (
                name,
                labels["device"],
                states[0] if states else NOTHING,
                count(live.value(ProcessMetrics.RESTARTS, worker=name)),
                seconds(live.value(ProcessMetrics.HEARTBEAT_AGE, worker=name)),
                size(live.value(ProcessMetrics.RESIDENT, worker=name)),
                count(live.value(ProcessMetrics.THREADS, worker=name)),
                count(live.value(ProcessMetrics.OPEN_FDS, worker=name)),
            )
        )
    return rows


def title(live: Live) -> str:
    """Which node this is."""
    for labels, _ in live.now.select(NodeMetrics.INFO, {}):
        return " ".join(part for part in ("node", labels.get("node", ""), labels.get("model_name", "")) if part)
    return "no node"


def _promises(live: Live) -> Section:
    budget = 1 - (live.highest(NodeMetrics.SLO_OBJECTIVE) or 0.99)
    lines = []
    for slo in ("all", "ttft", "tpot", "search"):
        broken = live.ratio(FrontendMetrics.SLO_VIOLATIONS, FrontendMetrics.SLO_REQUESTS, slo=slo)
        burn = None if broken is None else broken / budget
        shown = NOTHING if broken is None else f"{percent(1 - broken)}, burns {burn:.1f}×"
        lines.append(Line(slo, shown, _mood(burn, 6, 14.4)))
    ttft = live.quantile(0.95, DecodeMetrics.TTFT)
    limit = live.highest(NodeMetrics.SLO_LIMIT, slo="ttft") or 1.0
    lines.append(Line("TTFT p95", seconds(ttft), _mood(ttft, limit, 2 * limit)))
    lines.append(Line("inter-token p95", seconds(live.quantile(0.95, DecodeMetrics.INTER_TOKEN))))
    return Section("Are promises kept?", lines)


def _up(live: Live) -> Section:
    names = [labels["worker"] for labels, _ in live.now.select(ProcessMetrics.UP, {})]
    up = live.value(ProcessMetrics.UP) or 0.0
    oldest = live.highest(ProcessMetrics.HEARTBEAT_AGE)
    ended = live.increase(FrontendMetrics.REQUESTS)
    bad = sum(live.increase(FrontendMetrics.REQUESTS, outcome=how) or 0.0 for how in ("failed", "refused"))
    errors = None if not ended else bad / ended
    http = live.increase(FrontendMetrics.HTTP_RESPONSES)
    broken = None if not http else (live.increase(FrontendMetrics.HTTP_RESPONSES, status="5xx") or 0.0) / http
    return Section(
        "Is it up?",
        [
            Line("workers ready", f"{up:.0f} of {len(names)}", "good" if up == len(names) else "bad"),
            Line("oldest heartbeat", seconds(oldest), _mood(oldest, 5, 15)),
            Line("restarts", count(live.value(ProcessMetrics.RESTARTS))),
            Line("requests/s", number(live.rate(FrontendMetrics.REQUESTS))),
            Line("errors", percent(errors), _mood(errors, 0.001, 0.01)),
            Line("HTTP 5xx", percent(broken), _mood(broken, 0.001, 0.01)),
        ],
    )


def _queues(live: Live) -> Section:
    target = live.highest(ControlMetrics.WAIT_TARGET) or 0.01
    lines = []
    for stage, short in (("prefill", "Q_pre"), ("decode", "Q_dec")):
        wait = live.quantile(0.95, PoolMetrics.WAIT, stage=stage)
        mood = _mood(wait, target, 2 * target) if stage == "prefill" else "plain"
        depth = count(live.value(PoolMetrics.QUEUE_DEPTH, stage=stage))
        lines.append(Line(short, f"{depth} waiting, p95 {seconds(wait)}", mood))
    return Section(
        "Who waits?",
        [
            *lines,
            Line("for prefill", count(live.value(PrefillMetrics.WAITING))),
            Line("in prefill", count(live.value(PrefillMetrics.RUNNING))),
            Line("for decode", count(live.value(DecodeMetrics.WAITING))),
            Line("decoding", count(live.value(DecodeMetrics.RUNNING))),
        ],
    )


def _saturation(live: Live) -> Section:
    slots = live.ratio(PoolMetrics.SLOT_STEPS, PoolMetrics.EXTENDS)
    kv = live.highest(DecodeMetrics.KV_USED)
    bandwidth = live.highest(GpuMetrics.MEMORY_BUSY)
    link = live.rate(DecodeMetrics.LINK_BUSY_SECONDS)
    hits = [percent(live.ratio(m.PREFIX_HIT_TOKENS, m.PREFIX_QUERY_TOKENS)) for m in (PrefillMetrics, DecodeMetrics)]
    tiers = KvMetrics.TIER_BYTES
    reasons = [labels["reason"] for labels, value in live.now.select(GpuMetrics.NVML_UP, {}) if not value]
    return Section(
        "What is full?",
        [
            Line("slots in a step", f"{number(slots)} of {count(live.value(PoolMetrics.SLOTS))}"),
            Line("paused slots", count(live.value(PoolMetrics.PAUSED_SLOTS))),
            Line("KV in use", percent(kv), _mood(kv, 0.9, 0.98)),
            Line("hits pre, dec", ", ".join(hits)),
            Line(f"KV {', '.join(tiers)}", ", ".join(size(live.highest(held)) for held in tiers.values())),
            Line("link", f"{percent(link)}, target {percent(live.highest(ControlMetrics.LINK_TARGET))}"),
            Line("GPU bandwidth", reasons[0] if reasons and bandwidth is None else percent(bandwidth)),
        ],
    )


def _latency(live: Live) -> Section:
    stages = [Line(stage.name, seconds(live.mean(stage.time))) for stage in TO_FIRST_TOKEN]
    return Section("Where does the time go?", stages)


def _controller(live: Live) -> Section:
    stalled = live.ratio(DecodeMetrics.STALL_SECONDS, DecodeMetrics.ROW_SECONDS)
    target = live.highest(ControlMetrics.STALL_TARGET) or 0.25
    return Section(
        "What does the controller do?",
        [
            Line("reserve r", percent(live.highest(ControlMetrics.RESERVE))),
            Line("flush τ_pre", seconds(live.highest(ControlMetrics.FLUSH_PREFILL))),
            Line("decode stalled", percent(stalled), _mood(stalled, target, 1.5 * target)),
            Line("preemptions/s", number(live.rate(PoolMetrics.PREEMPTIONS))),
            Line("missed/s", number(live.rate(PoolMetrics.DEADLINE_MISSES))),
            Line("changes", count(live.value(ControlMetrics.CHANGES))),
        ],
    )


def _written(live: Live) -> Section:
    return Section(
        "What is written?",
        [
            Line("writes p95", seconds(live.quantile(0.95, FrontendMetrics.WRITE_TIME))),
            Line("segments", count(live.value(FrontendMetrics.LIVE_SEGMENTS))),
            Line("documents", count(live.value(FrontendMetrics.LIVE_DOCUMENTS))),
            Line("being built", count(live.value(FrontendMetrics.LIVE_BUILDING))),
            Line("its graph", percent(live.value(FrontendMetrics.LIVE_BUILT["graph"]))),
            Line("not sealed", count(live.value(FrontendMetrics.LIVE_GROWING))),
            Line("deleted", count(live.value(FrontendMetrics.LIVE_TOMBSTONES))),
            Line("log", size(live.value(FrontendMetrics.LIVE_LOG_BYTES))),
        ],
    )


def _mood(value: float | None, warn: float, bad: float) -> Mood:
    if value is None:
        return "plain"
    return "bad" if value >= bad else "warn" if value >= warn else "good"


def seconds(value: float | None) -> str:
    """In the unit that fits."""
    if value is None:
        return NOTHING
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.0f} µs" if value else "0 s"


def size(value: float | None) -> str:
    """Bytes in MiB or GiB."""
    if value is None:
        return NOTHING
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


def number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"
