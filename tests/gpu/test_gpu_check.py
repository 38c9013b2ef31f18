"""Tests of the GPU check: every step works on the CPU backend, and its parts behave as documented."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_check import bench as gpu_check
from benchmarks.gpu_check.bench import Section
from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.sections import forms, sanitizer, small_run
from benchmarks.gpu_check.targets import SET_TARGETS, verdicts
from benchmarks.gpu_check.time_limit import Skipped
from gpu.cuda import compiler
from runtime.node.placement.gpus import Gpus
from tests.cuda.emulation import EmulatedDriver, emulator
from tests.node.fake_nvml import FakeNvml


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine on a CUDA device has an emulated one, whose faults `close` raises."""
    made = SimpleNamespace(CudaDriver=lambda device: EmulatedDriver(emulator(), block_threads=32))
    monkeypatch.setitem(sys.modules, "gpu.cuda.cuda_driver", made)
    monkeypatch.setattr(compiler, "compile_kernels", lambda arch: b"")


def put_sections(monkeypatch: pytest.MonkeyPatch, **checks: Any) -> None:
    monkeypatch.setattr(gpu_check, "SECTIONS", {name: Section(check, 100.0) for name, check in checks.items()})


def speed(setup: Any, outcome: Outcome) -> None:
    outcome.add("speed", "1/s")


def test_a_failed_or_late_section_keeps_its_results_and_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(setup: Any, outcome: Outcome) -> None:
        speed(setup, outcome)
        raise AssertionError("an id comes twice")

    def impossible(setup: Any, outcome: Outcome) -> None:
        raise Skipped("no such tool")

    def without_data(setup: Any, outcome: Outcome) -> None:
        assert setup.index

    put_sections(monkeypatch, first=wrong, second=impossible, third=without_data, fourth=speed)
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "gpu-dry-run.md").read_text()
    assert "| first | speed | 1/s |\n| first | | FAILED: AssertionError: an id comes twice |" in page
    assert "| second | | skipped: no such tool |" in page
    assert "| third | | skipped: no index of 32 dims: see the section data |" in page
    assert "| fourth | speed | 1/s |" in page
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path), "--seconds", "-1"]) == 0
    assert (tmp_path / "gpu-dry-run.md").read_text().count("skipped:") == 4


def test_the_report_begins_with_the_versions_of_the_driver_and_of_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == "cuvs-cu13":
            raise importlib.metadata.PackageNotFoundError(package)
        return f"1.0 of {package}"

    put_sections(monkeypatch, first=speed)
    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("benchmarks.gpu_check.setup.Gpus", lambda: Gpus(FakeNvml([])))
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 0
    head = (tmp_path / "gpu-dry-run.md").read_text().split("\n\n")[1]
    assert head.endswith(
        "driver: 580.1, CUDA runtime: 1.0 of nvidia-cuda-runtime, NVRTC: 1.0 of nvidia-cuda-nvrtc, "
        "torch: 1.0 of torch, cuVS: not installed, cuda-bindings: 1.0 of cuda-bindings, cuda-core: 1.0 of cuda-core, "
        "numpy: 1.0 of numpy, numba: 1.0 of numba."
    )
    assert json.loads((tmp_path / "gpu-dry-run.json").read_text())["machine"]["cuVS"] == "not installed"


def test_the_run_ends_with_one_line_if_the_engine_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(setup: Any, outcome: Outcome) -> None:
        raise AssertionError("NVRTC 13.0: offsetof is undefined")

    sections = {"speed": Section(speed, 100.0), "forms": Section(wrong, 100.0, essential=True)}
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "FAILED: AssertionError: NVRTC 13.0: offsetof is undefined\nnothing else is measured" in told
    assert list(json.loads((tmp_path / "gpu-dry-run.json").read_text())["sections"]) == ["forms"]


def test_an_engine_that_does_not_start_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    endless.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(endless))
    setup: Any = SimpleNamespace(device="cpu")
    with pytest.raises(AssertionError, match="has not started on cpu within 0 s"):
        forms.check(setup, Outcome(), limit_s=0.2)


def test_the_last_line_of_an_engine_that_fails_is_the_reason() -> None:
    setup: Any = SimpleNamespace(device="cuda:99")
    with pytest.raises(AssertionError, match=r"DeviceUnavailable"):
        forms.check(setup, Outcome(), limit_s=60.0)


def test_every_form_finds_the_cpu_engines_ids_and_one_that_does_not_ends_the_run(
    emulated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forms.main("cuda:0")
    same = "100.0% of the CPU engine's ids"
    assert capsys.readouterr().out.splitlines() == [f"{form}: {same}" for form in ("plain", "loop", "resident")]
    monkeypatch.setattr(forms, "_search", lambda engine, queries: np.zeros((len(queries), 10), np.int64))
    with pytest.raises(AssertionError, match=r"^form plain: 0\.\d% of the ids are the CPU engine's$"):
        forms.main("cuda:0")


@pytest.mark.parametrize("form", ["plain", "resident"])
def test_what_the_sanitizer_runs_answers_every_query_in_the_requested_form(
    form: str, emulated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Any] = []
    engine_of = small_run.engine_of

    def seen(*arguments: Any) -> Any:
        opened.append(engine_of(*arguments))
        return opened[-1]

    monkeypatch.setattr(small_run, "engine_of", seen)
    small_run.main("cuda:0", form)
    assert capsys.readouterr().out.startswith("23 queries in ")
    assert [set(engine.forms.values()) for engine in opened] == [{form}]


def test_each_sanitizer_runs_both_forms_and_only_with_a_persistent_kernel_may_one_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong, endless = ("racecheck", "plain"), [("memcheck", "plain"), ("racecheck", "resident")]

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        what = command[2], command[-1]
        if what in endless:
            raise subprocess.TimeoutExpired(command, 1)
        return SimpleNamespace(returncode=9 * (what == wrong), stdout="===== ERROR SUMMARY: 0 errors\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.which", lambda name, path=None: name)
    outcome, setup = Outcome(), SimpleNamespace(device="cuda:0", on_gpu=True)
    sanitizer.check(setup, outcome)  # type: ignore[arg-type]
    lines = {tuple(what.split(", ")): value for what, value in outcome.lines}
    tools = ("memcheck", "racecheck", "synccheck")
    assert list(lines) == [(tool, form) for form in ("plain", "resident") for tool in tools]
    assert lines.pop(wrong).startswith("FAILED: ")
    assert lines.pop(endless[0]).startswith("FAILED: ")
    assert lines.pop(endless[1]).startswith("skipped: the tool does not end")
    assert set(lines.values()) == {"ERROR SUMMARY: 0 errors"}
    assert outcome.failed


def test_a_section_that_exceeds_its_time_is_terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(setup: Any, outcome: Outcome) -> None:
        speed(setup, outcome)
        while True:
            pass

    put_sections(monkeypatch, first=endless, second=speed)
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path), "--seconds", "0.2"]) == 1
    page = (tmp_path / "gpu-dry-run.md").read_text()
    assert "| first | speed | 1/s |\n| first | | FAILED: not finished within 0 s |" in page
    assert "| second | | skipped: " in page


def test_the_sections_of_both_sets_together_stay_below_nine_minutes() -> None:
    seconds = [section.seconds * (2 if section.each_set else 1) for section in gpu_check.SECTIONS.values()]
    assert sum(seconds) <= 540


def form(per_s: float, p99_s: float, alone_s: float, host_s: float = 3e-7) -> dict[str, Any]:
    return {"per_s": per_s, "stream": {"p99_s": p99_s}, "alone_s": alone_s, "host_s": host_s}


def found_of(resident: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return results beside a cuVS with 4 million queries/s, a p99 of 1 ms and 100 µs for one query."""
    cuvs = {"ours": {"recall": 0.96}, "theirs": form(4e6, 1e-3, 1e-4)}
    return {"cuvs": cuvs, "resident": {"staged": form(1e6, 1e-3, 1e-4), "resident": resident}, **sections}


def judged(found: dict[str, Any], dim: int = 96) -> list[tuple[str, str]]:
    return [(figure, verdict) for _, figure, verdict in verdicts(found, SET_TARGETS, dim)]


def test_figures_are_judged_by_the_bars_of_their_dimension_and_missing_ones_are_not_measured() -> None:
    flood = {name: {"alone_p99_s": 1e-4, "flood_p99_s": 1.5e-4} for name in ("auto", "launches")}
    kernels = {"copy_bytes_s": 100.0, "distance_bytes_s": 55.0}
    good = found_of(form(3e6, 5e-5, 1.5e-5), flood=flood, kernels=kernels)
    assert judged(good)[:8] == [
        ("0.960 ≥ 0.95", "pass"),
        ("0.150 ≤ 0.35, aim 0.2", "aim"),
        ("0.050", "no bar"),
        ("0.750 ≥ 0.35, aim 0.7", "aim"),
        ("0.333 ≤ 0.35, aim 0.2", "pass"),
        ("1.500 ≤ 1.3, aim 1.1", "FAIL"),
        ("1.500 ≤ 2, aim 1.1", "pass"),
        ("0.550 ≥ 0.35, aim 0.5", "aim"),
    ]
    wide = judged(good, 768)
    assert wide[2:4] == [("0.050 ≤ 0.1, aim 0.03", "pass"), ("0.750 ≥ 0.9, aim 1.2", "FAIL")]
    assert wide[7] == ("0.550 ≥ 0.6, aim 0.75", "FAIL")
    assert {verdict for _, verdict in judged({"cuvs": None})} == {"not measured"}
    nobody_was_answered = found_of(form(1e6, float("nan"), 4e-5))
    assert [verdict for _, verdict in judged(nobody_was_answered, 768)[1:4]] == ["FAIL"] * 3


@pytest.mark.parametrize(
    ("per_s", "host_s", "told"),
    [(5e6, 1e-7, ("0.200 ≤ 0.35, aim 0.2", "aim")), (1e6, 4e-7, ("1.000 ≤ 0.35, aim 0.2", "FAIL"))],
)
def test_the_hosts_time_of_a_query_is_the_loops_and_unknown_where_the_device_may_be_the_limit(
    per_s: float, host_s: float, told: tuple[str, str]
) -> None:
    assert judged(found_of(form(per_s, 1.0, 1.0, host_s)))[4] == told
    assert judged(found_of(form(1e6, 1.0, 1.0, 3e-7)))[4] == ("≤ 0.35, aim 0.2", "not measured")


def test_the_arena_and_the_hand_over_of_kv_are_judged_once() -> None:
    handover = {
        "in order": {"pull_s": 1.3e-4, "copy_s": 1e-4, "host_s": 5e-5},
        "scattered": {"pull_s": 3e-4, "copy_s": 1e-4, "host_s": 1.1e-4},
    }
    exchange = {"write_s": [4e-6, 9e-6, 3e-6], "take_s": [6e-6]}
    outcomes = {"exchange": Outcome(data=exchange), "handover": Outcome(data=handover)}
    assert [verdict for _, _, verdict in gpu_check.verdicts_of([], outcomes)] == ["pass", "FAIL", "aim", "FAIL", "FAIL"]
    assert gpu_check.verdicts_of([], outcomes)[0][1] == "4.000 ≤ 5"
    assert {verdict for _, _, verdict in gpu_check.verdicts_of([], {})} == {"not measured"}


def test_results_are_written_before_a_section_that_kills_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fatal(setup: Any, outcome: Outcome) -> None:
        raise SystemExit(9)

    put_sections(monkeypatch, first=speed, second=fatal)
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", "--out", str(tmp_path)])
    assert "| first | speed | 1/s |" in (tmp_path / "gpu-dry-run.md").read_text()
