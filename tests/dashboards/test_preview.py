"""The overview rendered without Grafana: every panel shows Prometheus' answer on a self-contained page."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

import pytest

from dashboards.grafana import Json
from dashboards.overview import overview
from dashboards.preview import PanelData, load_panels
from dashboards.svg import format_value, render_page

END_S = 1_000_000.0
LABELS = {"node": "n", "worker": "pool-<0>", "role": "pool", "stage": "decode", "slo": "all", "gpu": "0"}


class FakePrometheus:
    """A Prometheus that answers every query with two series, or none if it contains `empty`."""

    def __init__(self, empty: str = "") -> None:
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self._empty = empty

    def query(self, path: str, parameters: Mapping[str, str]) -> list[Json]:
        self.asked.append((path, parameters))
        if self._empty and self._empty in parameters["query"]:
            return []
        if path == "query":
            return [{"metric": LABELS, "value": [END_S, "1.5"]}]
        begin = float(parameters["start"])
        values = [[begin, "1"], [begin + 100, "NaN"], [END_S, "3"]]
        return [{"metric": LABELS, "values": values}, {"metric": {}, "values": [[END_S, "+Inf"]]}]


def panel(panels: list[PanelData], title: str) -> PanelData:
    return next(found for found in panels if found.title == title)


def test_every_panel_of_the_dashboard_is_there_in_its_place() -> None:
    board = overview()
    panels = load_panels(board, FakePrometheus().query, END_S)
    assert [(found.kind, found.title) for found in panels] == [(p["type"], p["title"]) for p in board["panels"]]
    assert panels[1].place == (0, 1, 4, 4)


def test_queries_cover_the_time_range_with_grafanas_variables_substituted() -> None:
    prometheus = FakePrometheus()
    load_panels(overview(), prometheus.query, END_S, span_s=600)
    assert not any("$" in parameters["query"] for _, parameters in prometheus.asked)
    ranges = [parameters for path, parameters in prometheus.asked if path == "query_range"]
    assert {(one["start"], one["end"], one["step"]) for one in ranges} == {("999400.000", "1000000.000", "5.000")}


def test_lines_have_names_and_only_finite_values() -> None:
    found = panel(load_panels(overview(), FakePrometheus().query, END_S), "KV in use")
    assert [(line.name, line.points) for line in found.lines] == [("n pool-<0>", [(END_S - 300, 1.0), (END_S, 3.0)])]
    assert found.unit == "percentunit"
    assert found.last == 3.0


def test_a_table_has_a_row_for_each_worker_and_a_column_for_each_query() -> None:
    found = panel(load_panels(overview(), FakePrometheus().query, END_S), "Workers by role")
    assert list(found.columns)[-6:] == ["up", "restarts", "heartbeat", "memory", "threads", "fds"]
    (row,) = found.rows
    assert [cell.value for cell in row][-6:] == [1.5] * 6
    assert row[-4].unit == "s"


def test_the_page_is_well_formed_and_self_contained() -> None:
    for prometheus in (FakePrometheus(), FakePrometheus(empty="trinity_")):
        text = render_page(load_panels(overview(), prometheus.query, END_S), "now & then")
        svg = re.search(r"<svg.*</svg>", text)
        assert svg is not None
        root = ElementTree.fromstring(svg[0])
        titles = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"now & then", "Health", "Oldest heartbeat", "Time to first token"} <= titles
        assert "<script" not in text
        assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.0123, "s", "12.3 ms"),
        (42e-6, "s", "42 µs"),
        (0.997, "percentunit", "99.7%"),
        (3 * 2**30, "bytes", "3.00 GiB"),
        (4.5 * 2**20, "bytes", "4.5 MiB"),
        (12_300.0, "reqps", "12.3k req/s"),
        (None, "short", "–"),
    ],
)
def test_values_are_formatted_in_their_units(value: float | None, unit: str, words: str) -> None:
    assert format_value(value, unit) == words


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_chromium_draws_the_page(tmp_path: Path) -> None:
    source = tmp_path / "page.html"
    source.write_text(render_page(load_panels(overview(), FakePrometheus().query, END_S), "drawn"), encoding="utf-8")
    picture = tmp_path / "page.png"
    run = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1500,800", "--virtual-time-budget=1000", f"--screenshot={picture}", source.as_uri(),
        ],
        capture_output=True,
        timeout=100,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
