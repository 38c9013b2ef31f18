"""`trinity top`: values, rates and quantiles from scrapes of /metrics, as Prometheus computes them, and the screen."""

import io
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from dashboards import top
from dashboards.top import MetricWindow, parse, screen, sections, show
from runtime.errors import Unavailable
from runtime.node.config import NodeConfig, SloSection
from runtime.node.control.loop import ControlLoop
from runtime.node.metrics.exporter import render, table_families
from runtime.node.metrics.kinds import Histogram
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import METRICS, DecodeMetrics, FrontendMetrics, PoolMetrics, PrefillMetrics
from runtime.node.placement.plan import WorkerPlan
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.admin import NodeStatus, WorkerStatus
from runtime.node.supervisor.node_metrics import node_families

WAIT = Histogram("wait_seconds", "", (0.1, 0.2))
HISTOGRAM = """# TYPE wait_seconds histogram
wait_seconds_bucket{{le="0.1"}} {0}
wait_seconds_bucket{{le="0.2"}} {1}
wait_seconds_bucket{{le="+Inf"}} {2}
wait_seconds_sum {3}
wait_seconds_count {2}
"""


def live(*texts: str, every_s: float = 2.0) -> MetricWindow:
    made = MetricWindow()
    for number, text in enumerate(texts):
        made.add(number * every_s, parse(text))
    return made


def counter(*values: float) -> list[str]:
    return [f'# TYPE x counter\nx_total{{worker="a"}} {value}\nx_total{{worker="b"}} {value}\n' for value in values]


def test_a_rate_is_the_increase_of_all_series_over_the_elapsed_time() -> None:
    assert live(*counter(0, 10)).rate("x_total") == 10.0
    assert live(*counter(0, 10)).rate("x_total", worker="a") == 5.0


def test_one_scrape_gives_values_but_no_rates_and_missing_series_are_none() -> None:
    one = live(*counter(5))
    assert one.total("x_total") == 10.0
    assert one.rate("x_total") is None
    assert live(*counter(0, 1)).rate("y_total") is None


def test_a_decreased_counter_is_a_reset_and_no_rate_is_negative() -> None:
    assert live(*counter(100, 3)).increase("x_total", worker="a") == 3.0


def test_a_worker_that_leaves_takes_nothing_from_the_increase_of_the_others() -> None:
    (both,) = counter(100)
    one = '# TYPE x counter\nx_total{worker="b"} 103\n'
    assert live(both, one).increase("x_total") == 3.0
    assert live(one, both).increase("x_total") == 200.0  # a worker that is added, and one that was reset


def test_only_the_latest_half_minute_counts() -> None:
    assert live(*counter(0, 100, 200, 200, 200), every_s=15).rate("x_total") == 0.0


def test_a_quantile_is_interpolated_within_its_bucket_over_new_observations() -> None:
    two = live(HISTOGRAM.format(50, 50, 50, 1.0), HISTOGRAM.format(50, 60, 60, 2.5))
    assert two.quantile(0.5, WAIT) == pytest.approx(0.15)


def test_a_quantile_is_capped_at_the_last_edge_and_none_without_observations() -> None:
    assert live(HISTOGRAM.format(0, 0, 0, 0), HISTOGRAM.format(0, 0, 9, 9)).quantile(0.5, WAIT) == 0.2
    assert live(HISTOGRAM.format(1, 1, 1, 0), HISTOGRAM.format(1, 1, 1, 0)).quantile(0.5, WAIT) is None


def test_seconds_are_shown_in_a_fitting_unit() -> None:
    shown = [top.seconds(value) for value in (None, 0.0, 50e-6, 0.0123, 2.5)]
    assert shown == ["–", "0 s", "50 µs", "12.3 ms", "2.5 s"]


@pytest.fixture
def scrape() -> Iterator[Callable[[], str]]:
    """A node's /metrics: each scrape has ten more generations, one of them late."""
    tables = {f"{role}-0": WorkerTable.create(role, f"{role}-0", SloSection()) for role in METRICS}
    config = NodeConfig()
    plans = [WorkerPlan(table.role, 0, "cpu", (), 1) for table in tables.values()]
    control = ControlLoop(config, {})
    statuses = tuple(
        WorkerStatus(name, "ready" if name != "decode-0" else "backoff", 0, 1, 2, 0.05, 100 << 20, "cpu", ())
        for name in tables
    )
    status = NodeStatus(NodeInfo("n1", 1, "", "", (), ()), False, statuses)

    def read() -> str:
        tables["frontend-0"].add(FrontendMetrics.REQUESTS["finished"], 10)
        tables["frontend-0"].add(FrontendMetrics.SLO_REQUESTS["all"], 10)
        tables["frontend-0"].add(FrontendMetrics.SLO_VIOLATIONS["all"], 1)
        tables["decode-0"].observe_many(DecodeMetrics.TTFT, [0.3] * 10)
        tables["prefill-0"].observe_many(PrefillMetrics.PREFILL_TIME, [0.25] * 10)
        tables["pool-0"].set(PoolMetrics.QUEUE_DEPTH["prefill"], 7)
        families = (*table_families(tables), *node_families(config, plans, status), *control.families())
        return render(families, {"node": "n1", "model_name": "tiny"})

    yield read
    for table in tables.values():
        table.close()


def test_every_value_and_four_workers_are_on_a_screen_of_80_by_24(scrape: Callable[[], str]) -> None:
    window = live(scrape(), scrape())
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(screen(window))
    shown = captured.get()
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80
    decode = next(number for number, line in enumerate(lines) if line.startswith("decode-0"))
    assert lines[decode].split() == ["decode-0", "cpu", "backoff", "2", "0", "s", "0.0", "%", "100", "MiB"]
    assert [line.split()[0] for line in lines[-6:]] == [f"{role}-0" for role in METRICS]
    assert len(lines) - 6 + 4 <= 24
    for name, text in (pair for section in sections(window).values() for pair in section.items()):
        assert name in shown
        assert text.plain in shown
    for words in ("node n1", "90.0 %, burns 10.0×", "7 waiting, p95 –", "5 of 6", "250 ms"):
        assert words in shown
    assert sections(window)["Health"]["requests/s"].plain == "5.0"


def test_an_unreachable_node_is_reported_above_its_last_values(scrape: Callable[[], str]) -> None:
    answers = iter([scrape(), scrape()])
    waits = iter([2.0, 2.0])

    def fetch() -> str:
        for text in answers:
            return text
        raise Unavailable("no answer from http://n1")

    def wait(_: float) -> None:
        if next(waits, None) is None:
            raise KeyboardInterrupt

    moments = iter((0.0, 2.0, 4.0))
    console = Console(file=io.StringIO(), width=150, force_terminal=True)
    show(fetch, 2.0, wait, lambda: next(moments), console)
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rpartition("no answer from http://n1")
    assert last[1]
    assert "burns 10.0×" in last[2]
