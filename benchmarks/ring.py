"""Rings against ZeroMQ: round trips of 1.5 KB between two processes, busy and idle, and one-way vectors per second.

    python -m benchmarks.ring [--rounds 7] [--out benchmarks/results/ring-host]

Every way runs in the same process pair pattern (a parent that asks, a child that answers), the ways in turn in every
round, so that the machine's mood hits all alike; the table shows each way's median over rounds, and ratios are taken
within rounds. Busy: the next request follows at once. Idle: both sides have been asleep for a few ms.
Parent and child are pinned to a core each (with their ZeroMQ threads), where there are two.

- ring: `RingProducer`/`RingConsumer`, 1,536 bytes each way, spin with yield, eventfd when asleep;
- session: `RingClient.submit` → `RingServer.receive` → `publish` → `poll`, 384 floats out, 10 ids and distances back;
- pyzmq: PUSH/PULL over ipc, 1,536 bytes each way.

Vectors/s: 1,536 bytes one way, written and read one by one (for `session`: searches answered per second, both ways,
with up to 200 outstanding, so its ratio is a lower bound).
"""

import argparse
import json
import multiprocessing
import multiprocessing.forkserver
import os
import platform
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from ipc import (
    RingClient,
    RingConsumer,
    RingLayout,
    RingProducer,
    RingServer,
    SharedMemory,
    bind,
    connect,
    format_ring,
    new_token,
    private_endpoint,
)
from ipc.doorbell import EventfdBell, FdMailbox, send_fds
from ipc.memory import MemoryReference
from ipc.ring import Watch
from ipc.spin import SpinBudget

DIM = 384
BYTES = 4 * DIM
SPIN_NS = 200_000
LAYOUT = RingLayout(256, BYTES)
EPOCH = 1
K = 10
MESSAGE, LAST = bytes(BYTES), b"\1" * BYTES

Nanoseconds = list[int]
_context = multiprocessing.get_context("forkserver")


# ---- ring


class RingEnd:
    """One process's ends of a pair of rings, with its doorbells."""

    def __init__(self, sender: memoryview, receiver: memoryview, sleeper: EventfdBell, ringer: EventfdBell) -> None:
        self.producer = RingProducer(sender, LAYOUT, EPOCH)
        self.consumer = RingConsumer(receiver, LAYOUT, EPOCH)
        self.watch = Watch([self.consumer])
        self.outgoing = [memoryview(row) for row in self.producer.payload(np.uint8, 0, BYTES)]
        self.incoming = [memoryview(row) for row in self.consumer.payload(np.uint8, 0, BYTES)]
        self.sleeper, self.ringer = sleeper, ringer
        self.spin = SpinBudget(SPIN_NS)
        self.poller = select.poll()
        self.poller.register(sleeper.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        producer = self.producer
        self.outgoing[producer.loan()][:] = message
        if producer.send():
            self.ringer.ring()

    def receive(self) -> bytes:
        consumer = self.consumer
        if self.watch.spin(self.spin.ns) < 0:
            self.sleep()
        message = self.incoming[consumer.first].tobytes()
        consumer.release(1)
        return message

    def sleep(self) -> None:
        begin = time.monotonic_ns() - self.spin.ns
        while self.watch.look(0) < 0:
            if self.watch.arm():
                self.poller.poll(100)
            self.watch.disarm()
            self.sleeper.silence()
        self.spin.learn(time.monotonic_ns() - begin)


def _ring_child(reference: MemoryReference, mailbox: str, one_way: int) -> None:
    _pin(1)
    bells = EventfdBell(), EventfdBell()
    send_fds(mailbox, b"bells", [bell.fileno() for bell in bells])
    with SharedMemory.open(reference, max_size=1 << 24, writable=True) as memory:
        end = RingEnd(memory.view[LAYOUT.size :], memory.view[: LAYOUT.size], *bells)
        if one_way:
            _ring_sink(end, one_way)
            return
        while True:
            message = end.receive()
            end.send(message)
            if message == LAST:
                return


def _ring_sink(end: RingEnd, count: int) -> None:
    """Take `count` vectors as they come, in runs, then answer once."""
    whole = end.consumer.payload(np.float32, 0, DIM)
    while count:
        ready = end.consumer.ready(LAYOUT.slots)
        if ready == 0:
            if end.watch.spin(end.spin.ns) < 0:
                end.sleep()
            continue
        first = end.consumer.first
        whole[first : first + ready].copy()
        end.consumer.release(ready)
        count -= ready
    end.send(LAST)


@contextmanager
def _ring_pair(one_way: int = 0) -> Iterator[RingEnd]:
    with SharedMemory.create("trinity-bench", 2 * LAYOUT.size) as memory:
        for view in (memory.view[: LAYOUT.size], memory.view[LAYOUT.size :]):
            format_ring(view, LAYOUT, EPOCH)
        mailbox = FdMailbox()
        child = _context.Process(target=_ring_child, args=(memory.reference, mailbox.name, one_way), daemon=True)
        child.start()
        ringer, sleeper = (EventfdBell(fd) for fd in mailbox.take(b"bells", 2, 20_000))
        mailbox.close()
        yield RingEnd(memory.view[: LAYOUT.size], memory.view[LAYOUT.size :], sleeper, ringer)
        _join(child)
        ringer.close()
        sleeper.close()


def ring_round_trips(busy: int, idle: int) -> tuple[Nanoseconds, Nanoseconds]:
    with _ring_pair() as end:

        def trip() -> None:
            end.send(MESSAGE)
            end.receive()

        times = _busy(trip, busy), _idle(trip, idle)
        end.send(LAST)
        end.receive()
    return times


def ring_one_way(count: int) -> float:
    """Vectors per second, written one by one, sent and taken in runs of what there is."""
    with _ring_pair(count) as end:
        producer = end.producer
        outgoing = end.outgoing
        begin = time.perf_counter_ns()
        left = count
        while left:
            run = min(producer.free(), left, 32)
            if run == 0:
                os.sched_yield()
                continue
            first = producer.position
            for position in range(first, first + run):
                outgoing[position % LAYOUT.slots][:] = MESSAGE
            if producer.send(run):
                end.ringer.ring()
            left -= run
        end.receive()
        return count / (time.perf_counter_ns() - begin) * 1e9


# ---- session


def _session_child(endpoint: str) -> None:
    _pin(1)
    ids, distances = np.arange(K), np.linspace(0, 1, K, dtype=np.float32)
    with RingServer(endpoint, {"docs": DIM}, epoch=EPOCH, spin_us=SPIN_NS / 1e3) as server:
        while True:
            server.wait(1000)
            for request in server.receive():
                server.publish(request.client, request.request_id, "ok", ids, distances)
            if server.statistics().lost:
                return


@contextmanager
def _session_pair() -> Iterator[RingClient]:
    endpoint = private_endpoint(new_token(), "bench")
    child = _context.Process(target=_session_child, args=(endpoint,), daemon=True)
    child.start()
    with RingClient(endpoint, "bench", timeout_ms=20_000, spin_us=SPIN_NS / 1e3) as client:
        yield client
    _join(child)


def session_round_trips(busy: int, idle: int) -> tuple[Nanoseconds, Nanoseconds]:
    vector = np.ones(DIM, np.float32)
    with _session_pair() as client:

        def trip() -> None:
            client.submit(vector, collection="docs", stage="prefill", k=K)
            while not (client.wait(1000) and client.poll()):
                pass

        return _busy(trip, busy), _idle(trip, idle)


def session_searches_per_second(count: int) -> float:
    """Requests answered per second with many outstanding: both ways of the session, one client."""
    vector = np.ones(DIM, np.float32)
    with _session_pair() as client:
        begin = time.perf_counter_ns()
        submitted = answered = 0
        while answered < count:
            while submitted < count and client.outstanding < 200:
                client.submit(vector, collection="docs", stage="prefill", k=K)
                submitted += 1
            found = len(client.poll())
            answered += found
            if not found:
                client.wait(1000)
        return count / (time.perf_counter_ns() - begin) * 1e9


# ---- pyzmq


def _zmq_child(there: str, back: str, one_way: int) -> None:
    _pin(1)
    incoming = bind(zmq.PULL, there, max_message_bytes=1 << 16)
    outgoing = connect(zmq.PUSH, back, max_message_bytes=1 << 16)
    outgoing.send(b"ready")
    if one_way:
        for _ in range(one_way):
            incoming.recv()
        outgoing.send(b"done")
    else:
        while (message := incoming.recv()) != LAST:
            outgoing.send(message)
    outgoing.send(LAST)
    incoming.recv()  # the parent has heard it
    incoming.close()
    outgoing.close()


@contextmanager
def _zmq_pair(one_way: int = 0) -> Iterator[tuple[Any, Any]]:
    there, back = private_endpoint(new_token(), "there"), private_endpoint(new_token(), "back")
    incoming = bind(zmq.PULL, back, max_message_bytes=1 << 16)
    child = _context.Process(target=_zmq_child, args=(there, back, one_way), daemon=True)
    child.start()
    outgoing = connect(zmq.PUSH, there, max_message_bytes=1 << 16)
    incoming.recv()
    yield incoming, outgoing
    if not one_way:
        outgoing.send(LAST)
    while incoming.recv() != LAST:
        pass
    outgoing.send(b"bye")
    _join(child)
    incoming.close()
    outgoing.close()


def zmq_round_trips(busy: int, idle: int) -> tuple[Nanoseconds, Nanoseconds]:
    with _zmq_pair() as (incoming, outgoing):

        def trip() -> None:
            outgoing.send(MESSAGE)
            incoming.recv()

        return _busy(trip, busy), _idle(trip, idle)


def zmq_one_way(count: int) -> float:
    with _zmq_pair(count) as (incoming, outgoing):
        begin = time.perf_counter_ns()
        for _ in range(count):
            outgoing.send(MESSAGE)
        incoming.recv()
        return count / (time.perf_counter_ns() - begin) * 1e9


# ---- measuring


def _pin(which: int) -> None:
    """Keep this process, and the threads it will start, on the first or second core that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > which:
        os.sched_setaffinity(0, {cores[which]})


def _busy(trip: Callable[[], None], count: int) -> Nanoseconds:
    for _ in range(200):
        trip()
    return [_timed(trip) for _ in range(count)]


def _idle(trip: Callable[[], None], count: int) -> Nanoseconds:
    times = []
    for _ in range(count):
        time.sleep(0.003)
        times.append(_timed(trip))
    return times


def _timed(trip: Callable[[], None]) -> int:
    begin = time.perf_counter_ns()
    trip()
    return time.perf_counter_ns() - begin


def _join(child: Any) -> None:
    child.join(20)
    if child.is_alive():
        child.kill()
        child.join()
    child.close()


ROUND_TRIPS = {"ring": ring_round_trips, "session": session_round_trips, "pyzmq": zmq_round_trips}
ONE_WAY = {"ring": ring_one_way, "session": session_searches_per_second, "pyzmq": zmq_one_way}


def measure(rounds: int, busy: int, idle: int, one_way: int) -> dict[str, Any]:
    """Percentiles in µs and vectors/s of every way in every round."""
    found: list[dict[str, dict[str, float]]] = []
    for _ in range(rounds):
        this: dict[str, dict[str, float]] = {}
        for name, trips in ROUND_TRIPS.items():
            busy_ns, idle_ns = trips(busy, idle)
            this[name] = {
                f"{mood}_p{q}_us": float(np.percentile(times, q)) / 1e3
                for mood, times in (("busy", busy_ns), ("idle", idle_ns))
                for q in (50, 99)
            }
            this[name]["vectors_per_s"] = ONE_WAY[name](one_way)
        found.append(this)
    columns = list(found[0]["ring"])
    medians = {
        name: {column: float(np.median([this[name][column] for this in found])) for column in columns}
        for name in ROUND_TRIPS
    }
    ratios = {
        name: {column: float(np.median([_times_better(this, name, column) for this in found])) for column in columns}
        for name in ("ring", "session")
    }
    quietest = {
        name: {column: _best(column)(this[name][column] for this in found) for column in columns}
        for name in ROUND_TRIPS
    }
    return {"medians": medians, "ratios": ratios, "quietest": quietest, "rounds": found}


def _times_better(this: dict[str, dict[str, float]], name: str, column: str) -> float:
    ours, theirs = this[name][column], this["pyzmq"][column]
    return ours / theirs if column == "vectors_per_s" else theirs / ours


def _best(column: str) -> Callable[[Iterator[float]], float]:
    return max if column == "vectors_per_s" else min


def table(report: dict[str, Any]) -> str:
    lines = [
        "| way | busy p50/p99 µs | idle p50/p99 µs | vectors/s | × busy p50 | × idle p50 | × vectors/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["medians"].items():
        ratio = report["ratios"].get(name)
        better = [f"{ratio[c]:.1f}" for c in ("busy_p50_us", "idle_p50_us", "vectors_per_s")] if ratio else ["1"] * 3
        lines.append(
            f"| {name} | {row['busy_p50_us']:.1f}/{row['busy_p99_us']:.0f} | "
            f"{row['idle_p50_us']:.0f}/{row['idle_p99_us']:.0f} | {row['vectors_per_s']:,.0f} | {' | '.join(better)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", type=int, default=10_000, help="round trips a round")
    parser.add_argument("--idle", type=int, default=200, help="round trips a round, 3 ms apart")
    parser.add_argument("--one-way", type=int, default=100_000, help="vectors a round")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ring-host"))
    arguments = parser.parse_args()
    _context.set_forkserver_preload(["ipc"])
    multiprocessing.forkserver.ensure_running()  # before pinning: children choose their own core
    _pin(0)
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "versions": {"python": platform.python_version(), "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()},
        "load_average_before": os.getloadavg()[0],
        "nice": os.nice(0),
        "bytes_each_way": BYTES,
        **measure(arguments.rounds, arguments.busy, arguments.idle, arguments.one_way),
    }
    text = table(report)
    print(text)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(
        f"{text}\n\n{report['machine']}, load average {report['load_average_before']:.1f} at the beginning; Python "
        f"{report['versions']['python']}, pyzmq {zmq.__version__}; medians of {arguments.rounds} rounds; × against "
        f"pyzmq, within rounds. `python -m benchmarks.ring`\n"
    )


if __name__ == "__main__":
    main()
