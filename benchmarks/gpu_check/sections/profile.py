"""Hardware counters of each kernel, if Nsight Compute (ncu) is installed and permitted."""

import csv
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.time_limit import Skipped

_TOOLKIT = "/usr/local/cuda/bin"
_KERNELS = "compute_distances|merge_and_gather"
_METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read from memory",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "of the memory's peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, of the most",
    "smsp__inst_executed.sum": "instructions",
}
_LAUNCHES = 60
_SECONDS = 60.0


def check(setup: Setup, outcome: Outcome) -> None:
    """Run the small run under ncu; report medians over its launches. Raises Skipped without ncu."""
    small = [sys.executable, "-m", "benchmarks.gpu_check.sections.small_run", setup.device]
    if not setup.on_gpu:
        outcome.add("ncu", "skipped: no GPU")
        return
    ncu = shutil.which("ncu") or shutil.which("ncu", path=_TOOLKIT)
    if ncu is None:
        raise Skipped(f"no ncu on the PATH or in {_TOOLKIT}")
    command = [ncu, "--csv", "--graph-profiling", "node", "--kernel-name", f"regex:{_KERNELS}"]
    command += ["--launch-count", str(_LAUNCHES), "--metrics", ",".join(_METRICS), *small, "plain"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise Skipped("ncu is not allowed to read the GPU's counters (ERR_NVGPUCTRPERM)")
    assert done.returncode == 0, f"ncu ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    counted = medians(done.stdout)
    outcome.data["plain"] = counted
    for kernel, values in counted.items():
        outcome.add(kernel, "; ".join(f"{what} {value}" for what, value in values.items()))


def medians(text: str) -> dict[str, dict[str, str]]:
    """Return medians of ncu's table (--csv) by kernel and metric, with units."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    assert begin is not None, f"ncu wrote no table: {text[-500:]}"
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    units = {}
    for row in csv.DictReader(lines[begin:]):
        if row["Metric Name"] in _METRICS:
            what = _METRICS[row["Metric Name"]]
            found[row["Kernel Name"].partition("(")[0]][what].append(float(row["Metric Value"].replace(",", "")))
            units[what] = row["Metric Unit"]
    return {
        kernel: {what: f"{np.median(values):,.6g} {units[what]}".strip() for what, values in counted.items()}
        for kernel, counted in found.items()
    }
