"""`trinity doctor`: what stands in the way of a node on this machine, a line each, with what to do."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from runtime.checks.diagnosis import diagnose
from runtime.node.config_file import load_config

_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    config: Annotated[Path | None, typer.Option(help="Also look at what this node needs.")] = None,
) -> None:
    """Look at the machine before a node runs on it. Exits with 1 if something is in error."""
    console = Console(soft_wrap=True)
    worst = 0
    for finding in diagnose(load_config(config) if config else None):
        colour = _COLOURS[finding.level]
        console.print(f"[{colour}]{finding.level:7}[/{colour}] {escape(finding.what)}: {escape(finding.text)}")
        if finding.advice:
            console.print(f"        → {escape(finding.advice)}")
        worst = max(worst, int(finding.level == "error"))
    raise typer.Exit(worst)
