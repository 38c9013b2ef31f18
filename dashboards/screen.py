"""The first screen as text: the same questions, in the same order, as the Grafana overview; from /metrics alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dashboards.live import Live

Mood = Literal["good", "warn", "bad", "plain"]
_STAGES = ("queue", "embed", "retrieval", "prefill", "handover")
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
    """All but the table of workers."""
    return [_promises(live), _up(live), _queues(live), _saturation(live), _latency(live), _controller(live)]


WORKER_COLUMNS = ("worker", "device", "state", "restarts", "heartbeat", "memory", "threads", "fds")


def workers(live: Live) -> list[tuple[str, ...]]:
    """The rows of the table of workers, by role: `WORKER_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for labels, _ in live.now.select("trinity_worker_info", {}):
        name = labels["worker"]
        states = [state["state"] for state, _ in live.now.select("trinity_worker_state", {"worker": name})]
        rows.append(
            (
                name,
                labels["device"],
                states[0] if states else NOTHING,
                count(live.value("trinity_worker_restarts_total", worker=name)),
                seconds(live.value("trinity_worker_heartbeat_age_seconds", worker=name)),
                size(live.value("trinity_worker_resident_memory_bytes", worker=name)),
                count(live.value("trinity_worker_threads", worker=name)),
                count(live.value("trinity_worker_open_fds", worker=name)),
            )
        )
    return rows


def title(live: Live) -> str:
    """Which node this is."""
    for labels, _ in live.now.select("trinity_node_info", {}):
        return " ".join(part for part in ("node", labels.get("node", ""), labels.get("model_name", "")) if part)
    return "no node"


def _promises(live: Live) -> Section:
    budget = 1 - (live.highest("trinity_slo_objective_ratio") or 0.99)
    lines = []
    for slo in ("all", "ttft", "tpot", "search"):
        broken = live.ratio("trinity_slo_violations_total", "trinity_slo_requests_total", slo=slo)
        burn = None if broken is None else broken / budget
        shown = NOTHING if broken is None else f"{percent(1 - broken)}, burns {burn:.1f}×"
        lines.append(Line(slo, shown, _mood(burn, 6, 14.4)))
    return Section("Are promises kept?", lines)


def _up(live: Live) -> Section:
    names = [labels["worker"] for labels, _ in live.now.select("trinity_worker_up", {})]
    up = live.value("trinity_worker_up") or 0.0
    oldest = live.highest("trinity_worker_heartbeat_age_seconds")
    ended = live.increase("trinity_requests_total")
    bad = sum(live.increase("trinity_requests_total", outcome=how) or 0.0 for how in ("failed", "refused"))
    errors = None if not ended else bad / ended
    http = live.increase("trinity_http_responses_total")
    broken = None if not http else (live.increase("trinity_http_responses_total", status="5xx") or 0.0) / http
    return Section(
        "Is it up?",
        [
            Line("workers ready", f"{up:.0f} of {len(names)}", "good" if up == len(names) else "bad"),
            Line("oldest heartbeat", seconds(oldest), _mood(oldest, 5, 15)),
            Line("restarts", count(live.value("trinity_worker_restarts_total"))),
            Line("requests/s", number(live.rate("trinity_requests_total"))),
            Line("errors", percent(errors), _mood(errors, 0.001, 0.01)),
            Line("HTTP 5xx", percent(broken), _mood(broken, 0.001, 0.01)),
        ],
    )


def _queues(live: Live) -> Section:
    target = live.highest("trinity_control_wait_target_seconds") or 0.01
    lines = []
    for stage, short in (("prefill", "Q_pre"), ("decode", "Q_dec")):
        wait = live.quantile(0.95, "trinity_pool_wait_seconds", stage=stage)
        mood = _mood(wait, target, 2 * target) if stage == "prefill" else "plain"
        depth = count(live.value("trinity_pool_queue_depth", stage=stage))
        lines.append(Line(short, f"{depth} waiting, p95 {seconds(wait)}", mood))
    return Section(
        "Who waits?",
        [
            *lines,
            Line("for prefill", count(live.value("trinity_prefill_waiting"))),
            Line("in prefill", count(live.value("trinity_prefill_running"))),
            Line("for decode", count(live.value("trinity_num_requests_waiting"))),
            Line("decoding", count(live.value("trinity_num_requests_running"))),
        ],
    )


def _saturation(live: Live) -> Section:
    slots = live.ratio("trinity_pool_slot_steps_total", "trinity_pool_extends_total")
    kv = live.highest("trinity_kv_cache_usage_perc")
    bandwidth = live.highest("trinity_gpu_memory_busy_ratio")
    link = live.rate("trinity_kv_link_busy_seconds_total")
    reasons = [labels["reason"] for labels, value in live.now.select("trinity_nvml_up", {}) if not value]
    return Section(
        "What is full?",
        [
            Line("slots in a step", f"{number(slots)} of {count(live.value('trinity_pool_slots'))}"),
            Line("paused slots", count(live.value("trinity_pool_paused_slots"))),
            Line("KV in use", percent(kv), _mood(kv, 0.9, 0.98)),
            Line("link", f"{percent(link)}, target {percent(live.highest('trinity_control_link_target_ratio'))}"),
            Line("GPU bandwidth", reasons[0] if reasons and bandwidth is None else percent(bandwidth)),
        ],
    )


def _latency(live: Live) -> Section:
    stages = [Line(stage, seconds(live.mean(f"trinity_request_{stage}_time_seconds"))) for stage in _STAGES]
    ttft = live.quantile(0.95, "trinity_time_to_first_token_seconds")
    limit = live.highest("trinity_slo_limit_seconds", slo="ttft") or 1.0
    itl = live.quantile(0.95, "trinity_inter_token_latency_seconds")
    return Section(
        "Where does the time go?",
        [
            Line("TTFT p95", seconds(ttft), _mood(ttft, limit, 2 * limit)),
            *stages,
            Line("inter-token p95", seconds(itl)),
        ],
    )


def _controller(live: Live) -> Section:
    stalled = live.ratio("trinity_decode_stall_seconds_total", "trinity_decode_row_seconds_total")
    target = live.highest("trinity_control_stall_target_ratio") or 0.25
    return Section(
        "What does the controller do?",
        [
            Line("reserve r", percent(live.highest("trinity_control_reserve"))),
            Line("flush τ_pre", seconds(live.highest("trinity_control_flush_prefill_seconds"))),
            Line("decode stalled", percent(stalled), _mood(stalled, target, 1.5 * target)),
            Line("preemptions/s", number(live.rate("trinity_pool_preemptions_total"))),
            Line("missed/s", number(live.rate("trinity_pool_deadline_misses_total"))),
            Line("changes", count(live.value("trinity_control_changes_total"))),
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
