"""Builder of Grafana's dashboard JSON (schema version 39) from rows of panels and their queries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runtime.node.supervisor_metrics import NamedMetric

Json = dict[str, Any]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the legend of its series (Grafana's `{{label}}` syntax)."""

    expr: str
    legend: str = ""
    unit: str = ""  # of a table's column


@dataclass(frozen=True)
class Panel:
    """One panel. `unit`: Grafana's name ("s", "bytes", "Bps", "reqps", "percentunit", "short"); `width` in 24ths of a
    row.

    A table has one row per worker or GPU, and one column per query, named by its legend.
    """

    kind: Literal["stat", "timeseries", "table"]
    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 6
    height: int = 7
    stacked: bool = False
    # (lower bound, colour), ascending; Grafana ignores the first bound
    thresholds: Sequence[tuple[float, str]] = ((0.0, "green"),)
    column_links: Sequence[tuple[str, str]] = ()  # (a table's column, link of its cells)


class Row:
    """A titled group of panels, laid out left to right with wrapping."""

    def __init__(self, title: str, *panels: Panel) -> None:
        self.title, self.panels = title, panels


def dashboard(uid: str, title: str, rows: Sequence[Row], variables: Sequence[Json] = ()) -> Json:
    """Return a dashboard. Panel ids count from 1 in reading order, so equal input gives equal JSON."""
    panels: list[Json] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": y},
            }
        )
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            grid_position = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel, len(panels) + 1, grid_position))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "uid": uid,
        "title": title,
        "tags": ["trinity"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), *variables]},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def label_variable(name: str, label: str, metric: NamedMetric, source_label: str, only: str = "") -> Json:
    """Return a variable over the values of a metric's label: multi-value with all selected, or single with `only`."""
    current = {"text": only, "value": only} if only else {"text": ["All"], "value": ["$__all"]}
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": f"label_values({metric}, {source_label})",
        "definition": f"label_values({metric}, {source_label})",
        "refresh": 2,
        "sort": 1,
        "multi": not only,
        "includeAll": not only,
        "allValue": None if only else ".*",
        "current": current,
        "options": [],
    }


def _datasource_variable() -> Json:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "options": [],
        "refresh": 1,
    }


def _panel(panel: Panel, number: int, grid_position: Json) -> Json:
    steps = [
        {"color": colour, "value": None if i == 0 else value} for i, (value, colour) in enumerate(panel.thresholds)
    ]
    table = panel.kind == "table"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": grid_position,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "noValue": "–" if table else "no traffic",
                "thresholds": {"mode": "absolute", "steps": steps},
                **({"custom": _lines(panel)} if panel.kind == "timeseries" else {}),
            },
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": column},
                    "properties": [{"id": name, "value": value}],
                }
                for column, name, value in _properties(panel)
            ],
        },
        "options": {"stat": _STAT_OPTIONS, "timeseries": _LINE_OPTIONS, "table": _TABLE_OPTIONS}[panel.kind],
        **({"transformations": _columns(panel)} if table else {}),
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                **({"format": "table", "instant": True} if table else {}),
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def _properties(panel: Panel) -> Iterator[tuple[str, str, Any]]:
    """Iterate over the properties of a table's columns: (column, property, value)."""
    for query in panel.queries:
        if query.unit:
            yield query.legend, "unit", query.unit
    for column, url in panel.column_links:
        yield column, "links", [{"title": "${__value.text}", "url": url}]


def _columns(panel: Panel) -> list[Json]:
    """Merge the queries' rows by common labels and name the value columns by their legends."""
    values = {f"Value #{chr(ord('A') + i)}": query.legend for i, query in enumerate(panel.queries) if query.legend}
    unnamed = [f"Value #{chr(ord('A') + i)}" for i, query in enumerate(panel.queries) if not query.legend]
    hidden = dict.fromkeys(["Time", *unnamed], True)
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": hidden, "indexByName": {}, "renameByName": values}},
    ]


_STAT_OPTIONS = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "area",
    "textMode": "auto",
    "justifyMode": "auto",
    "orientation": "auto",
}
_LINE_OPTIONS = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_TABLE_OPTIONS = {"showHeader": True, "cellHeight": "sm", "sortBy": []}


def _lines(panel: Panel) -> Json:
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 5,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
