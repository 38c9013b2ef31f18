"""Preview of a dashboard without Grafana: runs the queries of the generated JSON against a Prometheus.

`load_panels` returns every panel's data; `svg.render_page` renders it as one HTML file without scripts.
"""

import http.client
import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.grafana import Json
from runtime.errors import InvalidRequest, Unavailable

_VARIABLES = {"$node": ".*", "$model": ".*", "$slo": "all", "$__rate_interval": "30s"}
_POINTS = 120  # per line

RunQuery = Callable[[str, Mapping[str, str]], list[Json]]
"""Prometheus's HTTP API: a path under /api/v1/ and its parameters → `data.result`."""


@dataclass(frozen=True)
class Line:
    """One series of finite points: (Unix time in seconds, value)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Cell:
    """A table cell: value and unit."""

    value: float | str
    unit: str = "short"


@dataclass(frozen=True)
class PanelData:
    """A panel with its data. `place`: x, y, width and height on Grafana's grid of 24 columns."""

    kind: str
    title: str
    place: tuple[int, int, int, int]
    unit: str = "short"
    stacked: bool = False
    no_value: str = ""
    thresholds: Sequence[tuple[float, str]] = ()
    lines: Sequence[Line] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()

    @property
    def last(self) -> float | None:
        """The value of a stat panel: the last of its first series."""
        return self.lines[0].points[-1][1] if self.lines and self.lines[0].points else None


def load_panels(board: Json, run_query: RunQuery, end_s: float, span_s: float = 300.0) -> list[PanelData]:
    """Return every panel with its data over the `span_s` seconds before `end_s` (Unix time)."""
    return [_panel(panel, run_query, end_s, span_s) for panel in board["panels"]]


def _panel(panel: Json, run_query: RunQuery, end_s: float, span_s: float) -> PanelData:
    grid = panel["gridPos"]
    place = (grid["x"], grid["y"], grid["w"], grid["h"])
    if panel["type"] == "row":
        return PanelData("row", panel["title"], place)
    defaults = panel["fieldConfig"]["defaults"]
    steps = [(-math.inf if s["value"] is None else s["value"], s["color"]) for s in defaults["thresholds"]["steps"]]
    common: Json = {
        "kind": panel["type"], "title": panel["title"], "place": place, "unit": defaults["unit"],
        "no_value": defaults.get("noValue", ""), "thresholds": steps,
    }  # fmt: skip
    targets = [(target, _substitute(target["expr"])) for target in panel["targets"]]
    if panel["type"] == "table":
        found = [run_query("query", {"query": expr, "time": f"{end_s:.3f}"}) for _, expr in targets]
        return PanelData(**common, **_table(panel, found))
    parameters = {"start": f"{end_s - span_s:.3f}", "end": f"{end_s:.3f}", "step": f"{span_s / _POINTS:.3f}"}
    lines = [
        Line(_legend(target["legendFormat"], series["metric"], panel["title"]), _points(series["values"]))
        for target, expr in targets
        for series in run_query("query_range", {"query": expr} | parameters)
    ]
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    return PanelData(**common, stacked=stacked, lines=[line for line in lines if line.points])


def _substitute(expr: str) -> str:
    for name, value in _VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def _points(values: Sequence[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(at, float(value)) for at, value in values if math.isfinite(float(value))]


def _legend(pattern: str, labels: Mapping[str, str], title: str) -> str:
    if pattern == "__auto":
        return ", ".join(labels.values()) or title
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), pattern).strip()


def _table(panel: Json, found: Sequence[Sequence[Json]]) -> Json:
    """Join series by labels, one column per query, as Grafana's transformations "merge" and "organize" do."""
    names: dict[str, str] = panel["transformations"][1]["options"]["renameByName"]
    units = {
        override["matcher"]["options"]: one["value"]
        for override in panel["fieldConfig"]["overrides"]
        for one in override["properties"]
        if one["id"] == "unit"
    }
    labels = sorted({name for series in found for one in series for name in one["metric"]})
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for target, series in zip(panel["targets"], found, strict=True):
        for one in series:
            key = tuple(one["metric"].get(name, "") for name in labels)
            rows.setdefault(key, {})[names[f"Value #{target['refId']}"]] = float(one["value"][1])
    columns = list(names.values())
    return {
        "columns": [*labels, *columns],
        "rows": [
            [*map(Cell, key), *(Cell(row.get(name, "–"), units.get(name, "short")) for name in columns)]
            for key, row in sorted(rows.items())
        ],
    }


# ---- client of Prometheus's HTTP API


_TIMEOUT_S = 30.0


class Prometheus:
    """A Prometheus at `url`, such as http://127.0.0.1:9090."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def query(self, path: str, parameters: Mapping[str, str]) -> list[Json]:
        """Return `data.result` of "query" or "query_range". Raises `Unavailable`, `InvalidRequest`."""
        data = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", data, timeout=_TIMEOUT_S) as answer:
                return list(json.loads(answer.read())["data"]["result"])
        except urllib.error.HTTPError as error:
            with error:
                raise InvalidRequest(
                    f"{self._url} rejects {parameters.get('query')}: {error.read(1000).decode(errors='replace')}"
                ) from error
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            raise Unavailable(f"Prometheus at {self._url} does not answer: {error}") from error
