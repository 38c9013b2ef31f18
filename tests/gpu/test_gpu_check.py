"""Tests of the GPU check: every step works on the CPU backend, and its parts behave as documented."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_check import bench as gpu_check
from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.bench import Section
from benchmarks.gpu_check.load_driver import poisson, run_load
from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.sections import forms, kernels, peers, profile, sanitizer, small_run
from benchmarks.gpu_check.sections.correctness import poison
from benchmarks.gpu_check.synthetic import synthetic_set
from benchmarks.gpu_check.targets import verdicts
from benchmarks.gpu_check.time_limit import Skipped
from gpu import CpuEngine, GraphIndex, SearchParams
from gpu.cuda.graphs import StageTimes
from tests.gpu.datasets import clustered


@pytest.mark.timeout(400)  # processes that import torch, on all available cores
def test_a_dry_run_runs_every_section_on_the_cpu_and_reports_what_needs_a_gpu(tmp_path: Path) -> None:
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "gpu-dry-run.json").read_text())
    each = ["data", "steps", "kernels", "load", "cuvs", "resident", "flood"]
    once = ["correctness", "exchange", "model", "handover", "profile", "sanitizer"]
    sections = record["sections"]
    assert list(sections) == ["forms", *(f"{name}, {dim} dims" for dim in (32, 48) for name in each), *once]
    assert sections["forms"]["lines"] == [["cpu", "100.0% of the CPU engine's ids"]]
    for dim in (32, 48):
        settings = record["settings"][f"{dim} dims"]
        assert (settings["set"], settings["vectors"]) == (f"made-{dim}-l2", 900)
        assert settings["graph"] == "by torch, degree 32"
        assert sections[f"data, {dim} dims"]["data"]["torch_graph"]["recall"] > 0.95
        assert sections[f"load, {dim} dims"]["data"]["capacity_per_s"] > 0
        assert len(sections[f"steps, {dim} dims"]["data"]["roofline"]["measured"]) == 5
        assert sections[f"cuvs, {dim} dims"]["data"]["cuvs"] == "none"
        assert list(sections[f"resident, {dim} dims"]["data"]) == ["staged", "fused", "resident"]
        flood = sections[f"flood, {dim} dims"]["data"]
        assert list(flood) == ["auto", "launches"]
        for form in flood.values():
            assert {one["decode_per_s"] for one in form["alone"]} == {0.0}
            assert min(one["decode_per_s"] for one in form["flood"]) > 0.0
            assert form["offered_per_s"] == pytest.approx(0.15 * form["capacity_per_s"])
            runs = form["alone"] + form["flood"]
            assert [one["finished"] for one in runs] == [one["asked"] for one in runs]
    page = (tmp_path / "gpu-dry-run.md").read_text()
    forms = ("16 extends a launch, loop", "16 extends a launch, fused")
    for what in ("memcheck", "racecheck", "synccheck", *forms, "through CUDA IPC", "ncu", "1 slots, one kernel"):
        assert f"| {what} | skipped: no GPU" in page
    assert "| model | same greedy tokens as transformers on the CPU | 3 of 3 prompts |" in page
    assert "| handover | device to device, through CUDA IPC | skipped: no GPU" in page
    assert sections["handover"]["data"]["scattered"]["bytes"] == 512 * 2 * 2 * 2 * 16 * 4
    measured = [verdict in ("pass", "aim", "FAIL") for _, _, verdict in record["verdicts"]]
    assert measured == [*[True] * 4, False, *[True] * 5] * 2  # bytes of rows are measured on a GPU only
    assert "A dry run: its figures and verdicts do not apply to a GPU." in page
    assert "FAILED" not in page
    assert "skipped" not in page.replace("skipped: no GPU", "").replace("| skipped: no persistent kernel", "").replace(
        "skipped: cuVS is not installed", ""
    )


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


def test_it_runs_with_only_numpy_and_numba_and_reports_what_each_section_lacks(tmp_path: Path) -> None:
    missing = ("msgspec", "zmq", "torch", "transformers", "cupy", "cuvs", "matplotlib")
    lines = [
        "import sys",
        f"sys.modules.update(dict.fromkeys({missing}))",
        "from benchmarks.gpu_check import bench",
        "wanted = ('data', 'steps', 'flood', 'exchange', 'model', 'handover')",
        "bench.SECTIONS = {name: bench.SECTIONS[name] for name in wanted}",
        f"sys.exit(bench.main(['--dry-run', '--out', {str(tmp_path)!r}]))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpu-dry-run.md").read_text()
    assert "| flood, 48 dims | | skipped: msgspec is not installed |" in page
    assert "| exchange | | skipped: ipc needs msgspec |" in page
    assert "| model | | skipped: the model needs torch: the extra [llm] |" in page
    assert "| handover | | skipped: zmq is not installed |" in page
    assert "| data, 48 dims | graph by torch | skipped: torch " in page
    assert "| data, 48 dims | graph by the CPU |" in page
    assert "| steps, 48 dims | extend of 16 slots |" in page


def test_a_failed_setup_saves_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: Any) -> None:
        raise OSError("no room for the data")

    monkeypatch.setattr(gpu_check, "prepare", broken)
    with pytest.raises(OSError, match="no room"):
        gpu_check.main(["--dry-run", "--out", str(tmp_path)])
    assert "OSError: no room for the data" in (tmp_path / "gpu-setup.md").read_text()


def cuvs_found(recall: float, per_s: float, p99_s: float, alone_s: float) -> dict[str, Any]:
    theirs = {"recall": 0.95, "per_s": 1000.0, "stream": {"p99_s": 1.0}, "alone_s": 1.0}
    ours = {"recall": recall, "per_s": per_s, "stream": {"p99_s": p99_s}, "alone_s": alone_s}
    return {"ours": ours, "theirs": theirs}


def test_each_bar_passes_reaches_its_target_or_fails_and_missing_values_are_not_measured() -> None:
    kernels = {"copy_bytes_s": 100.0, "distance_bytes_s": 60.0}
    good = {"cuvs": cuvs_found(0.96, 1300.0, 0.1, 0.4), "kernels": kernels}
    assert [verdict for _, _, verdict in verdicts(good)[:5]] == ["aim", "aim", "aim", "aim", "pass"]
    assert verdicts(good)[4][1] == "0.600 ≥ 0.5, aim 0.7"
    fair = {"cuvs": cuvs_found(0.94, 900.0, 0.4, 1.0), "kernels": None}
    assert [verdict for _, _, verdict in verdicts(fair)[:5]] == ["FAIL", "pass", "pass", "pass", "not measured"]
    assert {verdict for _, _, verdict in verdicts({"cuvs": None})} == {"not measured"}
    nobody_was_answered = {"cuvs": cuvs_found(0.96, 700.0, float("nan"), 1.1)}
    assert [verdict for _, _, verdict in verdicts(nobody_was_answered)][1:4] == ["FAIL", "FAIL", "FAIL"]


def form(per_s: float, p99_s: float, alone_s: float) -> dict[str, Any]:
    return {"per_s": per_s, "stream": {"p99_s": p99_s}, "alone_s": alone_s}


def test_resident_blocks_are_compared_with_the_best_other_form_and_cuvs_with_our_best_form() -> None:
    forms = {"staged": form(100.0, 0.3, 2.0), "fused": form(50.0, 0.9, 1.0), "resident": form(95.0, 0.2, 1.1)}
    found = {"cuvs": cuvs_found(0.96, 90.0, float("nan"), 3.0), "resident": forms}
    judged = {what: (figure.split()[0], verdict) for what, figure, verdict in verdicts(found)}
    assert judged["resident kernel, all at once against staged and fused"] == ("0.950", "pass")
    assert judged["resident kernel, p99 of arrivals against staged and fused"] == ("0.667", "pass")
    assert judged["resident kernel, one query alone against staged and fused"] == ("1.100", "FAIL")
    assert judged["full batch, queries/s against cuVS"] == ("0.095", "FAIL")
    assert judged["p99 at 60% of cuVS's batch rate, against its windows of 1 ms"] == ("0.200", "pass")
    assert judged["one query alone, p50 against cuVS"] == ("1.100", "FAIL")


def test_a_missing_device_is_reported_in_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = "GPU-00000000-0000-0000-0000-000000000000"
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", device, "--out", str(tmp_path / "out")])
    assert f"error: --device {device}: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_results_are_written_before_a_section_that_kills_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fatal(setup: Any, outcome: Outcome) -> None:
        raise SystemExit(9)

    put_sections(monkeypatch, first=speed, second=fatal)
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", "--out", str(tmp_path)])
    assert "| first | speed | 1/s |" in (tmp_path / "gpu-dry-run.md").read_text()


@pytest.fixture(scope="module")
def index() -> GraphIndex:
    return GraphIndex.build(clustered(np.random.default_rng(0), 500, 16), metric="l2", degree=8)


def test_all_queries_in_time_are_answered_and_latency_is_measured_from_arrival(index: GraphIndex) -> None:
    queries = clustered(np.random.default_rng(1), 30, 16)
    engine = CpuEngine({"docs": index}, slots=4)
    found = run_load(engine, queries, SearchParams(5, 32, 2), poisson(10_000, 30))
    assert found.finished == 30
    assert found.ids.tolist() == index.search(queries, 5, 32, 2)[0].tolist()
    assert engine.free_slots == 4
    assert found.percentile(0.5) > 0


def test_unfinished_queries_are_counted_and_leave_no_slot_occupied(index: GraphIndex) -> None:
    engine = CpuEngine({"docs": index}, slots=4)
    found = run_load(engine, clustered(np.random.default_rng(1), 5, 16), SearchParams(5, 32, 2), np.full(5, 1e9), 0.01)
    assert found.finished == 0
    assert np.isnan(found.percentile(0.5))
    assert engine.free_slots == 4


class FakePeer:
    """Records its queries, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []

    def put(self, queries: np.ndarray) -> np.ndarray:
        return queries

    def search(self, queries: np.ndarray, k: int, top_m: int) -> None:
        self.batches.append(queries[:, 0].tolist())


def test_the_peers_window_batches_queries_within_a_millisecond_of_the_first() -> None:
    peer = FakePeer()
    arrivals = np.array([0.0, 0.0001, 0.0002, 0.05, 0.0501])
    queries = np.arange(5, dtype=np.float32)[:, None]
    found = peers.windowed(peer, queries, 64, arrivals, 10.0)
    assert [number for batch in peer.batches for number in batch] == [0, 1, 2, 3, 4]
    assert len(peer.batches[0]) >= 3
    assert found.latency_s[0] >= 0.001
    assert found.latency_s[3] >= 0.001


def test_the_neighbors_found_on_a_device_are_the_exact_ones() -> None:
    made = synthetic_set(900, 24, 50, seed=1, device="cpu")
    assert np.array_equal(made.base, made.base.astype(np.float16))
    distances = np.square(made.queries[:, None].astype(np.float64) - made.base[None]).sum(axis=2)
    found = np.take_along_axis(distances, made.truth, axis=1)
    np.testing.assert_allclose(found, np.sort(distances, axis=1)[:, :10], rtol=1e-4)


def test_rows_per_second_are_those_of_the_distance_kernel() -> None:
    seconds = {"compute_distances_16": 2.0, "merge_and_gather": 9.0}
    found = [StageTimes(seconds, 4, 30), StageTimes(seconds, 4, 10)]
    outcome = Outcome()
    kernels.add_times(outcome, 4, found)
    assert outcome.lines[0] == ("4 slots, compute_distances_16, p50", "2,000,000.0 µs")
    assert outcome.lines[2] == ("… rows scored in an extend, p50", "20")
    assert kernels.distance_bytes_s(found, 100) == 1000.0


@pytest.mark.parametrize(("form", "kernels"), [("plain", 2), ("fused", 1)])
def test_the_small_profiled_run_uses_the_requested_form(
    form: str, kernels: int, index: GraphIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu.cuda import compiler, cuda_driver
    from tests.cuda.recorder import RecordingDriver
    from tests.cuda.scripted_device import ScriptedDevice

    driver = RecordingDriver()
    ScriptedDevice(driver)
    monkeypatch.setattr(cuda_driver, "CudaDriver", lambda device: driver)
    monkeypatch.setattr(compiler, "compile_kernels", lambda arch: b"image")
    engine = small_run.engine_of("cuda:0", form, {"docs": index})
    assert {len(graph) for graph in driver.graphs.values()} == {kernels}
    engine.close()


def test_the_sanitizer_runs_every_form_and_a_tool_that_cannot_run_the_persistent_kernel_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        tool, form = command[2], command[-1]
        if (tool, form) == ("racecheck", "resident"):
            raise subprocess.TimeoutExpired(command, 1)
        code = 9 if (tool, form) == ("racecheck", "fused") else 0
        return SimpleNamespace(returncode=code, stdout="========= ERROR SUMMARY: 0 errors\n", stderr="")

    monkeypatch.setattr("benchmarks.gpu_check.sections.sanitizer.subprocess.run", run)
    monkeypatch.setattr("benchmarks.gpu_check.sections.sanitizer.shutil.which", lambda name, path=None: name)
    outcome = Outcome()
    sanitizer.check(SimpleNamespace(device="cuda:0", on_gpu=True), outcome)  # type: ignore[arg-type]
    lines = dict(outcome.lines)
    assert list(lines) == [
        f"{tool}, {form}" for form in ("plain", "fused", "resident") for tool in ("memcheck", "racecheck", "synccheck")
    ]
    assert lines["memcheck, resident"] == lines["racecheck, plain"] == "ERROR SUMMARY: 0 errors"
    assert lines["racecheck, resident"].startswith("skipped: the tool does not end")
    assert lines["racecheck, fused"].startswith("FAILED: ")
    assert outcome.failed


def test_the_profilers_table_is_parsed_by_kernel_and_counter() -> None:
    text = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","merge_and_gather(Batch, unsigned int)","gpu__time_duration.sum","nsecond","4,000"
"1","1","merge_and_gather(Batch, unsigned int)","gpu__time_duration.sum","nsecond","6,000"
"1","1","merge_and_gather(Batch, unsigned int)","dram__bytes_read.sum","byte","2,048"
"1","1","merge_and_gather(Batch, unsigned int)","something_else","","x"
"""
    assert profile.medians(text) == {"merge_and_gather": {"time": "5,000 nsecond", "read from memory": "2,048 byte"}}
    with pytest.raises(AssertionError, match="no table"):
        profile.medians("==ERROR== nothing was profiled")


def test_the_archive_is_split_into_small_pieces_that_reassemble_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheels, "PIECE_BYTES", 20_000)

    def fetch(requirements: Any, to: Path) -> None:
        (to / "numpy-2.0-any.whl").write_bytes(b"n" * 15_000)  # required by both
        name = requirements[0].partition(">")[0]
        (to / f"{name}-1.0-any.whl").write_bytes(name.encode() * 10_000)

    wheels.pack_wheels(tmp_path, fetch)
    pieces = sorted(tmp_path.glob("*.piece"))
    assert all(piece.stat().st_size <= 20_000 for piece in pieces)
    assert all(piece.name in capsys.readouterr().out for piece in pieces[:1])
    held = []
    for pack in wheels.PACKS:
        whole = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces if piece.name.startswith(pack)))
        with tarfile.open(fileobj=whole) as archive:
            held += archive.getnames()
    assert held == ["wheels/numba-1.0-any.whl", "wheels/numpy-2.0-any.whl", "wheels/cuvs-cu13-1.0-any.whl"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".piece"] * len(pieces)


def test_only_result_memory_is_poisoned(index: GraphIndex) -> None:
    from gpu.cuda.engine import CudaEngine
    from tests.cuda.recorder import RecordingDriver
    from tests.cuda.scripted_device import ScriptedDevice

    assert not poison(CpuEngine({"docs": index}))
    driver = RecordingDriver()
    ScriptedDevice(driver, length=1)
    engine = CudaEngine(driver, b"image", {"docs": index}, slots=2, max_top_m=64)
    assert poison(engine)
    slot = engine.admit(np.zeros(16, np.float32), SearchParams(3, 32, 2), "docs")
    engine.extend()
    assert engine.result(slot)[0].tolist() == [0, 0, 0]  # written by the device, over the poison
    engine.close()
