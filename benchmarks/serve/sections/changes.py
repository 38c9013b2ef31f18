"""Workers added, flipped, drained and killed under load: lost requests, and time to the first answer of a new role."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Outcome, open_loop
from benchmarks.serve.report import Measure, Section
from launchers.http_client import get_json
from runtime.errors import Unavailable
from runtime.node.run_dir import NodeInfo, find_node
from runtime.node.supervisor.admin import node_status, scale_workers
from runtime.serving.frontend.observability import Trace

_ANSWER_S = 2.0
_WAIT_S = 120.0
_RATE = 3.0  # requests/s
_MOST_S = 160.0  # of load; the node keeps the traces of 512 requests
_AFTER_S = 3.0  # of load after each change: the next one starts a process, which occupies a core for a while


def run(bench: Bench) -> Section:
    """Apply the changes to a supervised node with requests at a constant rate."""
    section = Section(
        "changes",
        "A node under load while a worker is added, flipped, drained, and its only decode worker killed with SIGKILL. "
        "Lost requests were accepted and ended with an error, or not at all; refused ones got an immediate error "
        "because no decode worker was ready, until the killed one was back. The first answer is that of the first "
        "request that the new worker prefilled or decoded, measured from its readiness.",
    )
    config, run_dir = _config(bench)
    with _node(config, run_dir) as info:
        seconds = bench.seconds(45.0)
        found: list[Outcome] = []
        timed = bench.load(_RATE, max(seconds, _MOST_S), bench.seed)
        over = threading.Event()
        sending = threading.Thread(target=lambda: found.extend(open_loop(info.url, timed, stop=over.is_set)))
        sending.start()
        time.sleep(2.0)
        steps: tuple[tuple[str, Callable[[], tuple[str, ...]]], ...] = (
            ("add", lambda: scale_workers(info, "add", "prefill", _WAIT_S)),
            ("flip", lambda: scale_workers(info, "flip", "prefill-0", _WAIT_S)),
            ("drain", lambda: scale_workers(info, "drain", "decode-0", _WAIT_S)),
            ("kill", lambda: (_kill(info, "decode"),)),
        )
        begin = time.monotonic()
        with _watched(info) as ready:
            try:
                for name, change in steps:
                    section.details[name] = f"{', '.join(change())} after {time.monotonic() - begin:.1f} s"
                    time.sleep(_AFTER_S)
                time.sleep(max(0.0, begin + seconds - time.monotonic()))
            finally:
                over.set()
                sending.join()
        first = _first_answers(info, found, ready)
    refused = [outcome for outcome in found if outcome.code == "unavailable" and not outcome.id]
    lost = [outcome.code for outcome in found if not outcome.completed and outcome not in refused]
    section.measures = [
        Measure("requests sent", len(found)),
        Measure("requests refused without a decode worker", len(refused)),
        Measure("requests lost", len(lost), "", "≤", 0),
        Measure(
            "first answer from a new worker, the slowest", max(first.values(), default=math.inf), "s", "≤", _ANSWER_S
        ),
    ]
    section.details |= {"lost": lost, "first_answers_s": first}
    return section


def _config(bench: Bench) -> tuple[Path, Path]:
    run_dir, path = bench.folder / "run", bench.folder / "node.toml"
    path.write_text(
        f'[node]\nname = "bench"\nrun_dir = "{run_dir}"\n[http]\nport = 0\n'
        f'[model]\nname = "{bench.model}"\ncontext_tokens = {bench.parts.context_tokens}\n'
        f'[[collections]]\nname = "docs"\npath = "{bench.parts.collection}"\n'
    )
    return path, run_dir


@contextmanager
def _node(config: Path, run_dir: Path) -> Iterator[NodeInfo]:
    with config.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-m", "launchers.main", "serve", "--config", str(config)]
        command += ["--with-parent", str(os.getpid())]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield _ready(process, run_dir)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=30)


def _ready(process: "subprocess.Popen[bytes]", run_dir: Path) -> NodeInfo:
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            info = find_node(run_dir)
            if node_status(info).ready:
                return info
        except Unavailable:
            pass
        time.sleep(0.1)
    raise SystemExit("the node did not become ready")


@contextmanager
def _watched(info: NodeInfo) -> Iterator[dict[str, float]]:
    """Yield worker name → time of readiness, of new workers."""
    before = {(worker.name, worker.epoch) for worker in node_status(info).workers}
    ready: dict[str, float] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            for worker in node_status(info).workers:
                if worker.phase == "ready" and (worker.name, worker.epoch) not in before:
                    ready.setdefault(worker.name, time.monotonic())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield ready
    finally:
        ended.set()
        watching.join()


def _first_answers(info: NodeInfo, found: Sequence[Outcome], ready: dict[str, float]) -> dict[str, float]:
    """Return the time from each new worker's readiness to the first token of its first request; 0 if the token was
    earlier than the status, polled every 50 ms."""
    first: dict[str, float] = {}
    for outcome in sorted((o for o in found if o.completed), key=lambda outcome: outcome.sent_s):
        trace = msgspec.json.decode(get_json(info.url, f"/v1/traces/{outcome.id}"), type=Trace)
        for name in {trace.prefill_worker, trace.decode_worker} & (ready.keys() - first.keys()):
            if trace.first_token_s is not None:
                first[name] = max(0.0, outcome.sent_s + trace.first_token_s - ready[name])
    return first


def _kill(info: NodeInfo, role: str) -> str:
    """Kill the only worker of a role; return its name when it is ready again."""
    victim = next(worker for worker in node_status(info).workers if worker.name.startswith(role))
    os.kill(victim.pid, signal.SIGKILL)
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        now = {worker.name: worker for worker in node_status(info).workers}
        if now[victim.name].phase == "ready" and now[victim.name].epoch > victim.epoch:
            return victim.name
        time.sleep(0.05)
    raise SystemExit(f"{victim.name} did not come back")
