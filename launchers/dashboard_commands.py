"""`trinity dashboards`: Grafana's dashboards of a node, as files."""

from pathlib import Path
from typing import Annotated

import typer

from dashboards import files

dashboards_app = typer.Typer(help="Grafana dashboards of a node.", no_args_is_help=True)


@dashboards_app.callback()
def _dashboards() -> None:
    """Keeps `export` a command of its own while it is the only one."""


@dashboards_app.command()
def export(
    out: Annotated[Path, typer.Option(help="Where to write the JSON files, such as Grafana's provisioning folder.")],
) -> None:
    """Write the dashboards for Grafana's file provisioning or its import dialogue."""
    for path in files.export(out):
        print(path)
