"""`trinity top`: SLOs, health, queues, saturation, latency and workers of a node, from its /metrics."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runtime.errors import Unavailable
from runtime.node.control.law import quantile
from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, PoolMetrics, PrefillMetrics
from runtime.node.supervisor_metrics import ControlMetrics, GpuMetrics, NamedMetric, NodeMetrics, ProcessMetrics
from runtime.serving.stages import BATCHED, RERANKED, SEARCHED, TO_FIRST_TOKEN

NO_DATA = "–"
_WINDOW_S = 30.0  # of rates and quantiles
_COLUMN_WIDTH = 39
_RARE = (BATCHED, SEARCHED, RERANKED)  # ends of stages that are short, or of few nodes

Labels = Mapping[str, str]
Samples = Mapping[str, list[tuple[Labels, float]]]


def parse(text: str) -> Samples:
    """Parse Prometheus's text format: name → labels and value of each sample. Raises `ValueError`."""
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


class MetricWindow:
    """The scrapes of the last half minute. Methods return None without data, or before a second scrape."""

    def __init__(self) -> None:
        self._scrapes: deque[tuple[float, Samples]] = deque()

    def add(self, at_s: float, samples: Samples) -> None:
        """Add a scrape at a time of a monotonic clock."""
        self._scrapes.append((at_s, samples))
        while len(self._scrapes) > 2 and self._scrapes[1][0] <= at_s - _WINDOW_S:
            self._scrapes.popleft()

    def select(self, name: str | NamedMetric, **labels: str) -> Iterator[tuple[Labels, float]]:
        """Iterate over the latest samples of a metric with these labels."""
        return _select(self._scrapes[-1][1], str(name), labels)

    def total(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Return the sum of a metric's series."""
        values = [value for _, value in self.select(name, **labels)]
        return sum(values) if values else None

    def highest(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Return the maximum of a metric's series."""
        return max((value for _, value in self.select(name, **labels)), default=None)

    def increase(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Return a counter's increase over the window, the sum of its series'; after a decrease, which is a reset, a
        series' is its value."""
        current = list(self.select(name, **labels))
        if len(self._scrapes) < 2 or not current:
            return None
        before = {tuple(series.items()): value for series, value in _select(self._scrapes[0][1], str(name), labels)}
        pairs = [(now, before.get(tuple(series.items()), 0.0)) for series, now in current]
        return sum(now - was if now >= was else now for now, was in pairs)

    def rate(self, name: str | NamedMetric, **labels: str) -> float | None:
        """Return a counter's increase per second."""
        increase, elapsed_s = self.increase(name, **labels), self._scrapes[-1][0] - self._scrapes[0][0]
        return None if increase is None or elapsed_s <= 0 else increase / elapsed_s

    def ratio(self, part: str | NamedMetric, whole: str | NamedMetric, **labels: str) -> float | None:
        """Return one counter's increase divided by another's. The mean of a histogram is that of its sum and count."""
        numerator, denominator = self.increase(part, **labels), self.increase(whole, **labels)
        return None if numerator is None or not denominator else numerator / denominator

    def quantile(self, q: float, histogram: NamedMetric, **labels: str) -> float | None:
        """Return a quantile as histogram_quantile does: linear within a bucket, the last finite edge beyond it."""
        name = f"{histogram}_bucket"
        edges = sorted({series["le"] for series, _ in self.select(name, **labels)}, key=float)
        counts = [self.increase(name, le=edge, **labels) or 0.0 for edge in edges]
        if not counts or not counts[-1]:
            return None
        own = [upper - lower for lower, upper in pairwise([0.0, *counts])]
        return quantile(q, [float(edge) for edge in edges[:-1]], own)


def _select(samples: Samples, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
    return ((series, value) for series, value in samples.get(name, ()) if labels.items() <= series.items())


# ---- sections: named values as text, coloured by their limits


Section = dict[str, Text]


def sections(window: MetricWindow) -> dict[str, Section]:
    return {
        "SLOs": _slos(window),
        "Health": _health(window),
        "Queues": _queues(window),
        "Saturation": _saturation(window),
        "Latency": {
            stage.name: Text(seconds(window.ratio(f"{stage.time}_sum", f"{stage.time}_count")))
            for stage in TO_FIRST_TOKEN
            if stage.end not in _RARE
        },
    }


def _slos(window: MetricWindow) -> Section:
    budget = 1 - (window.highest(NodeMetrics.SLO_OBJECTIVE) or 0.99)
    shown_by_slo = {}
    for slo in ("all", "ttft", "tpot", "search"):
        violations = window.ratio(FrontendMetrics.SLO_VIOLATIONS, FrontendMetrics.SLO_REQUESTS, slo=slo)
        burn = None if violations is None else violations / budget
        shown = NO_DATA if violations is None else f"{percent(1 - violations)}, burns {burn:.1f}×"
        shown_by_slo[slo] = _coloured(shown, burn, 6, 14.4)
    ttft = window.quantile(0.95, DecodeMetrics.TTFT)
    limit = window.highest(NodeMetrics.SLO_LIMIT, slo="ttft") or 1.0
    shown_by_slo["TTFT p95"] = _coloured(seconds(ttft), ttft, limit, 2 * limit)
    shown_by_slo["token p95"] = Text(seconds(window.quantile(0.95, DecodeMetrics.INTER_TOKEN)))
    return shown_by_slo


def _health(window: MetricWindow) -> Section:
    ready = [value for _, value in window.select(ProcessMetrics.UP)]
    oldest = window.highest(ProcessMetrics.HEARTBEAT_AGE)
    bad = sum(window.increase(FrontendMetrics.REQUESTS, outcome=how) or 0.0 for how in ("failed", "refused"))
    ended = window.increase(FrontendMetrics.REQUESTS)
    errors = bad / ended if ended else None
    return {
        "workers ready": _coloured(f"{sum(ready):.0f} of {len(ready)}", float(not all(ready)), 1, 1),
        "oldest heartbeat": _coloured(seconds(oldest), oldest, 5, 15),
        "restarts": Text(number(window.total(ProcessMetrics.RESTARTS), 0)),
        "requests/s": Text(number(window.rate(FrontendMetrics.REQUESTS))),
        "errors": _coloured(percent(errors), errors, 0.001, 0.01),
    }


def _queues(window: MetricWindow) -> Section:
    target = window.highest(ControlMetrics.WAIT_TARGET) or 0.01
    lines = {}
    for stage, queue in (("prefill", "Q_pre"), ("decode", "Q_dec")):
        wait = window.quantile(0.95, PoolMetrics.WAIT, stage=stage)
        shown = f"{number(window.total(PoolMetrics.QUEUE_DEPTH, stage=stage), 0)} waiting, p95 {seconds(wait)}"
        lines[queue] = _coloured(shown, wait if stage == "prefill" else None, target, 2 * target)
    for role, metrics in (("prefill", PrefillMetrics), ("decode", DecodeMetrics)):
        waiting, running = (number(window.total(metric), 0) for metric in (metrics.WAITING, metrics.RUNNING))
        lines[role] = Text(f"{waiting} waiting, {running} running")
    return lines


def _saturation(window: MetricWindow) -> Section:
    slots, kv = window.ratio(PoolMetrics.SLOT_STEPS, PoolMetrics.EXTENDS), window.highest(DecodeMetrics.KV_USED)
    stalled = window.ratio(DecodeMetrics.STALL_SECONDS, DecodeMetrics.ROW_SECONDS)
    target = window.highest(ControlMetrics.STALL_TARGET) or 0.25
    return {
        "slots per step": Text(f"{number(slots)} of {number(window.total(PoolMetrics.SLOTS), 0)}"),
        "reserve r": Text(percent(window.highest(ControlMetrics.RESERVE))),
        "decode stalled": _coloured(percent(stalled), stalled, target, 1.5 * target),
        "KV in use": _coloured(percent(kv), kv, 0.9, 0.98),
        "KV link": Text(percent(window.rate(DecodeMetrics.LINK_BUSY_SECONDS))),
        "GPU bandwidth": Text(percent(window.highest(GpuMetrics.MEMORY_BUSY))),
    }


def _coloured(shown: str, value: float | None, warn: float, bad: float) -> Text:
    if value is None:
        return Text(shown)
    return Text(shown, "bold red" if value >= bad else "yellow" if value >= warn else "green")


def seconds(value: float | None) -> str:
    """Format seconds in s, ms or µs."""
    if value is None:
        return NO_DATA
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.0f} µs" if value else "0 s"


def percent(value: float | None) -> str:
    return NO_DATA if value is None else f"{100 * value:.1f} %"


def number(value: float | None, digits: int = 1) -> str:
    return NO_DATA if value is None else f"{value:.{digits}f}"


# ---- the screen


def workers(window: MetricWindow) -> Table:
    """Return the table of workers, by role."""
    table = Table("worker", "device", "state", "restarts", "heartbeat", "CPU", "memory", box=None, padding=(0, 2, 0, 0))
    for labels, _ in window.select(ProcessMetrics.STATE):
        name, state = labels["worker"], labels["state"]
        device = next((series["device"] for series, _ in window.select(ProcessMetrics.INFO, worker=name)), NO_DATA)
        memory = window.total(ProcessMetrics.RESIDENT, worker=name) or 0.0
        table.add_row(
            name,
            device,
            Text(state, "green" if state == "ready" else "bold red"),
            number(window.total(ProcessMetrics.RESTARTS, worker=name), 0),
            seconds(window.highest(ProcessMetrics.HEARTBEAT_AGE, worker=name)),
            percent(window.rate(ProcessMetrics.CPU_SECONDS, worker=name)),
            f"{memory / 2**20:,.0f} MiB",
        )
    return table


def screen(window: MetricWindow, error: str = "") -> RenderableType:
    """Return the node's name, or the error; the sections in two columns; the workers. With four workers it fits
    80 × 24."""
    head = next((labels.get("node", "") for labels, _ in window.select(NodeMetrics.INFO)), "")
    columns = Table.grid()
    for _ in range(2):
        columns.add_column(width=_COLUMN_WIDTH)
    boxes = [_box(title, section) for title, section in sections(window).items()]
    columns.add_row(Group(*boxes[:3]), Group(*boxes[3:]))
    return Group(Text(error, "bold red") if error else Text(f"node {head}", "bold"), columns, workers(window))


def _box(title: str, section: Section) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1, 0, 0))
    for name, text in section.items():
        table.add_row(Text(name, "dim"), text)
    return table


def show(
    fetch: Callable[[], str],
    every_s: float,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    console: Console | None = None,
) -> None:
    """Show the screen until Ctrl-C. `fetch` returns the text of /metrics or raises `Unavailable`: at first that is
    the command's error, later it is shown above the last values."""
    window, error = MetricWindow(), ""
    window.add(clock(), parse(fetch()))
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(window, error), refresh=True)
            wait(every_s)
            try:
                window.add(clock(), parse(fetch()))
                error = ""
            except (Unavailable, ValueError) as failure:
                error = str(failure)
