"""A real Prometheus scrapes a node under load: panels and alerts have data, and a burn-rate alert fires and clears."""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import httpx
import pytest

from dashboards.overview import overview
from dashboards.provisioning import all_dashboards
from dashboards.rules import alerts, rules_yaml
from runtime.retrieval.collections.bulk_load import create
from runtime.testing.background import Background
from runtime.testing.node import Node
from runtime.testing.waiting import eventually
from tests.dashboards.tools import promtool
from tests.e2e.conftest import StartNode
from tests.e2e.load import load, slowed
from tests.e2e.prometheus import Prometheus

pytestmark = pytest.mark.timeout(600)  # the first one starts a node, a Prometheus and load

SCALE = 1 / 100  # an hour is 36 s, five minutes are 3 s
SLO = """
[slo]
ttft_s = 30.0
tpot_s = 5.0
search_s = 1.0
"""
LIVE = """
[[collections]]
name = "notes"
path = "{path}"
"""
HANDED_OVER = '\n[handover]\ndisaggregate = "always"\n'  # where decode computes short prompts, no panel shows them
SLO_OF_ITS_OWN = "search"  # what is slowed below


@pytest.fixture(scope="module")
def watched(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Prometheus]]:
    notes = tmp_path_factory.mktemp("notes") / "notes"
    create(notes, 4, metric="l2", degree=4)
    node = start_node(more=SLO + LIVE.format(path=notes) + HANDED_OVER)
    target = node.info.url.removeprefix("http://")
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), target, rules_yaml(SCALE, interval_s=0.5))

    def write() -> None:
        documents = [{"id": "a", "text": "a note", "vector": [1.0, 2.0, 3.0, 4.0]}]
        while not writing.ended.wait(0.2):
            put = httpx.put(
                f"{node.info.url}/v1/collections/notes/documents", json={"documents": documents}, timeout=60
            )
            assert put.status_code == 200, put.text

    writing = Background([write])
    with writing, load(node) as answers:
        eventually(lambda: answers[200] > 20, 180, "answers")
        for part in ("queue_time", "time_per_output_token"):  # a generation's begin and its end: both within its sight
            wanted = f"rate(trinity_request_{part}_seconds_count[30s]) > 0"
            eventually(partial(prometheus.query, wanted), 180, f"Prometheus to see {wanted}")
        yield node, prometheus
    assert set(answers) == {200}
    prometheus.close()
    node.stop()


def concrete(expr: str) -> str:
    """Return a panel's expression with Grafana's variables substituted."""
    known = {"$__rate_interval": "30s", "$node": ".*", "$model": ".*", "$slo": "all"}
    for name, value in known.items():
        expr = expr.replace(name, value)
    return expr


def without_data(prometheus: Prometheus, exprs: list[str]) -> list[str]:
    return [expr for expr in exprs if not any(math.isfinite(value) for value in prometheus.values(expr))]


def never_with_data(prometheus: Prometheus, exprs: list[str]) -> list[str]:
    """Return the expressions without data for a minute: a late scrape makes a target's series stale until the next."""
    missing = exprs

    def all_seen() -> bool:
        nonlocal missing
        missing = without_data(prometheus, missing)
        return not missing

    with suppress(AssertionError):
        eventually(all_seen, 60, "data")
    return missing


def test_every_panel_shows_data(watched: tuple[Node, Prometheus]) -> None:
    _, prometheus = watched
    exprs = [
        concrete(target["expr"])
        for board in all_dashboards().values()
        for panel in board["panels"]
        for target in panel.get("targets", [])
        # without a driver and a reranker they have no figures: test_gpus.py and test_rerank.py have those, and
        # test_optional_metrics.py the metrics of others
        if re.search(r"trinity_(?!gpu_|rerank)", target["expr"])
    ]
    assert len(exprs) > 40
    assert never_with_data(prometheus, exprs) == []


def test_every_alert_selects_existing_series(watched: tuple[Node, Prometheus]) -> None:
    _, prometheus = watched
    values = [condition.value for alert in alerts(SCALE) for condition in alert.conditions]
    # Windows of three seconds may hold no request of one kind: ask with longer ones.
    assert never_with_data(prometheus, [re.sub(r"\[\d+ms\]", "[30s]", value) for value in values]) == []


def test_every_queried_metric_exists(watched: tuple[Node, Prometheus]) -> None:
    _, prometheus = watched
    exprs = [target["expr"] for panel in overview()["panels"] for target in panel.get("targets", [])]
    exprs += [alert.expr for alert in alerts()]
    asked = {name for expr in exprs for name in re.findall(r"\btrinity_\w+", expr)}
    assert {name for name in asked if not name.startswith("trinity_gpu_")} <= prometheus.names()


def test_promtool_accepts_the_metrics_without_warnings(watched: tuple[Node, Prometheus]) -> None:
    node, _ = watched
    lines = [line for line in node.metrics_text().splitlines(keepends=True) if "vllm:" not in line]  # names of vLLM
    run = promtool("check", "metrics", stdin="".join(lines))
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_slowdown_fires_a_burn_rate_alert_which_clears_afterwards(
    watched: tuple[Node, Prometheus],
) -> None:
    node, prometheus = watched

    def firing() -> bool:
        return any(labels["slo"] == SLO_OF_ITS_OWN for labels in prometheus.firing("TrinitySLOBurnsFast"))

    eventually(lambda: not firing(), 180, "searches that are fast")  # at the start of a node some may be slow
    with slowed(node.pid("pool-0"), stopped_s=1.5):
        eventually(firing, 180, "the alert to fire")
    eventually(lambda: not firing(), 180, "the alert to clear")
