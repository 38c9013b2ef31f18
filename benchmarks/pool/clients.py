"""Load generator of the pool benchmark: one process with a ring for each load.

Two processes on one core would alternate every few milliseconds, and send the queries due meanwhile in bursts.
"""

import gc
import os
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc import RingClient, RingFull, SearchSpec, Stage

Vectors = NDArray[np.float32]
QueryClass = tuple[float, int, int, int]  # share of the queries, k, top_m, search_width


class Load(NamedTuple):
    """Load of one client for `seconds`: Poisson arrivals at `rate` per second, or a closed loop of `window` queries."""

    stage: Stage
    seconds: float
    classes: tuple[QueryClass, ...]
    rate: float = 0.0
    window: int = 0
    seed: int = 0


class Outcome(NamedTuple):
    """Results of one load. `answers`: int64 [n, 5] for each query class: times of enqueueing, admission and completion
    (ns), extends, and the time at which the client received the result; completed within `seconds` only.

    `dropped`: queries that did not fit into the ring; `failed`: queries that ended with an error.
    """

    answers: list[NDArray[np.int64]]
    dropped: int
    failed: int
    seconds: float

    def per_second(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    def latencies_us(self, number: int = 0) -> NDArray[np.float64]:
        return (self.answers[number][:, 2] - self.answers[number][:, 0]) / 1e3

    def overhead_us(self) -> float:
        """Median of a query's round trip without the engine's time: rings, doorbells, loop."""
        enqueued, begun, ended, _, received = self.answers[0].T
        return float(np.median((received - enqueued) - (ended - begun))) / 1e3

    def p(self, percent: float, number: int = 0) -> float:
        """Latency percentile in µs."""
        return float(np.percentile(self.latencies_us(number), percent))


class Stream:
    """One load, with its own client."""

    def __init__(self, client: RingClient, queries: Vectors, load: Load, begin_ns: int) -> None:
        self.client, self._queries, self._load = client, queries, load
        random = np.random.default_rng(load.seed)
        self._order = random.permutation(len(queries)).tolist()
        self._classes = random.choice(
            len(load.classes), 1 << 16, p=[query_class[0] for query_class in load.classes]
        ).tolist()
        gaps = random.exponential(1e9 / load.rate, int(load.rate * load.seconds * 1.5) + 100) if load.rate else 0
        self._times = (begin_ns + np.cumsum(gaps)).astype(np.int64).tolist()
        self._end = begin_ns + int(load.seconds * 1e9)
        self._answers: list[list[tuple[int, int, int, int, int]]] = [[] for _ in load.classes]
        self._count = self._dropped = self._failed = 0
        self.outstanding: dict[int, int] = {}

    def submit_due(self, now_ns: int) -> None:
        """Submit the queries due by now, or fill the window."""
        if self._load.window:
            while len(self.outstanding) < self._load.window:
                self._submit()
        else:
            while self._times[self._count] <= now_ns:
                self._submit()

    def _submit(self) -> None:
        number = self._classes[self._count % len(self._classes)]
        _, k, top_m, width = self._load.classes[number]
        self._count += 1
        vector = self._queries[self._order[self._count % len(self._order)]]
        try:
            self.outstanding[self.client.submit(vector, SearchSpec("docs", k, self._load.stage, top_m, width))] = number
        except RingFull:
            self._dropped += 1

    def poll(self) -> bool:
        """Record completed queries. Return whether there were any."""
        results = self.client.poll()
        received_ns = time.monotonic_ns()
        for result in results:
            number = self.outstanding.pop(result.request_id)
            if result.status != "ok":
                self._failed += 1
            elif result.end_ns <= self._end:
                times = (result.enqueue_ns, result.begin_ns, result.end_ns, result.extends, received_ns)
                self._answers[number].append(times)
        return bool(results)

    def due_ms(self, now_ns: int) -> float:
        """Return the time until the next arrival, in ms."""
        return (self._times[self._count] - now_ns) / 1e6 if self._load.rate and now_ns < self._end else 1.0

    def outcome(self) -> Outcome:
        answers = [np.array(answers, np.int64).reshape(-1, 5) for answers in self._answers]
        return Outcome(answers, self._dropped, self._failed, self._load.seconds)


def clients_main(queries: Vectors, core: int, pipe: Connection) -> None:
    """Client process: send the pid; then for each order (endpoint, loads, begin) an `Outcome` for each load."""
    os.sched_setaffinity(0, {core})
    gc.freeze()
    gc.disable()  # a garbage collection would delay queries and then send them in a burst
    pipe.send(os.getpid())
    while (order := pipe.recv()) is not None:
        endpoint, loads, begin_ns = order
        clients = [RingClient(endpoint, "benchmark") for _ in loads]
        streams = [Stream(client, queries, load, begin_ns) for client, load in zip(clients, loads, strict=True)]
        offer(streams, begin_ns, begin_ns + int(loads[0].seconds * 1e9))
        for client in clients:
            client.close()
        pipe.send([stream.outcome() for stream in streams])


def offer(streams: list[Stream], begin_ns: int, end_ns: int) -> None:
    """Submit due queries and record results, until `end_ns` and until no query is outstanding."""
    while (now := time.monotonic_ns()) < end_ns or any(stream.outstanding for stream in streams):
        if begin_ns <= now < end_ns:
            for stream in streams:
                stream.submit_due(now)
        if sum(stream.poll() for stream in streams):
            continue
        due_ms = min(stream.due_ms(now) for stream in streams)
        busy = [stream for stream in streams if stream.outstanding]
        if due_ms <= 0.1 or len(busy) > 1:
            os.sched_yield()
        elif busy:
            busy[0].client.wait(min(due_ms - 0.05, 1.0))
        else:  # hyperthreads share a core: do not spin
            time.sleep((due_ms - 0.05) / 1e3)
