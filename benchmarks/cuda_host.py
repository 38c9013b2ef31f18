"""Host time of the CUDA engine's compiled functions, over a stub of NVIDIA's driver; says nothing about a GPU.

    python -m benchmarks.cuda_host [--blocks 400]

The stub (tests/cuda) returns from every driver call at once and updates the running batch as the kernels would, without
searching. Its own time is subtracted; NVIDIA's driver would add its launch time. A step: `extend` of `active` queries
that continue. A query: the additional time per query of a step in which all queries end and are replaced: admit,
commands, reading results and release. 384 dims, float32, k 10; medians and quartiles over blocks of steps of about a
millisecond each. Needs a C compiler and the extra [cuda], and no GPU.
"""

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import table
from gpu import GraphIndex
from gpu.compiled import compiled
from gpu.cuda.compiler import c_header
from gpu.engine import RELEASE
from ipc.memory.intrinsics import call

STUB = Path(__file__).parent.parent / "tests" / "cuda"
_ACTIVE = (1, 32, 256)
_SLOTS = 512
_QUERIES_PER_BLOCK = 1000  # short enough that most blocks are not preempted
_DIM, _K = 384, 10
_NEVER_ENDING = 1 << 30


def build_stub(directory: Path) -> Path:
    """Compile the stub driver and device as libcuda.so.1 in `directory`. Raises CalledProcessError."""
    library = directory / "libcuda.so.1"
    (directory / "layout.h").write_text(c_header())
    sources = (str(STUB / "stub_driver.c"), str(STUB / "stub_device.cpp"))
    options = ("-O2", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{directory}", "-o", str(library))
    compiler = shutil.which("gcc") or shutil.which("cc") or "cc"
    subprocess.run([compiler, *options, *sources, "-lstdc++", "-ldl"], check=True, timeout=120)
    return library


@compiled
def _drive(
    engine: Any, vectors: Any, running: int, active: int, steps: int, report: Any, ids: Any, distances: Any
) -> Any:
    """Run steps of `active` queries, `running` of which are admitted. Returns the number running, negative on error."""
    admit, extend, read_result, change, handle = engine[0], engine[1], engine[2], engine[3], engine[4]
    for _ in range(steps):
        while running < active:
            vector = vectors.ctypes.data + (running % len(vectors)) * vectors.strides[0]
            if call(admit, (handle, vector, 0, _K, 64, 4, 0)) < 0:
                return -1
            running += 1
        done = call(extend, (handle, report.ctypes.data))
        if done < 0:
            return -1
        for i in range(done):
            slot = report[2 + 2 * i]
            call(read_result, (handle, slot, ids.ctypes.data, distances.ctypes.data))
            call(change, (handle, slot, RELEASE))
        running -= done
    return running


def _measure(blocks: int) -> None:
    """Measure and print the table, in a process that has loaded the stub driver."""
    from gpu.cuda.cuda_driver import CudaDriver
    from gpu.cuda.engine import CudaEngine

    stub = ctypes.CDLL("libcuda.so.1")
    stub.stub_spent_ns.restype = ctypes.c_uint64
    vectors = np.random.default_rng(1).standard_normal((300, _DIM)).astype(np.float32)
    index = GraphIndex.build(vectors, metric="l2", degree=8)
    report, ids, distances = np.zeros(2 + 2 * _SLOTS, np.int64), np.zeros(_K, np.int64), np.zeros(_K, np.float32)

    def step_us(active: int, extends: int) -> list[float]:
        stub.stub_extends(extends)
        engine = CudaEngine(CudaDriver("cuda:0"), b"image", {"docs": index}, slots=_SLOTS, max_top_m=128)
        backend = engine.backend()
        words = np.array(backend[:5], np.int64)
        steps, found = max(4, _QUERIES_PER_BLOCK // active), []
        running = _drive(words, vectors, 0, active, 10, report, ids, distances)  # compiles and warms up
        for _ in range(blocks):
            begin, spent = time.perf_counter_ns(), stub.stub_spent_ns()
            running = _drive(words, vectors, running, active, steps, report, ids, distances)
            found.append((time.perf_counter_ns() - begin - (stub.stub_spent_ns() - spent)) / steps / 1e3)
        backend.check()
        engine.close()
        return found

    found = []
    for active in _ACTIVE:
        steps, rounds = step_us(active, _NEVER_ENDING), step_us(active, 1)
        queries = [(both - statistics.median(steps)) / active for both in rounds]
        found.append((active, _median(steps), _median(queries)))
    print("\n".join(table(("active", "per step, µs", "per query, µs"), found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _measure(arguments.blocks)
        return
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(build_stub(Path(directory)).parent)}
        command = [sys.executable, "-m", "benchmarks.cuda_host", "--child", "--blocks", str(arguments.blocks)]
        subprocess.run(command, env=environment, check=True)


def _median(values: list[float]) -> str:
    """Format the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    main()
