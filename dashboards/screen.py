"""The first screen as text: the same questions, in the same order, as the Grafana overview; from /metrics alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dashboards.live import Live
from runtime.node.figures import ControlMetrics, GpuMetrics, NodeMetrics, ProcessMetrics
from runtime.node.metrics.columns import DecodeMetrics, FrontendMetrics, PoolMetrics, PrefillMetrics
from runtime.serving.stages import TO_FIRST_TOKEN

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
    reasons = [labels["reason"] for labels, value in live.now.select(GpuMetrics.NVML_UP, {}) if not value]
    return Section(
        "What is full?",
        [
            Line("slots in a step", f"{number(slots)} of {count(live.value(PoolMetrics.SLOTS))}"),
            Line("paused slots", count(live.value(PoolMetrics.PAUSED_SLOTS))),
            Line("KV in use", percent(kv), _mood(kv, 0.9, 0.98)),
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
