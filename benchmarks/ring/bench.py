"""Rings against ZeroMQ: round trips of 1.5 KB between two processes, busy and idle, and one-way vectors per second.

    python -m benchmarks.ring [--rounds 7] [--out benchmarks/results/ring-host]

Every transport runs between a parent that sends requests and a child that answers. The transports alternate in every
round, so that the machine's noise affects all alike; the table shows each transport's median over rounds, and ratios
are taken within rounds. Busy: the next request follows immediately. Idle: both sides have slept for a few ms. Parent
and child are pinned to one core each (with their ZeroMQ threads), if there are two.

- ring: `RingProducer`/`RingConsumer`, 1,536 bytes each way, spin with yield, eventfd when asleep;
- pyzmq: PUSH/PULL over ipc, 1,536 bytes each way.

Vectors/s: 1,536 bytes one way, written and read one by one.
"""

import argparse
import multiprocessing.forkserver
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.common.machine import machine
from benchmarks.common.report import table, write
from benchmarks.ring.transports import (
    BYTES,
    context,
    pin,
    ring_one_way,
    ring_round_trips,
    zmq_one_way,
    zmq_round_trips,
)

ROUND_TRIPS = {"ring": ring_round_trips, "pyzmq": zmq_round_trips}
ONE_WAY = {"ring": ring_one_way, "pyzmq": zmq_one_way}


def measure(rounds: int, busy: int, idle: int, one_way: int) -> dict[str, Any]:
    """Measure percentiles in µs and vectors/s of every transport in every round."""
    results: list[dict[str, dict[str, float]]] = []
    for _ in range(rounds):
        this: dict[str, dict[str, float]] = {}
        for name, trips in ROUND_TRIPS.items():
            busy_ns, idle_ns = trips(busy, idle)
            this[name] = {
                f"{load}_p{q}_us": float(np.percentile(times, q)) / 1e3
                for load, times in (("busy", busy_ns), ("idle", idle_ns))
                for q in (50, 99)
            }
            this[name]["vectors_per_s"] = ONE_WAY[name](one_way)
        results.append(this)
    columns = list(results[0]["ring"])
    medians = {
        name: {column: float(np.median([this[name][column] for this in results])) for column in columns}
        for name in ROUND_TRIPS
    }
    ratios = {
        "ring": {
            column: float(np.median([_ratio_to_zmq(this, "ring", column) for this in results])) for column in columns
        }
    }
    quietest = {
        name: {column: _best(column)(this[name][column] for this in results) for column in columns}
        for name in ROUND_TRIPS
    }
    return {"medians": medians, "ratios": ratios, "quietest": quietest, "rounds": results}


def _ratio_to_zmq(this: dict[str, dict[str, float]], name: str, column: str) -> float:
    ours, theirs = this[name][column], this["pyzmq"][column]
    return ours / theirs if column == "vectors_per_s" else theirs / ours


def _best(column: str) -> Callable[[Iterator[float]], float]:
    return max if column == "vectors_per_s" else min


def markdown(report: dict[str, Any]) -> str:
    head = ("busy p50/p99 µs", "idle p50/p99 µs", "vectors/s", "× busy p50", "× idle p50", "× vectors/s")
    rows = []
    for name, row in report["medians"].items():
        ratio = report["ratios"].get(name)
        better = [f"{ratio[c]:.1f}" for c in ("busy_p50_us", "idle_p50_us", "vectors_per_s")] if ratio else ["1"] * 3
        busy, idle = (f"{row[f'{load}_p50_us']:.1f}/{row[f'{load}_p99_us']:.0f}" for load in ("busy", "idle"))
        rows.append([name, busy, idle, f"{row['vectors_per_s']:,.0f}", *better])
    host, versions = report["machine"], report["versions"]
    return "\n".join(table(("transport", *head), rows)) + (
        f"\n\n{host['processor']}, {host['cores']} cores, {host['system']}, load average "
        f"{report['load_average_before']:.1f} at start; Python {versions['python']}, pyzmq "
        f"{versions['pyzmq']}; medians of {len(report['rounds'])} rounds; × against pyzmq, within rounds. "
        "`python -m benchmarks.ring`"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", type=int, default=10_000, help="round trips a round")
    parser.add_argument("--idle", type=int, default=200, help="round trips a round, 3 ms apart")
    parser.add_argument("--one-way", type=int, default=100_000, help="vectors a round")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ring-host"))
    arguments = parser.parse_args()
    context.set_forkserver_preload(["ipc"])
    multiprocessing.forkserver.ensure_running()  # before pinning: children select their own core
    pin(0)
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()},
        "load_average_before": os.getloadavg()[0],
        "nice": os.nice(0),
        "bytes_each_way": BYTES,
        **measure(arguments.rounds, arguments.busy, arguments.idle, arguments.one_way),
    }
    write(report, markdown(report), arguments.out)
