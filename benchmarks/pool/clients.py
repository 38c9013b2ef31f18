"""What asks the pools of the benchmark: one process with a ring for each load, so that all come at their own times.

Two processes on one core would take turns of a few milliseconds each, and ask in bunches what came due meanwhile.
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
Kind = tuple[float, int, int, int]  # part of the queries, k, top_m, search_width


class Load(NamedTuple):
    """What one client asks for `seconds`: `rate` a second at random times, or as fast as `window` outstanding allow.

    What it asks in the first `uncounted` seconds is not in the outcome: the pool learns how busy it is.
    """

    stage: Stage
    seconds: float
    kinds: tuple[Kind, ...]
    rate: float = 0.0
    window: int = 0
    seed: int = 0
    uncounted: float = 0.0


class Outcome(NamedTuple):
    """`answers` int64 [n, 5] by kind: when each query was enqueued, begun and answered (ns), its extends, and when its
    client had the answer.

    Only those answered within `seconds` are there. `dropped`: what the ring did not take; `failed`: answered with an
    error.
    """

    answers: list[NDArray[np.int64]]
    dropped: int
    failed: int
    seconds: float

    def per_second(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    def latencies_us(self, kind: int = 0) -> NDArray[np.float64]:
        return (self.answers[kind][:, 2] - self.answers[kind][:, 0]) / 1e3

    def beside_us(self) -> float:
        """The median of a query's time from its client and back, less the engine's: rings, doorbells, loop."""
        enqueued, begun, ended, _, told = self.answers[0].T
        return float(np.median((told - enqueued) - (ended - begun))) / 1e3

    def p(self, percent: float, kind: int = 0) -> float:
        """In µs."""
        return float(np.percentile(self.latencies_us(kind), percent))


class Stream:
    """One load, over a client of its own."""

    def __init__(self, client: RingClient, queries: Vectors, load: Load, begin_ns: int) -> None:
        self.client, self._queries, self._load = client, queries, load
        random = np.random.default_rng(load.seed)
        self._order = random.permutation(len(queries)).tolist()
        self._kinds = random.choice(len(load.kinds), 1 << 16, p=[kind[0] for kind in load.kinds]).tolist()
        gaps = random.exponential(1e9 / load.rate, int(load.rate * load.seconds * 1.5) + 100) if load.rate else 0
        self._times = (begin_ns + np.cumsum(gaps)).astype(np.int64).tolist()
        self._counted, self._end = begin_ns + int(load.uncounted * 1e9), begin_ns + int(load.seconds * 1e9)
        self._answers: list[list[tuple[int, int, int, int, int]]] = [[] for _ in load.kinds]
        self._count = self._dropped = self._failed = 0
        self.asked: dict[int, int] = {}

    def submit_due(self, now_ns: int) -> None:
        """Ask what is due by now, or what the window has room for."""
        if self._load.window:
            while len(self.asked) < self._load.window:
                self._submit()
        else:
            while self._times[self._count] <= now_ns:
                self._submit()

    def _submit(self) -> None:
        kind = self._kinds[self._count % len(self._kinds)]
        _, k, top_m, width = self._load.kinds[kind]
        self._count += 1
        vector = self._queries[self._order[self._count % len(self._order)]]
        try:
            self.asked[self.client.submit(vector, SearchSpec("docs", k, self._load.stage, top_m, width))] = kind
        except RingFull:
            self._dropped += 1

    def poll(self) -> bool:
        """Take what is answered; whether there was anything."""
        news = self.client.poll()
        told = time.monotonic_ns()
        for result in news:
            kind = self.asked.pop(result.request_id)
            if result.status != "ok":
                self._failed += 1
            elif result.enqueue_ns >= self._counted and result.end_ns <= self._end:
                found = (result.enqueue_ns, result.begin_ns, result.end_ns, result.extends, told)
                self._answers[kind].append(found)
        return bool(news)

    def due_ms(self, now_ns: int) -> float:
        """Until it asks again at a time of its own."""
        return (self._times[self._count] - now_ns) / 1e6 if self._load.rate and now_ns < self._end else 1.0

    def outcome(self) -> Outcome:
        answers = [np.array(kind, np.int64).reshape(-1, 5) for kind in self._answers]
        return Outcome(answers, self._dropped, self._failed, self._load.seconds - self._load.uncounted)


def client_main(queries: Vectors, core: int, pipe: Connection) -> None:
    """Sends its pid; then, for each order (an endpoint, loads, when they begin), an `Outcome` for each load."""
    os.sched_setaffinity(0, {core})
    gc.freeze()
    gc.disable()  # a collection would hold back what is due, and then ask it at once
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
    """Ask what is due and take what is answered, until the end and until all is answered."""
    while (now := time.monotonic_ns()) < end_ns or any(stream.asked for stream in streams):
        if begin_ns <= now < end_ns:
            for stream in streams:
                stream.submit_due(now)
        if sum(stream.poll() for stream in streams):
            continue
        due_ms = min(stream.due_ms(now) for stream in streams)
        asked = [stream for stream in streams if stream.asked]
        if due_ms <= 0.1 or len(asked) > 1:
            os.sched_yield()
        elif asked:
            asked[0].client.wait(min(due_ms - 0.05, 1.0))
        else:  # two cores may share what makes them fast: no spinning
            time.sleep((due_ms - 0.05) / 1e3)
