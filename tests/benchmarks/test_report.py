"""Tests of the benchmarks' common report: tables, files and plots."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.common.report import plot, table, write


class Found(msgspec.Struct):
    rate: float


def test_a_table_has_a_header_a_rule_and_one_line_per_row() -> None:
    assert table(("engine", "queries/s"), [("ours", 12), ("", "1,000")]) == [
        "| engine | queries/s |",
        "| --- | ---: |",
        "| ours | 12 |",
        "| | 1,000 |",
    ]


def test_results_are_printed_and_written_with_their_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write({"found": Found(1.5)}, "text\n", tmp_path / "results" / "engine-v1.5")
    assert capsys.readouterr().out == "text\n\n"
    assert (tmp_path / "results" / "engine-v1.5.md").read_text() == "text\n"
    assert json.loads((tmp_path / "results" / "engine-v1.5.json").read_text()) == {"found": {"rate": 1.5}}


def test_without_an_output_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write({}, "text", None)
    assert list(tmp_path.iterdir()) == []


def test_a_plot_has_its_panels_row_by_row(tmp_path: Path) -> None:
    with plot(tmp_path / "plot.png", 2, 2) as axes:
        for number, panel in enumerate(axes):
            panel.plot([0, number])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(axes) == 4
