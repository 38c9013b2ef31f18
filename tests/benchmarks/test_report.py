"""What benchmarks say: tables, files and plots, one way for all of them."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.common.report import plot, table, write


class Found(msgspec.Struct):
    rate: float


def test_a_table_has_a_head_a_rule_and_a_line_a_row() -> None:
    assert table(("engine", "queries/s"), [("ours", 12), ("", "1,000")]) == [
        "| engine | queries/s |",
        "| --- | ---: |",
        "| ours | 12 |",
        "| | 1,000 |",
    ]


def test_what_was_found_is_shown_and_written_beside_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write({"found": Found(1.5)}, "text\n", tmp_path / "results" / "engine-v1.5")
    assert capsys.readouterr().out == "text\n\n"
    assert (tmp_path / "results" / "engine-v1.5.md").read_text() == "text\n"
    assert json.loads((tmp_path / "results" / "engine-v1.5.json").read_text()) == {"found": {"rate": 1.5}}


def test_without_a_place_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write({}, "text", None)
    assert list(tmp_path.iterdir()) == []


def test_a_plot_has_its_panels_row_by_row(tmp_path: Path) -> None:
    with plot(tmp_path / "plot.png", 2, 2) as axes:
        for number, panel in enumerate(axes):
            panel.plot([0, number])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(axes) == 4
