"""Fault recovery under load: kills every process of a node in turn, and measures recovery times and failed requests.

`python -m benchmarks.faults --config node.toml` measures, for kill -9 of each worker, the time until the supervisor has
started a new process, until that one is ready, and until a request of the role's kind succeeds again. Failed requests
are counted by error code. Bars: a pool worker is ready again within 2 s (its index is memory-mapped), a worker that a
standby worker replaces (`spares` in the TOML file) within 1 s, other workers within 2 s beyond their load time
(measured in the same run by a rolling restart, which uses no standby worker). Then the supervisor is killed, and
leftovers are counted. Writes faults.json and faults.md; for a node with standby workers faults-spares.json and
faults-spares.md.

`--rounds N` instead starts the node, sends a search and stops it, N times, and counts leftovers. Without `[model]` in
the TOML file a round is cheapest. Writes faults-rounds.json and faults-rounds.md.

`--kills N` (without a TOML file: the benchmark has its own node) kills N workers of all roles under a load with known
answers, and counts lost and wrong answers: see `benchmarks/faults/kills.py`. Writes faults-kills.json and
faults-kills.md.
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine_load
from benchmarks.common.report import table, write
from benchmarks.faults import kills
from launchers.http_client import post
from runtime.errors import TrinityError
from runtime.node.config import NodeConfig
from runtime.node.config_file import load_config
from runtime.node.supervisor.admin import restart_node
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.background import Background
from runtime.testing.node import Node, leftovers, running, token_of

BAR_S = 2.0
STANDBY_BAR_S = 1.0


def bodies(config: NodeConfig) -> dict[str, Any]:
    """Return a request for every path that the node serves."""
    collection = config.collections[0].name
    found: dict[str, Any] = {"/v1/retrieval": {"query": "the with statement", "collection": collection, "k": 3}}
    if config.model is not None:
        found["/v1/completions"] = {
            "model": ModelInfo.read(config.model.name).name, "prompt": "how does a with statement work?",
            "max_tokens": 16, "ignore_eos": True, "retrieval": {"collection": collection, "k": 2, "every_tokens": 8},
        }  # fmt: skip
    return found


@contextmanager
def load(node: Node, config: NodeConfig) -> Iterator[Counter[str]]:
    """Send requests of each kind sequentially in the background; yields the counts by outcome."""
    ends, url = Counter[str](), node.info.url

    def ask(path: str, body: dict[str, Any]) -> None:
        while not asking.ended.wait(0.02):
            try:
                post(url, path, body, timeout_s=60)
                ends["ok"] += 1
            except TrinityError as error:
                ends[error.code] += 1

    asking = Background(partial(ask, *item) for item in bodies(config).items())
    with asking:
        yield ends


def spares_ready(node: Node) -> None:
    """Wait until every standby worker is loaded."""
    node.wait(lambda: all(spare.phase == "standby" for spare in node.status().spares))


def killed(node: Node, worker: str) -> dict[str, Any]:
    """Kill a worker with SIGKILL. Returns the seconds until its new process has started, is ready, and the node is
    ready; and whether a standby worker replaced it."""
    spares_ready(node)
    spares = {spare.pid for spare in node.status().spares}
    before = next(found for found in node.status().workers if found.name == worker)

    def now() -> Any:
        return next(found for found in node.status().workers if found.name == worker)

    begin = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    node.wait(lambda: now().epoch > before.epoch)
    started = time.monotonic() - begin
    node.wait(lambda: now().epoch > before.epoch and now().phase == "ready")
    ready = time.monotonic() - begin
    standby = now().pid in spares
    node.wait(node.ready)
    return {"started_s": started, "ready_s": ready, "node_s": time.monotonic() - begin, "standby": standby}


def killed_under_load(node: Node, config: NodeConfig, worker: str) -> dict[str, Any]:
    """Return the times of `killed` under load, and the outcomes of the requests."""
    with load(node, config) as ends:
        node.wait(lambda: ends["ok"] >= 4)
        times = killed(node, worker)
        enough = ends["ok"] + 4
        node.wait(lambda: ends["ok"] >= enough)
    return times | {"ends": dict(ends)}


def rolled(node: Node, worker: str) -> float:
    """Return the seconds of an orderly restart of an idle worker, which are its load time."""
    spares_ready(node)
    begin = time.monotonic()
    restart_node(node.info, worker, 600.0)
    return time.monotonic() - begin


def deaths(path: Path) -> dict[str, Any]:
    """Kill every worker of the node in turn, under load, and then the supervisor."""
    config, workers = load_config(path), dict[str, dict[str, Any]]()
    with running(path, "--quiet") as node:
        for worker in [found.name for found in node.status().workers]:
            orderly_s = rolled(node, worker)
            workers[worker] = killed_under_load(node, config, worker) | {"orderly_s": orderly_s}
            print(worker, workers[worker], flush=True)
    return {"workers": workers, "supervisor": supervisor_killed(path)}


def supervisor_killed(config: Path) -> dict[str, Any]:
    """Kill the supervisor. Returns the seconds until no process of the node is left, and leftovers."""
    with running(config, "--quiet") as node:
        pids = node.pids().values()
        token = token_of(node.info)
        begin = time.monotonic()
        node.process.kill()
        node.process.wait(timeout=30)
        while leftovers(token, pids) and time.monotonic() - begin < 30:
            time.sleep(0.005)
        return {"gone_s": time.monotonic() - begin, "left": leftovers(token, pids)}


def rounds(config: Path, count: int) -> dict[str, Any]:
    """Start the node, query it once and stop it, repeatedly. Returns responses, exit codes and leftovers."""
    left: list[str] = []
    codes, answers = Counter[str](), Counter[str]()
    times = []
    run_dir = Node.run_dir_of(config)
    body = bodies(load_config(config))["/v1/retrieval"]
    for number in range(1, count + 1):
        begin = time.monotonic()
        try:
            node = Node(config, "--quiet", look_s=0.1)  # frequent polling slows the start down
        except RuntimeError as error:
            codes["did not start"] += 1
            print(error, flush=True)
            continue
        pids = node.pids().values()
        token = token_of(node.info)
        try:
            post(node.info.url, "/v1/retrieval", body, timeout_s=60)
            answers["ok"] += 1
        except TrinityError as error:
            answers[error.code] += 1
        codes[str(node.stop())] += 1
        left += leftovers(token, pids, run_dir)
        times.append(time.monotonic() - begin)
        if number % 10 == 0:
            print(f"{number} of {count}: {dict(codes)}, {dict(answers)}, {len(left)} leftovers", flush=True)
    return {
        "rounds": count, "answers": dict(answers), "exit_codes": dict(codes), "left": left,
        "median_s": statistics.median(times or [0.0]), "slowest_s": max(times, default=0.0),
        "model": load_config(config).model is not None,
    }  # fmt: skip


def report(found: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [
        "# Faults under load", "", f"`{found['command']}`",
        f"Machine: {found['load_before']} before, {found['load_after']} after: shared with other processes.", "",
        "kill -9 of each worker in turn, under load; seconds after it:", "",
    ]  # fmt: skip
    head = ("killed", "standby worker", "new process", "ready", "whole node", "orderly restart", "over it", "bar")
    rows = []
    for worker, one in found["workers"].items():
        over, standby = one["ready_s"] - one["orderly_s"], one["standby"]
        if standby:
            met = one["ready_s"] <= STANDBY_BAR_S
        else:
            met = (one["ready_s"] if worker.startswith("pool") else over) <= BAR_S
        ends = ", ".join(f"{name} {count}" for name, count in sorted(one["ends"].items()))
        times = [f"{one[name]:.2f}" for name in ("started_s", "ready_s", "node_s", "orderly_s")]
        rows.append([worker, "yes" if standby else "no", *times, f"{over:+.2f}", "met" if met else "missed", ends])
    lines += [
        *table((*head, "how requests ended"), rows),
        "", "Bars: ready within 1 s if replaced by a standby worker (`spares`), within 2 s for a pool worker, for "
        "others within 2 s beyond an orderly restart, which is their load time.", "",
        f"kill -9 of the supervisor: all processes gone after {found['supervisor']['gone_s']:.2f} s, "
        f"leftovers: {', '.join(found['supervisor']['left']) or 'nothing'}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def report_rounds(found: dict[str, Any]) -> str:
    """Return the report of the rounds as Markdown."""
    one = found["rounds"]
    lines = [
        "# Starts and stops", "", f"`{found['command']}`",
        f"Machine: {found['load_before']} before, {found['load_after']} after: shared with other processes.", "",
        f"A node {'with' if one['model'] else 'without'} a model, started, queried once and stopped "
        f"{one['rounds']} times; a round took {one['median_s']:.1f} s (median), {one['slowest_s']:.1f} s at most.", "",
        *table(
            ("answers", "exit codes", "leftovers: processes, sockets, run directories"),
            [(_format_counts(one["answers"]), _format_counts(one["exit_codes"]), ", ".join(one["left"]) or "nothing")],
        ),
    ]  # fmt: skip
    return "\n".join(lines)


def _format_counts(ends: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(ends.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="the node; not with --kills")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=0, help="start and stop the node so many times instead")
    parser.add_argument("--kills", type=int, default=0, help="kill so many workers under a load with known answers")
    parser.add_argument("--seed", type=int, default=1, help="of --kills")
    options = parser.parse_args()
    if (options.config is None) == (options.kills == 0):
        parser.error("give either --config or --kills")
    command = "python -m benchmarks.faults"
    found: dict[str, Any] = {"command": f"{command} --config node.toml", "load_before": machine_load()}
    if options.kills:
        found["command"] = f"{command} --kills {options.kills} --seed {options.seed}"
        with tempfile.TemporaryDirectory(prefix="trinity-kills-") as home:
            found["kills"] = kills.kills(Path(home), options.kills, options.seed)
        name, text, left = "faults-kills", kills.report, kills.failures(found["kills"])
    elif options.rounds:
        found["command"] += f" --rounds {options.rounds}"
        found["rounds"] = rounds(options.config, options.rounds)
        name, text, left = "faults-rounds", report_rounds, found["rounds"]["left"]
    else:
        found |= deaths(options.config)
        config = load_config(options.config)
        name = "faults-spares" if config.prefill.spares or config.decode.spares else "faults"
        text, left = report, found["supervisor"]["left"]
    found["load_after"] = machine_load()
    write(found, text(found), options.out / name)
    return 1 if left else 0
