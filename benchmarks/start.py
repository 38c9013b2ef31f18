"""Startup times of a node and its workers: `python -m benchmarks.start [--runs 5] [--config node.toml]`.

Every run starts the node (by default the demo's), measures the time until all of it is ready, then kills each worker
once (kill -9) while the node is idle, and measures the time until it is ready again. Prints the median, the fastest and
the slowest run, with the phases of each worker's startup from its log, and the *chain*: what the start would take with
a core for each process. `--cold` begins with two starts as after an installation: with a copy of the sources without
compiled code and empty caches (numba's, kernels, torch's), and with the byte code of other packages, which pip writes.
One is of that state, one after `trinity precompile`, whose time is a row too.
To compare two versions, alternate their runs.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from benchmarks.common.machine import machine_load
from benchmarks.common.report import table
from gpu.build.params import no_progress
from launchers.commands.demo import node_file, prepare_collection
from runtime.serving.model import smollm
from runtime.testing.node import Node

_LOOK_S = 0.2  # often enough to notice the end; a look takes several milliseconds of a core, so times are the log's
_TOOK = r"after (?P<all>[\d.]+) s(?: \((?P<waited>[\d.]+) waiting for a core\))?: (?P<phases>.*)$"
_READY = re.compile(rf"\b(?P<worker>(?:pool|prefill|decode|frontend)-\d+)\b.*ready {_TOOK}", re.MULTILINE)
_STARTS = re.compile(rf"supervisor: starts \d+ workers {_TOOK}", re.MULTILINE)


def started_and_killed(config: Path, times: dict[str, list[float]]) -> None:
    """Perform one run and add its seconds to `times`, by name."""
    seconds, node = started(config)
    try:
        times["node"].append(seconds)
        for name in [worker.name for worker in node.status().workers]:
            times[f"kill -9 {name}"].append(_recovery_s(node, name))
    finally:
        node.stop()
    add_phases(node, times)


def started(config: Path) -> tuple[float, Node]:
    """Start a node. Return the seconds until all of it was ready, and the node."""
    begin = time.time()
    node = Node(config, look_s=_LOOK_S)
    return _logged_at(node, "supervisor: node .* serves at", begin) - begin, node


def _logged_at(node: Node, pattern: str, since: float) -> float:
    """Wait for a line with this pattern in the node's log from `since` on, and return the wall time in seconds of the
    first: a worker logs that it is ready after its state says so."""
    times: list[float] = []

    def is_logged() -> bool:
        times[:] = logged_times(node.log.read_text(errors="replace"), pattern, since)
        return bool(times)

    node.wait(is_logged, what=f"a line with {pattern!r} in the log")
    return times[0]


def logged_times(log: str, pattern: str, since: float) -> list[float]:
    """Return the wall times in seconds of the lines of a log with this pattern, of those from `since` on."""
    lines = [line for line in log.splitlines() if re.search(pattern, line)]
    times = [datetime.fromisoformat(line.split()[0]).timestamp() for line in lines]
    return [time for time in times if time >= since]


def add_phases(node: Node, times: dict[str, list[float]], before: str = "") -> None:
    """Add the phases of each process's startup from the node's log, their names behind `before`, and the chain."""
    text = node.log.read_text(errors="replace")
    for line in text.splitlines():
        if match := _STARTS.search(line) or _READY.search(line):
            worker = match.groupdict().get("worker", "supervisor")
            waited = f", waiting for a core {match['waited']}" if match["waited"] else ""
            for part in f"all {match['all']}{waited}, {match['phases']}".split(", "):
                label, seconds = part.rsplit(" ", 1)
                times[f"{before}{worker}: {label}"].append(float(seconds))
    times[f"{before}chain"].append(chain_s(text))


def chain_s(log: str) -> float:
    """Return the seconds that a node's start would take with a core for each process, from its log: the supervisor's
    until it starts the workers, then the first start of the worker that takes longest, both without their main
    threads' waits for a core. What a process waits for otherwise (a disk, a thread, another process) is in it."""

    def without_waits(match: re.Match[str]) -> float:
        return float(match["all"]) - float(match["waited"] or 0)

    (begin,) = map(without_waits, _STARTS.finditer(log))
    workers: dict[str, float] = {}
    for match in _READY.finditer(log):
        workers.setdefault(match["worker"], without_waits(match))
    return begin + max(workers.values())


def _recovery_s(node: Node, name: str) -> float:
    """Return the seconds from a kill -9 of a worker until its next process is ready."""
    worker = next(status for status in node.status().workers if status.name == name)
    begin = time.time()
    os.kill(worker.pid, signal.SIGKILL)
    return _logged_at(node, f"{name}: ready after", begin) - begin


def cold_starts(config: Path, times: dict[str, list[float]]) -> None:
    """Start on empty caches, as they are and after `trinity precompile`, and add the seconds to `times`."""
    for what in ("cold", "precompiled"):
        with tempfile.TemporaryDirectory() as empty, _installed_in(Path(empty)):
            if what == "precompiled":
                begin = time.monotonic()
                command = [sys.executable, "-m", "launchers.main", "precompile", "--config", str(config)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                times["trinity precompile"].append(time.monotonic() - begin)
            seconds, node = started(config)
            times[f"node, {what}"].append(seconds)
            node.stop()
            add_phases(node, times, f"{what}, ")
        print(f"start, {what}: {times[f'node, {what}'][0]:.1f} s", flush=True)


@contextlib.contextmanager
def _installed_in(directory: Path) -> Iterator[None]:
    """Work in a copy of the sources without compiled code, with an empty user's cache except for converted models."""
    repository, cache = Path(__file__).parent.parent, directory / "cache" / "trinity"
    for package in ("gpu", "ipc", "runtime", "launchers", "dashboards"):
        shutil.copytree(repository / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    cache.mkdir(mode=0o700, parents=True)
    (cache / "models").symlink_to(smollm.models_directory())
    variables = {"XDG_CACHE_HOME": str(cache.parent), "PYTHONPATH": str(directory)}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with contextlib.chdir(directory):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def demo_config(directory: Path) -> Path:
    """Write the demo's configuration, with another name and port."""
    home = smollm.models_directory().parent / "demo"
    smollm.ensure_converted()
    collection = prepare_collection(home, no_progress)
    path = directory / "node.toml"
    path.write_text(node_file(f"start-{os.getpid()}", 0, collection))
    return path


def report(times: dict[str, list[float]]) -> str:
    """Return the report as Markdown."""
    summaries = (statistics.median, min, max)
    rows = [[what, *(f"{summary(seconds):.2f}" for summary in summaries)] for what, seconds in times.items()]
    return "\n".join(table(("seconds until ready", "median", "fastest", "slowest"), rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="configuration of the node; default: the demo's")
    parser.add_argument("--cold", action="store_true", help="begin with starts on empty caches of compiled code")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all runs to this file, too")
    options = parser.parse_args()
    print(f"Machine: {machine_load()} before")
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:  # the node's log is written beside its file
        config = Path(shutil.copy(options.config, directory)) if options.config else demo_config(Path(directory))
        if options.cold:
            cold_starts(config, times)
        for _ in range(options.runs):
            started_and_killed(config, times)
            print(f"start: {times['node'][-1]:.2f} s", flush=True)
    print(f"Machine: {machine_load()} after\n\n{report(times)}")
    if options.json:
        options.json.write_text(json.dumps(times, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
