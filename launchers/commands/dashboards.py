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
def check(
    directory: Annotated[Path, typer.Option("--dir", help="Directory of the exported files.")] = provisioning.GENERATED,
) -> None:
    """Check that exported files match this version. Exits with 1 if any is missing or differs."""
    stale = provisioning.stale(directory)
    for name in stale:
        print(f"{directory / name}: missing or out of date")
    raise typer.Exit(1 if stale else 0)


@dashboards_app.command()
def push(
    url: Annotated[str, typer.Option(envvar="GRAFANA_URL", help="URL of Grafana.")],
    folder: Annotated[str, typer.Option(help="Title of the folder.")] = "Trinity",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes without writing them.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if there are changes; write nothing.")] = False,
) -> None:
    """Push the dashboards to Grafana; unchanged ones are skipped.

    Credentials: environment variables GRAFANA_TOKEN, or GRAFANA_USER and GRAFANA_PASSWORD.
    """
    pusher = Pusher(url, _credential(), folder)
    changes = pusher.changes() if dry_run or check else pusher.push()
    for change in changes:
        print(f"{change.action:11} {change.item}")
    raise typer.Exit(1 if check and any(change.needed for change in changes) else 0)


def _credential() -> Credential:
    """Read the credential from the environment, because command lines are visible to all users of the machine."""
    if token := os.environ.get("GRAFANA_TOKEN"):
        return token
    if user := os.environ.get("GRAFANA_USER"):
        return user, os.environ.get("GRAFANA_PASSWORD", "")
    return None
