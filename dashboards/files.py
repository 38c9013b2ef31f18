"""The dashboards as files: written for Grafana's file provisioning, and compared with what the code gives."""

import json
from pathlib import Path

from dashboards.grafana import Json
from dashboards.overview import UID, overview

GENERATED = Path(__file__).parent / "generated"


def all_dashboards() -> dict[str, Json]:
    """Every dashboard by its uid."""
    return {UID: overview()}


def export(directory: Path) -> list[Path]:
    """Write every dashboard to `directory`, one JSON file each; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for uid, board in all_dashboards().items():
        path = directory / f"{uid}.json"
        path.write_text(_text(board), encoding="utf-8")
        paths.append(path)
    return paths


def stale() -> list[str]:
    """The generated files that differ from what the code gives now."""
    return [
        f"{uid}.json"
        for uid, board in all_dashboards().items()
        if not (path := GENERATED / f"{uid}.json").is_file() or path.read_text(encoding="utf-8") != _text(board)
    ]


def _text(board: Json) -> str:
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"
