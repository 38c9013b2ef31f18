"""Memory and time of building and searching a large index: `trinity index build` and `trinity search` on random rows.

    python -m benchmarks.engine.memory [--rows 1000000] [--dim 96] [--dtype float32] [--threads 0]
        [--top-m 64 512] [--out benchmarks/results/engine-memory]

Gaussian rows are hard for any graph search, so recall is not representative; memory and time are. Each command runs in
a process of its own; its peak is its maximum resident set (`ru_maxrss`), including pages of mapped files. The report
also shows the index sizes of `trinity index info`.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.data import Array
from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import table, write
from runtime.retrieval.collections.collection import Collection

_QUERIES, _TRUTH_AT_ONCE = 500, 50


class Ran(NamedTuple):
    """A command's processor time, peak resident memory, and last line of output."""

    cpu_s: float
    peak_bytes: int
    last_line: str


def run(*arguments: object) -> Ran:
    """Run `trinity` with these arguments. Raises CalledProcessError."""
    command = [sys.executable, "-m", "launchers.entry", *map(str, arguments)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode().strip()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, text)
    return Ran(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, text.splitlines()[-1] if text else "")


def truth(rows: Array, queries: Array) -> Array:
    """Return the ten nearest rows of each query by squared L2, nearest first."""
    norms = np.einsum("ij,ij->i", rows, rows)
    found = []
    for begin in range(0, len(queries), _TRUTH_AT_ONCE):
        distances = norms - 2 * (queries[begin : begin + _TRUTH_AT_ONCE] @ rows.T)
        nearest = np.argpartition(distances, 10, axis=1)[:, :10]
        order = np.argsort(np.take_along_axis(distances, nearest, 1), axis=1)
        found.append(np.take_along_axis(nearest, order, 1))
    return np.concatenate(found)


def make(folder: Path, rows: int, dim: int) -> None:
    """Write rows, queries and their true neighbours."""
    random = np.random.default_rng(0)
    base = random.standard_normal((rows, dim), np.float32)
    queries = random.standard_normal((_QUERIES, dim), np.float32)
    np.save(folder / "base.npy", base)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "truth.npy", truth(base, queries))


def measure(folder: Path, rows: int, dim: int, dtype: str, threads: int, lists: list[int]) -> dict[str, Any]:
    """Build and search. Returns the results of each command."""
    # In a child process: a command's peak would include this process's memory at the fork.
    maker = multiprocessing.get_context("spawn").Process(target=make, args=(folder, rows, dim))
    maker.start()
    maker.join()
    out = folder / "index"
    options = ("--metric", "l2", "--dtype", dtype, "--threads", threads)
    ran = {"build": run("index", "build", folder / "base.npy", "--out", out, *options)}
    query_options = ("--queries", folder / "queries.npy", "--truth", folder / "truth.npy")
    for top_m in lists:
        ran[f"search, top_m {top_m}"] = run("search", out, *query_options, "--top-m", top_m)
    info = Collection.info(out)
    return {
        "machine": machine(),
        "load": machine_load(),
        "rows": rows,
        "dim": dim,
        "dtype": dtype,
        "threads": threads or len(os.sched_getaffinity(0)),
        "seed": 0,
        "index_bytes": info.index_bytes,
        "code_bytes": info.code_bytes,
        "ran": {name: one._asdict() for name, one in ran.items()},
    }


def report(found: dict[str, Any]) -> str:
    """Format the table as Markdown."""
    about, index = found["machine"], found["index_bytes"]
    lines = [
        f"{about['processor']}, {about['cores']} cores; {found['rows']:,} random rows of {found['dim']} dimensions, "
        f"{found['dtype']} with neighbour codes, seed {found['seed']}, {found['threads']} threads for the build, "
        f"one for searches; {found['load']}. "
        f"`trinity index info`: {index / 1e6:,.0f} MB, {found['code_bytes'] / 1e6:,.0f} MB of it codes.",
        "",
    ]
    head = ["command", "peak, MB", "of the index's bytes", "CPU, s", ""]
    rows = [
        [name, f"{one['peak_bytes'] / 1e6:,.0f}", f"{one['peak_bytes'] / index:.2f}×", f"{one['cpu_s']:.0f}",
         "" if name == "build" else one["last_line"]]
        for name, one in found["ran"].items()
    ]  # fmt: skip
    return "\n".join([*lines, *table(head, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--top-m", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine-memory"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.rows, options.dim, options.dtype, options.threads, options.top_m)
    write(found, report(found), options.out)


if __name__ == "__main__":
    main()
