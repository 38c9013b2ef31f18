"""Tests of the clients in the pool's benchmark."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.pool import clients
from benchmarks.pool.clients import Load
from ipc import RingClient, RingFull, SearchSpec

_SECOND = 1_000_000_000


class Clock:
    """A clock that advances with every reading."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        self.now += 10_000
        return self.now


class Pool:
    """A fake client: results arrive at the next poll, and at most `room` queries are accepted until then."""

    def __init__(self, clock: Clock, room: int = 1000) -> None:
        self.clock, self.room = clock, room
        self.numbers = itertools.count()
        self.waiting: list[tuple[int, int, SearchSpec]] = []
        self.submitted: list[tuple[int, SearchSpec]] = []

    def submit(self, _vector: Any, spec: SearchSpec) -> int:
        if len(self.waiting) >= self.room:
            raise RingFull("no slot")
        number = next(self.numbers)
        self.waiting.append((number, self.clock.now, spec))
        self.submitted.append((self.clock.now, spec))
        return number

    def poll(self) -> list[SimpleNamespace]:
        waiting, self.waiting = self.waiting, []
        return [
            SimpleNamespace(request_id=n, status="ok", enqueue_ns=at, begin_ns=at, end_ns=self.clock.now, extends=1)
            for n, at, _ in waiting
        ]


Offered = Callable[..., tuple[list[Pool], list[clients.Outcome]]]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Offered:
    """Return loads that start at 1 ms, each over a pool with limited room."""

    def offer(*loads: Load, room: int = 1000) -> tuple[list[Pool], list[clients.Outcome]]:
        clock = Clock()
        passing = SimpleNamespace(monotonic_ns=clock.monotonic_ns, sleep=lambda _: None)
        monkeypatch.setattr(clients, "time", passing)
        pools = [Pool(clock, room) for _ in loads]
        queries = np.zeros((10, 4), np.float32)
        asking = [
            clients.Stream(cast(RingClient, pool), queries, load, 1_000_000)
            for pool, load in zip(pools, loads, strict=True)
        ]
        clients.offer(asking, 1_000_000, 1_000_000 + int(loads[0].seconds * 1e9))
        return pools, [stream.outcome() for stream in asking]

    return offer


def load(rate: float, seed: int, seconds: float = 1.0, **changes: Any) -> Load:
    return Load("decode", seconds, ((0.5, 10, 64, 4), (0.5, 100, 512, 4)), rate=rate, seed=seed, **changes)


def test_loads_of_one_process_are_submitted_on_schedule_and_not_in_bursts(offered: Offered) -> None:
    pools, outcomes = offered(load(2_000, 1), load(8_000, 2))
    for pool, outcome, rate in zip(pools, outcomes, (2_000, 8_000), strict=True):
        times = [at for at, _ in pool.submitted]
        assert outcome.per_second() == len(times) == pytest.approx(rate, rel=0.1)
        assert max(np.diff(np.searchsorted(times, np.arange(0, _SECOND, 100_000)))) <= 10
        assert [len(answers) for answers in outcome.answers] == [
            sum(spec.k == k for _, spec in pool.submitted) for k in (10, 100)
        ]


def test_a_window_is_kept_full(offered: Offered) -> None:
    (pool,), _ = offered(load(0, 1, seconds=0.1, window=7))
    per_look = np.diff(np.flatnonzero(np.diff([0, *(at for at, _ in pool.submitted)])))
    assert set(per_look.tolist()) == {7}
