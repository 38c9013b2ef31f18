"""`trinity top`: the screen compared as text, in textual's own test driver and in a real pseudo-terminal."""

import asyncio
import html
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from textual.widgets import DataTable, Static

from dashboards import terminal_overview
from dashboards.terminal_overview import MetricWindow, Snapshot
from dashboards.top import TopApp
from runtime.errors import Unavailable
from runtime.node.config import NodeConfig, SloSection
from runtime.node.control.loop import ControlLoop
from runtime.node.metrics.exporter import NodeCollector, render
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import METRICS, DecodeMetrics, FrontendMetrics, PoolMetrics, PrefillMetrics
from runtime.node.placement.gpus import Gpus
from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.admin import WorkerStatus
from runtime.node.supervisor.node_metrics import NodeMetricsSource, Usage
from tests.node.fake_nvml import FakeNvml

ROWS, COLUMNS = 44, 150


class Source:
    """A node's /metrics: each scrape has ten more generations, one of them late."""

    def __init__(self) -> None:
        self.looks = 0
        self.tables = {f"{role}-0": WorkerTable.create(role, f"{role}-0", SloSection()) for role in METRICS}
        plans = [WorkerPlan(t.role, 0, "cpu", (), 1) for t in self.tables.values()]
        self.config = NodeConfig()
        self.figures = NodeMetricsSource(self.config, plans, "1.0", lambda pid: Usage(1.0, 100 << 20, 3, 20))
        self.control = ControlLoop(self.config, {})

    def __call__(self) -> str:
        self.looks += 1
        frontend, decode = self.tables["frontend-0"], self.tables["decode-0"]
        frontend.add(FrontendMetrics.REQUESTS["finished"], 10)
        frontend.add(FrontendMetrics.SLO_REQUESTS["all"], 10)
        frontend.add(FrontendMetrics.SLO_VIOLATIONS["all"], 1)
        decode.observe_many(DecodeMetrics.TTFT, [0.3] * 10)
        self.tables["prefill-0"].observe_many(PrefillMetrics.PREFILL_TIME, [0.25] * 10)
        self.tables["pool-0"].set(PoolMetrics.QUEUE_DEPTH["prefill"], 7)
        statuses = [
            WorkerStatus(name, "ready" if name != "decode-0" else "backoff", 7, 1, 2, 0.05, 0, "cpu", ())
            for name in self.tables
        ]
        more = (lambda: self.figures.families(statuses, 1), self.control.families, Gpus(FakeNvml([], "none")).families)
        return render(NodeCollector(self.tables, more, {"node": "n1", "model_name": "tiny"}))

    def write(self) -> None:
        """Into a collection."""
        self.tables["frontend-0"].set(FrontendMetrics.COLLECTION_LOG_BYTES, 1 << 20)
        self.tables["frontend-0"].set(FrontendMetrics.COLLECTION_SEGMENTS, 3)

    def close(self) -> None:
        for table in self.tables.values():
            table.close()


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


def lines(live: MetricWindow, title: str) -> dict[str, str]:
    section = next(section for section in terminal_overview.sections(live) if section.title == title)
    return {line.name: line.text for line in section.lines}


def test_the_screen_is_computed_from_two_scrapes(source: Source) -> None:
    live = MetricWindow()
    for at_s in (0.0, 2.0):
        live.add(Snapshot.parse(at_s, source()))
    assert lines(live, "SLOs")["all"] == "90.0 %, burns 10.0×"
    assert lines(live, "SLOs")["search"] == "–"
    assert lines(live, "Health")["workers ready"] == "5 of 6"
    assert lines(live, "Health")["requests/s"] == "5.0"
    assert lines(live, "Queues")["Q_pre"] == "7 waiting, p95 –"
    assert lines(live, "Latency")["prefill"] == "250 ms"
    assert "NVML: none" in lines(live, "Saturation")["GPU bandwidth"]
    decode = next(row for row in terminal_overview.worker_rows(live) if row[0] == "decode-0")
    assert decode == ("decode-0", "cpu", "backoff", "2", "0 s", "100 MiB", "3", "20")


def test_an_unreachable_node_is_reported_and_the_last_values_stay(source: Source) -> None:
    moments = iter(range(0, 100, 2))
    fails = False

    def fetch() -> str:
        if fails:
            raise Unavailable("no metrics from http://n1")
        return source()

    async def drive() -> None:
        nonlocal fails
        app = TopApp(fetch, every_s=3600, clock=lambda: float(next(moments)))
        async with app.run_test(size=(COLUMNS, ROWS)) as pilot:
            for _ in range(2):
                await pilot.press("r")
                await app.workers.wait_for_complete()
                await pilot.pause()
            section = app.query("Grid > Static").first(Static)
            assert "90.0 %, burns 10.0×" in str(section.content)
            assert app.query_one("#workers", DataTable).row_count == len(source.tables)
            fails = True
            await pilot.press("r")
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert "no metrics from http://n1" in str(app.query_one("#title", Static).content)
            assert "90.0 %, burns 10.0×" in str(section.content)
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(drive())


def lines_of(screenshot: str) -> list[str]:
    """Return the text of a screen, from top to bottom."""
    lines: dict[int, str] = {}
    for number, text in re.findall(r"<text [^>]*-line-(\d+)\)[^>]*>([^<]*)</text>", screenshot):
        lines[int(number)] = lines.get(int(number), "") + html.unescape(text).replace("\xa0", " ")
    return [lines[number] for number in sorted(lines)]


@pytest.mark.parametrize(("size", "written"), [((80, 24), False), ((COLUMNS, ROWS), False), ((80, 34), True)], ids=str)
def test_every_worker_and_every_metric_is_on_the_screen(source: Source, size: tuple[int, int], written: bool) -> None:
    if written:
        source.write()
    moments = iter(range(0, 100, 2))

    async def drive() -> list[str]:
        app = TopApp(source, every_s=3600, clock=lambda: float(next(moments)))
        async with app.run_test(size=size) as pilot:
            for _ in range(2):
                await pilot.press("r")
                await app.workers.wait_for_complete()
                await pilot.pause()
            return lines_of(app.export_screenshot())

    shown = asyncio.run(drive())
    firsts = [line.split()[0] for line in shown if line.strip()]
    assert [first for first in firsts if first in source.tables] == list(source.tables)
    figures = [line for section in terminal_overview.sections(live_of(source)) for line in section.lines]
    for figure in figures:
        place = next((line for line in shown if figure.name in line), None)
        assert place is not None, figure.name
    for words in ("90.0 %, burns 10.0×", "7 waiting, p95 –", "5 of 6", "250 ms", "0.0 %, target 5.0 %"):
        assert any(words in line for line in shown), words


def live_of(source: Source) -> MetricWindow:
    live = MetricWindow()
    live.add(Snapshot.parse(0.0, source()))
    return live


@pytest.fixture
def url(source: Source) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = source().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=60)
    server.server_close()
