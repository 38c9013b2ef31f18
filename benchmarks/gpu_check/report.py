"""Outcomes of sections, and the report as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.report import table
from benchmarks.gpu_check.setup import Setup


@dataclass
class Outcome:
    """Results of a section so far; kept if it fails.

    `lines`: (description, value) for the table. `data`: all measurements, for the JSON file.
    """

    lines: list[tuple[str, str]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    failed: bool = False
    seconds: float = 0.0

    def add(self, what: str, value: str) -> None:
        """Add a line, and print it."""
        self.lines.append((what, value))
        print(f"  {what:60} {value}", flush=True)


def markdown(setups: Sequence[Setup], outcomes: Mapping[str, Outcome], verdicts: Sequence[Sequence[str]]) -> str:
    """Format the run as a page. verdicts: description, figure and verdict of each target."""
    first = setups[0]
    machine = ", ".join(f"{name}: {value}" for name, value in first.machine.items())
    lines = [f"# Search and the model on {first.device_name}", "", f"{machine}.", ""]
    for setup in setups:
        lines += ["; ".join(f"{name} {value}" for name, value in setup.settings.items()) + ".", ""]
    if first.small:
        lines += ["A dry run: its figures and verdicts do not apply to a GPU.", ""]
    lines += [*table(("target", "figure", "verdict"), verdicts), ""]
    rows = [(name, what, value) for name, outcome in outcomes.items() for what, value in outcome.lines]
    return "\n".join([*lines, *table(("section", "what", "value"), rows)])


def rate(per_second: float) -> str:
    """Format a rate."""
    return f"{per_second:,.0f}/s"


def micros(seconds: float) -> str:
    """Format a time in µs."""
    return f"{seconds * 1e6:,.1f} µs"
