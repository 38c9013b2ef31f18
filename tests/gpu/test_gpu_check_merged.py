"""Results of sections that ran one by one become one page."""

import json
from pathlib import Path

from benchmarks.gpu_check import merged


def section(directory: Path, name: str, lines: list[tuple[str, str]], error: str = "") -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps({"dim": 96, "lines": lines, "error": error}))


def test_a_later_measurement_replaces_an_earlier_one_and_a_complete_run_one_that_failed(tmp_path: Path) -> None:
    first, second = tmp_path / "run1", tmp_path / "run2"
    section(first, "load-96", [("a", "1"), ("… p99", "2"), ("b", "3"), ("… p99", "4"), ("only here", "5")])
    section(second, "load-96", [("a", "10"), ("… p99", "20"), ("b", "30"), ("… p99", "40")])
    section(first, "steps-96", [("c", "6")])
    section(second, "steps-96", [("c", "7")], "Traceback\nDeviceError: out of memory\n")
    section(first, "flood-96", [("d", "8")], "Traceback\nDeviceError: the queue\n")
    (second / "llm.log").write_text(
        "loaded\n  prefill 128 tokens: 10.6 ms; 24 TFLOP/s\n  decode 1 rows: 2 ms; first 3 s\n"
    )
    out = tmp_path / "page.md"
    arguments = [str(first), str(second), "--out", str(out), "--title", "Search", "--about", "A GPU, driver 580."]
    assert merged.main(arguments) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.read_text().splitlines()[6:]]
    assert rows == [
        ["flood, 96 dims", "d", "8"],
        ["flood, 96 dims", "", "FAILED: DeviceError: the queue"],
        ["larger model", "prefill 128 tokens", "10.6 ms; 24 TFLOP/s"],
        ["larger model", "decode 1 rows", "2 ms"],
        ["load, 96 dims", "a", "10"],
        ["load, 96 dims", "… p99", "20"],
        ["load, 96 dims", "b", "30"],
        ["load, 96 dims", "… p99", "40"],
        ["load, 96 dims", "only here", "5"],
        ["steps, 96 dims", "c", "6"],
    ]
    assert out.read_text().startswith("# Search\n\nA GPU, driver 580.\n")
