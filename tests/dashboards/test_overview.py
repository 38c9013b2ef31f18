"""The dashboards fit the metrics that a node exports, and the committed files fit the code."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dashboards.files import GENERATED, all_dashboards, export, stale
from runtime.node.exporter import NodeFigures
from runtime.node.metrics import METRICS, Histogram

BOARDS = all_dashboards()
SCHEMAS = os.environ.get("GRAFANA_SCHEMAS", "")


def exported_names() -> set[str]:
    names: set[str] = set()
    for metric in (metric for metrics in METRICS.values() for metric in metrics):
        if isinstance(metric, Histogram):
            names |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(metric.name)
    for family in NodeFigures({}, {}, {}, {}).families():
        names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    return names


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


@pytest.mark.parametrize("uid", BOARDS)
def test_every_metric_that_a_panel_asks_for_is_exported(uid: str) -> None:
    asked = {name for expr in expressions(BOARDS[uid]) for name in re.findall(r"\btrinity_\w+", expr)}
    assert asked
    assert asked - exported_names() == set()


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(uid: str) -> None:
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


def test_committed_files_are_what_the_code_gives() -> None:
    assert stale() == [], "run `trinity dashboards export --out dashboards/generated`"


def test_export_writes_what_is_committed(tmp_path: Path) -> None:
    for path in export(tmp_path):
        assert path.read_bytes() == (GENERATED / path.name).read_bytes()


@pytest.mark.parametrize("uid", BOARDS)
def test_the_json_follows_grafanas_own_schema(uid: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="a development check: python -m pip install jsonschema")
    schema = Path(SCHEMAS) / "dashboard.jsonschema.json"
    if not SCHEMAS or not schema.is_file():
        pytest.skip("GRAFANA_SCHEMAS names no folder with dashboard.jsonschema.json (of grafana-foundation-sdk)")
    jsonschema.validate(json.loads(json.dumps(BOARDS[uid])), json.loads(schema.read_text()))
