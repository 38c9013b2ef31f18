"""Soak test: a node under mixed load for an hour; measures leaks and errors.

`python -m benchmarks.soak --config node.toml` starts the node, sends generations with retrieval (streamed, whole, and
with disconnecting clients) and searches, with seeded Poisson arrivals, and samples memory, file descriptors and threads
of every process. `--quick` takes five minutes. Writes `soak.json`, `soak.md` and `soak.png`. The first fifth of the
time is warm-up; slopes are fitted to the rest. Errors must be 0.
"""

import argparse
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common.machine import machine_load
from benchmarks.common.report import plot, table, write
from launchers.http_client import post, stream
from runtime.errors import TrinityError
from runtime.node.config import NodeConfig
from runtime.node.config_file import load_config
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.node import Node, running

SAMPLE_S = 5.0
WARM_UP = 0.2
MAX_IN_FLIGHT = 64
QUANTITIES = {"memory": "MiB", "fds": "", "threads": ""}
KINDS = (("stream", 0.35), ("whole", 0.2), ("gone", 0.05), ("search", 0.4))  # shares of the arrivals


class Load:
    """Sends requests of all kinds; `ends` counts their outcomes."""

    def __init__(self, url: str, config: NodeConfig, seed: int) -> None:
        self._url, self._random = url, random.Random(seed)
        self._model = ModelInfo.read(config.model.name).name if config.model else ""
        self._collection = config.collections[0].name
        self.ends: Counter[str] = Counter()
        self._lock = threading.Lock()

    def next(self) -> tuple[str, dict[str, Any]]:
        """Return kind and body of the next request."""
        choose = self._random
        kind = choose.choices([name for name, _ in KINDS], [share for _, share in KINDS])[0]
        question = f"question {choose.randrange(10_000)}: how does a with statement call __exit__?"
        if kind == "search":
            return kind, {"query": question, "collection": self._collection, "k": choose.randint(1, 8)}
        retrieval = {"collection": self._collection, "k": 2, "every_tokens": choose.choice([0, 8, 16])}
        tokens = choose.randint(8, 48)
        return kind, {
            "model": self._model, "prompt": question, "max_tokens": tokens, "ignore_eos": True, "retrieval": retrieval,
        }  # fmt: skip

    def send(self, kind: str, body: dict[str, Any]) -> None:
        try:
            if kind == "search":
                post(self._url, "/v1/retrieval", body, timeout_s=120)
            elif kind == "whole":
                post(self._url, "/v1/completions", body, timeout_s=120)
            else:
                events = stream(self._url, "/v1/completions", body, timeout_s=120)
                for _ in events:
                    if kind == "gone":
                        break
            end = "ok"
        except TrinityError as error:
            end = error.code
        except Exception as error:
            end = type(error).__name__
        with self._lock:
            self.ends[f"{kind} {end}"] += 1


def sample(node: Node) -> dict[str, dict[str, float]]:
    """Return memory, file descriptors and threads of every process of the node, by name."""
    usage = {}
    for name, pid in node.pids().items():
        process = psutil.Process(pid)
        with process.oneshot():
            memory = process.memory_info().rss / 2**20
            usage[name] = {"memory": memory, "fds": process.num_fds(), "threads": process.num_threads()}
    return usage


def run(node: Node, load: Load, seconds: float, rate: float, seed: int) -> list[tuple[float, Any]]:
    """Apply load for so many seconds; returns the samples with their times."""
    arrivals, samples = random.Random(seed + 1), []
    slots = threading.Semaphore(MAX_IN_FLIGHT)
    begin = time.monotonic()
    due, sampled = begin, begin
    with ThreadPoolExecutor(MAX_IN_FLIGHT) as threads:
        while (now := time.monotonic()) < begin + seconds:
            if now >= sampled:
                samples.append((now - begin, sample(node)))
                sampled += SAMPLE_S
            if now >= due:
                due += arrivals.expovariate(rate)
                if not slots.acquire(blocking=False):
                    load.ends["not sent: too many in flight"] += 1
                    continue
                kind, body = load.next()
                threads.submit(load.send, kind, body).add_done_callback(lambda _: slots.release())
            time.sleep(max(0.0, min(due, sampled, begin + seconds) - time.monotonic()))
    samples.append((time.monotonic() - begin, sample(node)))
    return samples


def slopes(samples: list[tuple[float, Any]], quantity: str) -> dict[str, dict[str, float]]:
    """Return by process the first and last value after the warm-up, and the slope of a fitted line per hour."""
    after = [(at, usage) for at, usage in samples if at >= WARM_UP * samples[-1][0]]
    times = np.array([at for at, _ in after])
    result = {}
    for name in after[0][1]:
        values = np.array([usage[name][quantity] for _, usage in after])
        slope = float(np.polyfit(times, values, 1)[0])
        result[name] = {"first": float(values[0]), "last": float(values[-1]), "per_hour": slope * 3600}
    return result


def draw(samples: list[tuple[float, Any]], path: Path) -> None:
    with plot(path, len(QUANTITIES)) as axes:
        for axis, (quantity, unit) in zip(axes, QUANTITIES.items(), strict=True):
            for name in samples[0][1]:
                axis.plot([at / 60 for at, _ in samples], [usage[name][quantity] for _, usage in samples], label=name)
            axis.set(title=quantity, xlabel="minutes", ylabel=unit, ylim=(0, None))
        axes[0].legend(fontsize=7)


def report(results: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [
        f"# Soak: {results['seconds'] / 60:.0f} minutes of mixed load",
        "",
        f"`{results['command']}`, seed {results['seed']}, {results['rate']:g} arrivals a second (Poisson).",
        f"Machine: {results['load_before']} before, {results['load_after']} after: shared with other processes.",
        "",
        f"**{results['requests']} requests, {results['errors']} errors, {results['restarts']} restarts.** "
        "By kind and end: " + ", ".join(f"{name} {count}" for name, count in sorted(results["ends"].items())) + ".",
        "",
        "First and last value after the warm-up (a fifth of the time), and the slope of a fitted line, an hour:",
        "",
    ]
    rows = []
    for name in results["slopes"]["memory"]:
        cells = []
        for quantity in QUANTITIES:
            one = results["slopes"][quantity][name]
            cells += [f"{one['first']:.0f} → {one['last']:.0f}", f"{one['per_hour']:+.1f}"]
        rows.append([name, *cells])
    lines += table(("process", "memory MiB", "a h", "fds", "a h", "threads", "a h"), rows)
    if results["seconds"] < 3600:
        lines += ["", "Slopes of such a short run are rough: detecting a slow leak takes an hour's run."]
    return "\n".join([*lines, "", "![plot](soak.png)"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a node with a model and a collection")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="five minutes")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals a second")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seconds = options.seconds or (300.0 if options.quick else 3600.0)
    config = load_config(options.config)
    before = machine_load()
    with running(options.config, "--quiet") as node:
        load = Load(node.info.url, config, options.seed)
        samples = run(node, load, seconds, options.rate, options.seed)
        restarts = sum(worker.restarts for worker in node.status().workers)
    errors = sum(count for name, count in load.ends.items() if not name.endswith(" ok"))
    results = {
        "command": "python -m benchmarks.soak --config node.toml" + (" --quick" if options.quick else ""),
        "seconds": seconds, "rate": options.rate, "seed": options.seed, "load_before": before,
        "load_after": machine_load(), "requests": sum(load.ends.values()), "errors": errors, "restarts": restarts,
        "ends": dict(load.ends), "slopes": {quantity: slopes(samples, quantity) for quantity in QUANTITIES},
        "samples": [[round(at, 1), processes] for at, processes in samples],
    }  # fmt: skip
    write(results, report(results), options.out / "soak")
    draw(samples, options.out / "soak.png")
    return 1 if errors or restarts else 0


if __name__ == "__main__":
    sys.exit(main())
