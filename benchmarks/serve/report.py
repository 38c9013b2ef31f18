"""Report of a run: measures with their bars, and curves, as Markdown, JSON and a plot."""

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common.machine import machine
from benchmarks.common.report import keep, plot, table


@dataclass(frozen=True)
class Measure:
    """One result, optionally with a bar (`sign` and `bar`)."""

    name: str
    value: float
    unit: str = ""
    sign: Literal["≥", "≤", ""] = ""
    bar: float = 0.0

    @property
    def held(self) -> bool | None:
        """Whether the bar was met; None without a bar. NaN meets none."""
        if not self.sign:
            return None
        return self.value >= self.bar if self.sign == "≥" else self.value <= self.bar


@dataclass
class Section:
    """Results of a section. `curves`: panel → line → points (x, y)."""

    name: str
    text: str
    measures: list[Measure] = field(default_factory=list)
    curves: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def percentile(values: Sequence[float], q: float) -> float:
    """Return a percentile; NaN, which meets no bar, without values."""
    return float(np.percentile(values, q)) if len(values) else math.nan


def markdown(sections: Sequence[Section], about: dict[str, str]) -> str:
    """Return the report as Markdown tables."""
    lines = ["# Prefill and decode under load", "", "; ".join(f"{name} {value}" for name, value in about.items()), ""]
    for section in sections:
        rows = []
        for measure in section.measures:
            bar = f"{measure.sign} {measure.bar:g}" if measure.sign else ""
            verdict = {None: "", True: "held", False: "**missed**"}[measure.held]
            rows.append((measure.name, f"{measure.value:,.3g} {measure.unit}", bar, verdict))
        lines += [f"## {section.name}", "", section.text, "", *table(("measure", "value", "bar", ""), rows), ""]
    return "\n".join(lines)


def write(sections: Sequence[Section], about: dict[str, str], out: Path) -> None:
    """Write `out`.md, .json and, if there are curves, .png."""
    results = {"about": about, "sections": [asdict(section) for section in sections]}
    keep(results, markdown(sections, about), out)
    panels = [(name, lines) for section in sections for name, lines in section.curves.items()]
    if panels:
        _draw(panels, out.with_suffix(".png"))


def _draw(panels: Sequence[tuple[str, dict[str, list[tuple[float, float]]]]], path: Path) -> None:
    with plot(path, len(panels)) as drawn:
        for axes, (name, lines) in zip(drawn, panels, strict=True):
            for label, points in lines.items():
                axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
            title, _, labels = name.partition(": ")
            across, _, up = labels.partition(", ")
            axes.set(title=title, xlabel=across, ylabel=up)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend()


def about(**more: object) -> dict[str, str]:
    """Return a description of the machine and the run."""
    import torch

    return (
        machine() | {"torch": torch.__version__, "release": platform.release()} | {k: str(v) for k, v in more.items()}
    )
