"""The run for a GPU machine: every step of it works on the CPU backend, and its parts do what they say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_check import bench as gpu_check
from benchmarks.gpu_check.drive import drive, poisson
from benchmarks.gpu_check.report import Outcome, Skipped
from benchmarks.gpu_check.sections import peers
from benchmarks.gpu_check.sections.correctness import poison
from benchmarks.gpu_check.verdicts import verdicts
from gpu import CpuEngine, GraphIndex, SearchParams
from tests.gpu.cases import clustered


@pytest.mark.timeout(400)  # processes that import torch, on as many cores as there are
def test_a_dry_run_does_every_step_on_the_cpu_and_says_what_needs_a_gpu(tmp_path: Path) -> None:
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "gpu-dry-run.json").read_text())
    sections = ["correctness", "steps", "load", "cuvs", "exchange", "model", "handover", "sanitizer"]
    assert list(record["sections"]) == sections
    assert record["settings"]["vectors"] == 1500
    assert record["sections"]["load"]["data"]["capacity_per_s"] > 0
    assert len(record["sections"]["steps"]["data"]["roofline"]["measured"]) == 5
    page = (tmp_path / "gpu-dry-run.md").read_text()
    forms = ("16 extends a launch, loop", "16 extends a launch, fused")
    for what in ("memcheck", "racecheck", "synccheck", *forms, "through CUDA IPC"):
        assert f"| {what} | skipped: no GPU" in page
    assert "| model | same greedy tokens as transformers on the CPU | 3 of 3 prompts |" in page
    assert "| handover | device to device, through CUDA IPC | skipped: no GPU" in page
    assert record["sections"]["handover"]["data"]["scattered"]["bytes"] == 512 * 2 * 2 * 2 * 16 * 4
    assert record["sections"]["cuvs"]["data"]["cuvs"] == "none"
    assert [verdict in ("pass", "aim", "FAIL") for _, _, verdict in record["verdicts"]] == [True] * 5
    assert "A dry run: its figures and verdicts say nothing of a GPU." in page
    assert "FAILED" not in page
    assert "skipped" not in page.replace("skipped: no GPU", "")


def test_a_section_that_fails_or_is_late_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(setup: Any) -> Outcome:
        raise AssertionError("an id comes twice")

    def impossible(setup: Any) -> Outcome:
        raise Skipped("no such tool")

    sections = {"first": wrong, "second": impossible, "third": lambda setup: Outcome([("speed", "1/s")])}
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "gpu-dry-run.md").read_text()
    assert "| first | | FAILED: AssertionError: an id comes twice |" in page
    assert "| second | | skipped: no such tool |" in page
    assert "| third | speed | 1/s |" in page
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path), "--seconds", "-1"]) == 0
    assert (tmp_path / "gpu-dry-run.md").read_text().count("skipped:") == 3


def test_it_runs_where_only_numpy_and_numba_are_and_says_what_each_section_misses(tmp_path: Path) -> None:
    missing = ("msgspec", "zmq", "torch", "transformers", "cupy", "cuvs", "matplotlib")
    lines = [
        "import sys",
        f"sys.modules.update(dict.fromkeys({missing}))",
        "from benchmarks.gpu_check import bench",
        "wanted = ('exchange', 'model', 'handover', 'steps')",
        "bench.SECTIONS = {name: bench.SECTIONS[name] for name in wanted}",
        f"sys.exit(bench.main(['--dry-run', '--out', {str(tmp_path)!r}]))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpu-dry-run.md").read_text()
    assert "| exchange | | skipped: the package of the rings needs msgspec |" in page
    assert "| model | | skipped: the model needs torch: the extra [llm] |" in page
    assert "| handover | | skipped: msgspec is not installed |" in page
    assert "| steps | extend of 16 slots |" in page


def test_a_setup_that_fails_leaves_its_traceback_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: Any) -> None:
        raise OSError("no room for the data")

    monkeypatch.setattr(gpu_check, "prepare", broken)
    with pytest.raises(OSError, match="no room"):
        gpu_check.main(["--dry-run", "--out", str(tmp_path)])
    assert "OSError: no room for the data" in (tmp_path / "gpu-setup.md").read_text()


def cuvs_found(recall: float, per_s: float, p99_s: float, alone_s: float) -> dict[str, Any]:
    theirs = {"recall": 0.95, "per_s": 1000.0, "stream": {"p99_s": 1.0}, "alone_s": [1.0]}
    ours = {"recall": recall, "per_s": per_s, "stream": {"p99_s": p99_s}, "alone_s": [alone_s]}
    return {"ours": ours, "theirs": theirs}


def test_each_bar_passes_reaches_its_aim_or_fails_and_what_is_missing_was_not_measured() -> None:
    steps = {
        "roofline": {"peak_bytes_s": 100.0, "measured": [{"nbytes": 60, "seconds": 2}, {"nbytes": 60, "seconds": 0.5}]}
    }
    good = {"cuvs": cuvs_found(0.96, 1300.0, 0.1, 0.4), "steps": steps}
    assert [verdict for _, _, verdict in verdicts(good)] == ["aim", "aim", "aim", "aim", "pass"]
    assert verdicts(good)[4][1] == "0.600 ≥ 0.5, aim 0.7"
    fair = {"cuvs": cuvs_found(0.94, 900.0, 0.4, 1.0), "steps": None}
    assert [verdict for _, _, verdict in verdicts(fair)] == ["FAIL", "pass", "pass", "pass", "not measured"]
    assert {verdict for _, _, verdict in verdicts({"cuvs": None})} == {"not measured"}
    nobody_was_answered = {"cuvs": cuvs_found(0.96, 700.0, float("nan"), 1.1)}
    assert [verdict for _, _, verdict in verdicts(nobody_was_answered)][1:4] == ["FAIL", "FAIL", "FAIL"]


def test_a_device_that_is_not_there_is_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = "GPU-00000000-0000-0000-0000-000000000000"
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", device, "--out", str(tmp_path / "out")])
    assert f"error: --device {device}: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_known_is_written_before_a_section_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fatal(setup: Any) -> Outcome:
        raise SystemExit(9)

    sections = {"first": lambda setup: Outcome([("speed", "1/s")]), "second": fatal}
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", "--out", str(tmp_path)])
    assert "| first | speed | 1/s |" in (tmp_path / "gpu-dry-run.md").read_text()


@pytest.fixture(scope="module")
def index() -> GraphIndex:
    return GraphIndex.build(clustered(np.random.default_rng(0), 500, 16), metric="l2", degree=8)


def test_queries_that_arrive_in_time_are_all_answered_and_latency_counts_from_the_arrival(index: GraphIndex) -> None:
    queries = clustered(np.random.default_rng(1), 30, 16)
    engine = CpuEngine({"docs": index}, slots=4)
    found = drive(engine, queries, SearchParams(5, 32, 2), poisson(10_000, 30))
    assert found.finished == 30
    assert found.ids.tolist() == index.search(queries, 5, 32, 2)[0].tolist()
    assert engine.free_slots == 4
    assert found.percentile(0.5) > 0


def test_what_is_not_finished_within_the_limit_is_counted_and_leaves_no_slot_taken(index: GraphIndex) -> None:
    engine = CpuEngine({"docs": index}, slots=4)
    found = drive(engine, clustered(np.random.default_rng(1), 5, 16), SearchParams(5, 32, 2), np.full(5, 1e9), 0.01)
    assert found.finished == 0
    assert np.isnan(found.percentile(0.5))
    assert engine.free_slots == 4


class FakePeer:
    """Finds each query's number, and remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def search(self, queries: np.ndarray, k: int, top_m: int) -> np.ndarray:
        self.sizes.append(len(queries))
        return np.repeat(queries[:, :1].astype(np.int64), k, axis=1)


def test_the_peers_window_gathers_what_came_within_a_millisecond_of_the_first() -> None:
    peer = FakePeer()
    arrivals = np.array([0.0, 0.0001, 0.0002, 0.05, 0.0501])
    queries = np.arange(5, dtype=np.float32)[:, None]
    found = peers.windowed(peer, queries, 64, arrivals, 10.0)
    assert sum(peer.sizes) == 5
    assert peer.sizes[0] >= 3
    assert found.ids[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert found.latency_s[0] >= 0.001
    assert found.latency_s[3] >= 0.001


def test_only_memory_that_results_come_out_of_is_poisoned(index: GraphIndex) -> None:
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
