"""What a death costs: every process of a node is killed in turn under load; how soon is it back, and what was lost?

`python -m benchmarks.faults --config node.toml` measures, for kill -9 of each worker: until the supervisor has noticed
and started a new process, until that one is ready, and until a request of the role's kind is answered again. Requests
that ended with anything but an answer are counted by their error. Bars: a pool is ready again within 2 s (its index is
memory-mapped), other workers within 2 s beyond the time that loading takes (the same worker's first start, measured
in the same run by a rolling restart). Then the supervisor is killed, and what it leaves behind is counted.
`--rounds N` starts and stops the node N times more, and counts what each round left. Writes faults.json and faults.md.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.node import BenchmarkNode, machine_load, running
from launchers.http_client import post
from runtime.errors import TrinityError
from runtime.node.config import NodeConfig, load_config
from runtime.node.control import restart_node
from runtime.serving.model.model_info import ModelInfo

BAR_S = 2.0


def bodies(config: NodeConfig) -> dict[str, Any]:
    """A request to every path that the node serves."""
    collection = config.collections[0].name
    found: dict[str, Any] = {"/v1/retrieval": {"query": "the with statement", "collection": collection, "k": 3}}
    if config.model is not None:
        found["/v1/completions"] = {
            "model": ModelInfo.read(config.model.name).name, "prompt": "how does a with statement work?",
            "max_tokens": 16, "ignore_eos": True, "retrieval": {"collection": collection, "k": 2, "every_tokens": 8},
        }  # fmt: skip
    return found


@contextmanager
def load(node: BenchmarkNode, config: NodeConfig) -> Iterator[Counter[str]]:
    """One request of each kind after the other; how they ended."""
    ended, ends = threading.Event(), Counter[str]()
    url = node.info.url

    def ask(path: str, body: dict[str, Any]) -> None:
        while not ended.wait(0.02):
            try:
                post(url, path, body, timeout_s=60)
                ends["ok"] += 1
            except TrinityError as error:
                ends[error.code] += 1

    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in bodies(config).items()]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        ended.set()
        for thread in threads:
            thread.join(timeout=90)


def killed(node: BenchmarkNode, worker: str) -> dict[str, float]:
    """Seconds from a kill -9 until a new process runs, is ready, and the whole node is."""
    before = next(found for found in node.status().workers if found.name == worker)

    def now() -> Any:
        return next(found for found in node.status().workers if found.name == worker)

    begin = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    node.wait(lambda: now().epoch > before.epoch)
    started = time.monotonic() - begin
    node.wait(lambda: now().epoch > before.epoch and now().phase == "ready")
    ready = time.monotonic() - begin
    node.wait(node.ready)
    return {"started_s": started, "ready_s": ready, "node_s": time.monotonic() - begin}


def killed_under_load(node: BenchmarkNode, config: NodeConfig, worker: str) -> dict[str, Any]:
    """`killed`'s times while requests come, and how these ended."""
    with load(node, config) as ends:
        node.wait(lambda: ends["ok"] >= 4)
        times = killed(node, worker)
        enough = ends["ok"] + 4
        node.wait(lambda: ends["ok"] >= enough)
    return times | {"ends": dict(ends)}


def rolled(node: BenchmarkNode, worker: str) -> float:
    """Seconds that an orderly restart of an idle worker takes: its drain, which is nothing, and its load."""
    begin = time.monotonic()
    restart_node(node.info, worker, 600.0)
    return time.monotonic() - begin


def left_behind(pids: list[int], token: str) -> list[str]:
    """Processes and sockets of a node that has ended."""
    found = [f"process {pid}" for pid in pids if psutil.pid_exists(pid)]
    return found + [line for line in Path("/proc/net/unix").read_text().splitlines() if token in line]


def supervisor_killed(config: Path) -> dict[str, Any]:
    """Kill the supervisor: seconds until nothing of the node is left, and what is left then."""
    with running(config) as node:
        pids = list(node.pids().values())
        token = node.info.control.removeprefix("ipc://@").removesuffix("-control")
        begin = time.monotonic()
        node.process.kill()
        node.process.wait(timeout=30)
        while left_behind(pids, token) and time.monotonic() - begin < 30:
            time.sleep(0.005)
        return {"gone_s": time.monotonic() - begin, "left": left_behind(pids, token)}


def rounds(config: Path, count: int) -> dict[str, Any]:
    """Start and stop the node so often; what was left behind in all, and how the node ended."""
    left: list[str] = []
    codes: Counter[str] = Counter()
    times = []
    for _ in range(count):
        begin = time.monotonic()
        node = BenchmarkNode(config)
        pids = list(node.pids().values())
        token = node.info.control.removeprefix("ipc://@").removesuffix("-control")
        codes[str(node.stop())] += 1
        left += left_behind(pids, token)
        times.append(time.monotonic() - begin)
    return {"rounds": count, "exit_codes": dict(codes), "left": left, "median_s": statistics.median(times)}


def report(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "# Faults under load", "", f"`{found['command']}`",
        f"Machine: {found['load_before']} before, {found['load_after']} after: others worked on it too.", "",
        "kill -9 of each worker in turn, under load; seconds after it:", "",
        "| killed | new process | ready | whole node | orderly restart | over it | bar 2 s | how requests ended |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for worker, one in found["workers"].items():
        bar, over = one["ready_s"], one["ready_s"] - one["orderly_s"]
        met = (bar if worker.startswith("pool") else over) <= BAR_S
        ends = ", ".join(f"{name} {count}" for name, count in sorted(one["ends"].items()))
        lines.append(
            f"| {worker} | {one['started_s']:.2f} | {one['ready_s']:.2f} | {one['node_s']:.2f} "
            f"| {one['orderly_s']:.2f} | {over:+.2f} | {'met' if met else 'missed'} | {ends} |"
        )
    lines += [
        "", "A pool's bar is on its time until ready, the others' on the time beyond an orderly restart (their load).",
        "",
        f"kill -9 of the supervisor: all gone after {found['supervisor']['gone_s']:.2f} s, "
        f"left behind: {', '.join(found['supervisor']['left']) or 'nothing'}.", "",
    ]  # fmt: skip
    if "rounds" in found:
        one = found["rounds"]
        lines += [
            f"{one['rounds']} starts and stops (median {one['median_s']:.1f} s): exit codes {one['exit_codes']}, "
            f"left behind: {', '.join(one['left']) or 'nothing'}.",
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    config = load_config(options.config)
    found: dict[str, Any] = {
        "command": f"python -m benchmarks.faults --config node.toml --rounds {options.rounds}",
        "load_before": machine_load(),
        "workers": {},
    }
    with running(options.config) as node:
        for worker in [found.name for found in node.status().workers]:
            orderly_s = rolled(node, worker)
            found["workers"][worker] = killed_under_load(node, config, worker) | {"orderly_s": orderly_s}
            print(worker, found["workers"][worker], flush=True)
    found["supervisor"] = supervisor_killed(options.config)
    if options.rounds:
        found["rounds"] = rounds(options.config, options.rounds)
    found["load_after"] = machine_load()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "faults.md").write_text(report(found))
    print(report(found))
    return 1 if found["supervisor"]["left"] or found.get("rounds", {}).get("left") else 0


if __name__ == "__main__":
    sys.exit(main())
