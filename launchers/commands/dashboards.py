"""`trinity dashboards`: Grafana dashboards and Prometheus alerts, exported as files or pushed."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dashboards import provisioning
from dashboards.provisioning import Credential, Pusher

dashboards_app = typer.Typer(help="Export or push Grafana dashboards and Prometheus alerts.", no_args_is_help=True)


@dashboards_app.command()
def export(
    out: Annotated[Path, typer.Option(help="Output directory, such as Grafana's provisioning folder.")],
) -> None:
    """Write the dashboards (JSON, for provisioning or import) and the alert rules (for Prometheus)."""
    for path in provisioning.export(out):
        print(path)


@dashboards_app.command()
def push(
    url: Annotated[str, typer.Option(envvar="GRAFANA_URL", help="URL of Grafana.")],
    folder: Annotated[str, typer.Option(help="Title of the folder.")] = "Trinity",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes without writing them.")] = False,
) -> None:
    """Push the dashboards to Grafana; unchanged ones are skipped.

    Credentials: environment variables GRAFANA_TOKEN, or GRAFANA_USER and GRAFANA_PASSWORD.
    """
    pusher = Pusher(url, _credential(), folder)
    for change in pusher.changes() if dry_run else pusher.push():
        print(f"{change.action:11} {change.item}")


def _credential() -> Credential:
    """Read the credential from the environment, because command lines are visible to all users of the machine."""
    if token := os.environ.get("GRAFANA_TOKEN"):
        return token
    if user := os.environ.get("GRAFANA_USER"):
        return user, os.environ.get("GRAFANA_PASSWORD", "")
    return None
