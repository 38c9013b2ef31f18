"""Rendering of a dashboard as one self-contained HTML file: an SVG without scripts or external resources."""

import math
from collections.abc import Sequence
from html import escape

from dashboards.preview import Cell, Line, PanelData

_COLUMN, _ROW = 62.5, 34.0  # pixels of Grafana's grid
_COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#37872d")
_NAMED = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c", "yellow": "#f2cc0c", "blue": "#5794f2"}
_CELL, _HEADER = "#d8d9da", "#8ab8ff"
_MAX_LEGEND = 4  # names below a chart; further ones are counted
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))

Point = tuple[float, float]


def render_page(panels: Sequence[PanelData], caption: str) -> str:
    """Return the HTML page, 1500 pixels wide."""
    height = max(panel.place[1] + panel.place[3] for panel in panels) * _ROW + 26
    parts = [_text(8, 17, caption, 13, "#9fa7b3"), *(_panel(panel) for panel in panels)]
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="1500" height="{height:.0f}">{"".join(parts)}</svg>'
    return (
        '<!doctype html><meta charset="utf-8"><title>Trinity</title>'
        f'<body style="margin:0;background:#111217;font-family:sans-serif">{svg}</body>\n'
    )


def format_value(value: float | str | None, unit: str, no_value: str = "–") -> str:
    """Format a value as Grafana does."""
    if value is None or isinstance(value, str):
        return value or no_value
    if unit == "s" and value and abs(value) < 1:
        return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
    if unit == "bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.{value < 10 * 2**20:d}f} MiB"
    if unit == "percentunit":
        return f"{100 * value:.4g}%"
    suffix = {"s": " s", "reqps": " req/s", "watt": " W"}.get(unit, "")
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}{suffix}"
    return f"{value:.3g}{suffix}"


def _panel(panel: PanelData) -> str:
    x, y, width, height = panel.place
    left, top, w, h = x * _COLUMN + 3, y * _ROW + 29, width * _COLUMN - 6, height * _ROW - 6
    if panel.kind == "row":
        return _text(left + 4, top + 18, panel.title, 14, "#d8d9da")
    box = f'<rect x="{left}" y="{top}" width="{w}" height="{h}" fill="#181b1f" stroke="#2c3235"/>'
    title = _text(left + 8, top + 17, panel.title, 12, "#d8d9da")
    draw = {"stat": _tile, "table": _table}.get(panel.kind, _chart)
    return box + title + draw(panel, left, top, w, h)


def _tile(panel: PanelData, left: float, top: float, w: float, h: float) -> str:
    value = panel.last
    colours = [name for least, name in panel.thresholds if value is not None and value >= least]
    colour = _NAMED.get(colours[-1], "#d8d9da") if colours else "#9fa7b3"
    return _text(left + w / 2, top + h / 2 + 20, format_value(value, panel.unit, panel.no_value), 30, colour, "middle")


def _table(panel: PanelData, left: float, top: float, w: float, h: float) -> str:
    rows = [[Cell(name) for name in panel.columns], *panel.rows][: int((h - 30) / 20)]
    step = w / max(1, len(panel.columns))
    return "".join(
        _text(
            left + 8 + i * step,
            top + 40 + 20 * j,
            format_value(cell.value, cell.unit),
            11,
            _CELL if j else _HEADER,
        )
        for j, row in enumerate(rows)
        for i, cell in enumerate(row)
    ) or _text(left + w / 2, top + h / 2, panel.no_value, 13, "#9fa7b3", "middle")


def _chart(panel: PanelData, left: float, top: float, w: float, h: float) -> str:
    if not panel.lines:
        return _text(left + w / 2, top + h / 2, panel.no_value or "no data", 13, "#9fa7b3", "middle")
    lines = _stack(panel.lines) if panel.stacked else panel.lines
    times = [at for line in lines for at, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else 1.0
    begin, span = min(times), max(times) - min(times) or 1.0
    x0, y0, width, height = left + 56, top + 28, w - 68, h - 62

    def at(point: Point) -> str:
        return f"{x0 + (point[0] - begin) / span * width:.1f},{y0 + (high - point[1]) / (high - low) * height:.1f}"

    parts = []
    for share in (0.0, 0.5, 1.0):
        y = y0 + (1 - share) * height
        parts.append(f'<path d="M{x0} {y:.1f}h{width}" stroke="#2c3235"/>')
        parts.append(_text(x0 - 5, y + 4, format_value(low + share * (high - low), panel.unit), 10, "#9fa7b3", "end"))
    for number, line in enumerate(lines):
        points = " ".join(map(at, line.points))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(number)}" stroke-width="1.5"/>')
    return "".join(parts) + _legend(panel, left + 8, top + h - 10, w)


def _legend(panel: PanelData, left: float, y: float, w: float) -> str:
    names = [f"{line.name} {format_value(line.points[-1][1], panel.unit)}" for line in panel.lines[:_MAX_LEGEND]]
    if len(panel.lines) > _MAX_LEGEND:
        names.append(f"+{len(panel.lines) - _MAX_LEGEND}")
    step = (w - 16) / len(names)
    most = math.floor(step / 5.4)
    return "".join(
        _text(left + number * step, y, name if len(name) <= most else name[: most - 1] + "…", 10, _colour(number))
        for number, name in enumerate(names)
    )


def _stack(lines: Sequence[Line]) -> list[Line]:
    """Stack each line on the lines before it."""
    below: dict[float, float] = {}
    stacked = []
    for line in lines:
        points = [(at, value + below.get(at, 0.0)) for at, value in line.points]
        below.update(points)
        stacked.append(Line(line.name, points))
    return stacked


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _text(x: float, y: float, text: str, size: int, colour: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )
