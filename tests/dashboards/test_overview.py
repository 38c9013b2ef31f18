"""Dashboards match the exported metrics and Grafana's rules, and committed files match the code."""

import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from dashboards.provisioning import GENERATED, all_dashboards, export
from dashboards.rules import alerts
from runtime.errors import ConfigError
from tests.dashboards.exported_metrics import exported_names

BOARDS = all_dashboards()
ROOT = Path(__file__).parents[2]
OPTIONS = {  # what Grafana's own panels know, and nothing else
    "row": set(),
    "stat": {"reduceOptions", "colorMode", "graphMode", "textMode", "justifyMode", "orientation", "wideLayout"},
    "timeseries": {"legend", "tooltip", "timezone"},
    "table": {"showHeader", "cellHeight", "sortBy", "footer", "frameIndex"},
}
UNITS = {"s", "bytes", "Bps", "reqps", "percentunit", "short", "watt"}


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def names_in(expr: str) -> set[str]:
    return set(re.findall(r"\btrinity_\w+", expr))


@pytest.mark.parametrize("uid", BOARDS)
def test_every_metric_of_a_panel_is_exported(uid: str) -> None:
    asked = {name for expr in expressions(BOARDS[uid]) for name in names_in(expr)}
    assert asked
    assert asked - exported_names() == set()


def test_every_metric_of_an_alert_is_exported() -> None:
    asked = {name for alert in alerts() for name in names_in(alert.expr)}
    assert asked - exported_names() == set()


@pytest.mark.parametrize("uid", BOARDS)
def test_every_expression_is_valid_promql(uid: str) -> None:
    for expr in expressions(BOARDS[uid]):
        assert promql_parser.parse(expr.replace("$__rate_interval", "1m"))


@pytest.mark.parametrize("uid", BOARDS)
def test_every_panel_can_be_filtered_by_node_and_model(uid: str) -> None:
    for expr in expressions(BOARDS[uid]):
        for selector in re.findall(r"\btrinity_\w+(\{[^}]*\})?", expr):
            assert 'node=~"$node"' in selector, expr
            assert 'model_name=~"$model"' in selector, expr


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_have_unique_ids_and_do_not_overlap(uid: str) -> None:
    panels = BOARDS[uid]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_use_types_options_and_units_of_grafana(uid: str) -> None:
    for panel in BOARDS[uid]["panels"]:
        assert panel["type"] in OPTIONS, panel["title"]
        assert set(panel.get("options", {})) <= OPTIONS[panel["type"]], panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["title"]
        assert panel["description"]
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + i) for i in range(len(panel["targets"]))]
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None
        assert [step["value"] for step in steps[1:]] == sorted(step["value"] for step in steps[1:])


def test_the_committed_files_are_what_an_export_writes(tmp_path: Path) -> None:
    for path in export(tmp_path):
        assert path.read_bytes() == (GENERATED / path.name).read_bytes(), "trinity dashboards export --out dashboards/…"


def test_export_to_an_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/out cannot be written: Not a directory"):
        export(tmp_path / "file" / "out")


def test_every_alert_has_its_section_in_the_runbook() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert {alert.name: sections.count(alert.name) for alert in alerts()} == {alert.name: 1 for alert in alerts()}
