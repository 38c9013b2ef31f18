"""`trinity dashboards`: Grafana's dashboards and Prometheus's alerts of a node, as files or pushed."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from dashboards import provisioning
from dashboards.preview import Prometheus, load_panels
from dashboards.provisioning import Credential, Pusher, all_dashboards
from dashboards.svg import render_page

dashboards_app = typer.Typer(help="Grafana dashboards and Prometheus alerts of a node.", no_args_is_help=True)


@dashboards_app.command()
def export(
    out: Annotated[Path, typer.Option(help="Where to write the files, such as Grafana's provisioning folder.")],
) -> None:
    """Write the dashboards (JSON, for provisioning or the import dialogue) and the alerts (for Prometheus)."""
    for path in provisioning.export(out):
        print(path)


@dashboards_app.command()
def check(
    directory: Annotated[Path, typer.Option("--dir", help="The files to compare.")] = provisioning.GENERATED,
) -> None:
    """Compare exported files with what this version would write. Exits with 1 if one is missing or differs."""
    stale = provisioning.stale(directory)
    for name in stale:
        print(f"{directory / name}: missing or out of date")
    raise typer.Exit(1 if stale else 0)


@dashboards_app.command()
def push(
    url: Annotated[str, typer.Option(envvar="GRAFANA_URL", help="Grafana's address, with its path if it has one.")],
    prometheus_url: Annotated[
        str, typer.Option(help="Also keep a data source of this Prometheus, as Grafana reaches it.")
    ] = "",
    folder: Annotated[str, typer.Option(help="The folder's title.")] = "Trinity",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; say what would be done.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if something would be done.")
    ] = False,
) -> None:
    """Push the dashboards to a Grafana: what is there already is not written again.

    The credential is the environment's GRAFANA_TOKEN, or GRAFANA_USER and GRAFANA_PASSWORD.
    """
    pusher = Pusher(url, _credential(), prometheus_url, folder)
    changes = pusher.changes() if dry_run or check else pusher.push()
    for change in changes:
        print(f"{change.action:11} {change.what}")
    raise typer.Exit(1 if check and any(change.needed for change in changes) else 0)


@dashboards_app.command()
def draw(
    prometheus_url: Annotated[str, typer.Option(help="The Prometheus that scrapes the node.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write: no scripts, nothing from elsewhere.")],
    dashboard: Annotated[Literal["overview", "fleet"], typer.Option(help="Which one.")] = "overview",
    minutes: Annotated[float, typer.Option(help="How far back.", min=0.5, max=1440)] = 5.0,
) -> None:
    """Draw a dashboard with a Prometheus's data, without Grafana, as one HTML file."""
    now = time.time()
    caption = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC, the last {minutes:g} minutes"
    panels = load_panels(all_dashboards()[f"trinity-{dashboard}"], Prometheus(prometheus_url).query, now, 60 * minutes)
    out.write_text(render_page(panels, caption), encoding="utf-8")
    print(out)


def _credential() -> Credential:
    """From the environment alone: a command line can be read by every user of the machine."""
    if token := os.environ.get("GRAFANA_TOKEN"):
        return token
    if user := os.environ.get("GRAFANA_USER"):
        return user, os.environ.get("GRAFANA_PASSWORD", "")
    return None
