"""Dashboards and alerts as files: written for Grafana's and Prometheus's provisioning, compared with the code."""

import json
from pathlib import Path

from dashboards import fleet, overview
from dashboards.grafana import Json
from dashboards.rules import rules_yaml

GENERATED = Path(__file__).parent / "generated"


def all_dashboards() -> dict[str, Json]:
    """Every dashboard by its uid."""
    return {overview.UID: overview.overview(), fleet.UID: fleet.fleet()}


def export(directory: Path) -> list[Path]:
    """Write every dashboard (JSON) and the alerts (YAML) to `directory`; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in _files().items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in _files()]


def stale(directory: Path = GENERATED) -> list[str]:
    """The files that are missing there, or differ from what the code gives now."""
    return [
        name
        for name, text in _files().items()
        if not (path := directory / name).is_file() or path.read_text(encoding="utf-8") != text
    ]


def _files() -> dict[str, str]:
    boards = {
        f"{uid}.json": json.dumps(board, indent=1, ensure_ascii=False) + "\n" for uid, board in all_dashboards().items()
    }
    return boards | {"trinity-rules.yml": rules_yaml()}
