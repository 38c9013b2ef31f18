"""What a section hands back, and the table that it goes into."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import table

if TYPE_CHECKING:
    from benchmarks.gpu_check.setup import Setup


class Skipped(Exception):
    """This cannot be done here; the message says why."""


@dataclass
class Outcome:
    """`lines`: (what, value) for the table. `data`: everything that was measured, for the JSON file."""

    lines: list[tuple[str, str]]
    data: Any = None
    failed: bool = False
    seconds: float = field(default=0.0)


def markdown(setup: "Setup", outcomes: dict[str, Outcome], verdicts: Sequence[Sequence[str]]) -> str:
    """The whole run as a page. verdicts: what, figure and verdict of each bar."""
    settings = ", ".join(f"{name} {value}" for name, value in setup.settings.items())
    machine = ", ".join(f"{name}: {value}" for name, value in setup.machine.items())
    lines = [f"# Search and the model on {setup.device_name}", "", f"{settings}.", "", f"{machine}.", ""]
    if setup.small:
        lines += ["A dry run: its figures and verdicts say nothing of a GPU.", ""]
    lines += [*table(("bar", "figure", "verdict"), verdicts), ""]
    rows = [(name, what, value) for name, outcome in outcomes.items() for what, value in outcome.lines]
    return "\n".join([*lines, *table(("section", "what", "value"), rows)])


def rate(per_second: float) -> str:
    """A rate for the table."""
    return f"{per_second:,.0f}/s"


def micros(seconds: float) -> str:
    """A time for the table."""
    return f"{seconds * 1e6:,.1f} µs"
