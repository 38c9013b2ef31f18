"""The simulated pool against the real loop: the same queries and the same cost of an extend, on the test's clock."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipc import Parameters, Request, Served, Stage
from runtime.node.config import PoolSection, SloSection, parse_config
from runtime.node.metrics import metrics_of
from runtime.node.placement import resolve
from runtime.node.table import WorkerTable
from runtime.node.worker import Worker, WorkerSpec
from runtime.pool import process
from runtime.pool.shard import Shard
from runtime.retrieval.checksums import Checksums
from runtime.simulator.pool_alone import Fate, Query, run_pool
from runtime.simulator.service import ServiceTimes

FIXED_NS, EACH_NS, QUERY_NS, ROUND_NS = 20_000, 60_000, 50_000, 40_000
TIMES = ServiceTimes(
    extend_s=FIXED_NS / 1e9, extend_slot_s=EACH_NS / 1e9, query_s=QUERY_NS / 1e9, round_s=ROUND_NS / 1e9
)
PARAMETERS: dict[Stage, Parameters] = {
    "prefill": Parameters("docs", "prefill", 1, 128, 4, None),
    "decode": Parameters("docs", "decode", 1, 128, 4, None),
}


@dataclass
class Machine:
    """What the pool's process has around it: a clock, an engine whose extends take time, a ring with queries."""

    queries: list[Query]
    slots: int
    now: int = 0
    next: int = 0
    left: dict[int, int] = field(default_factory=dict)  # extends by slot
    paused: set[int] = field(default_factory=set)
    taken: dict[int, int] = field(default_factory=dict)
    fates: dict[int, Fate] = field(default_factory=dict)

    # the engine

    dims = MappingProxyType({"docs": 1})
    extends_made = 1  # by the last call of `extend`
    padded_slots = 0

    def interrupt_when(self, arrived: Any) -> None:
        """One extend a call cannot be interrupted."""

    @property
    def active_slots(self) -> int:
        return len(self._active())

    def _active(self) -> list[int]:
        return [slot for slot, left in self.left.items() if left and slot not in self.paused]

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.left)

    def admit(self, query: Any, params: Any, collection: str) -> int:
        slot = next(slot for slot in range(self.slots) if slot not in self.left)
        self.left[slot] = self.taken[slot] = self.queries[int(query[0])].extends if query[0] >= 0 else 2
        return slot

    def extend(self) -> Any:
        active = self._active()
        self.now += FIXED_NS + EACH_NS * len(active)
        for slot in active:
            self.left[slot] -= 1
        return np.array([slot for slot in active if self.left[slot] == 0], np.int32)

    def pause(self, slot: int) -> None:
        self.paused.add(slot)

    def resume(self, slot: int) -> None:
        self.paused.remove(slot)

    def result(self, slot: int) -> Any:
        return np.zeros(1, np.int64), np.zeros(1, np.float32)

    def extends(self, slot: int) -> int:
        return self.taken[slot]

    def release(self, slot: int) -> None:
        del self.left[slot]

    # the ring

    def has_news(self) -> bool:
        return self.next < len(self.queries) and self.queries[self.next].at_ns <= self.now

    def receive(self, limit: int) -> list[Request]:
        found: list[Request] = []
        self.now += ROUND_NS if self.left or self.has_news() else 0
        while self.next < len(self.queries) and self.queries[self.next].at_ns <= self.now and len(found) < limit:
            query = self.queries[self.next]
            vector = np.array([self.next], np.float32)
            at = query.at_ns
            found.append(Request(1, self.next, PARAMETERS[query.stage], 0, at, at, vector))
            self.next += 1
            self.now += QUERY_NS
        return found

    def cancellations(self) -> list[Any]:
        return []

    def publish(self, client: int, number: int, status: str, *found: Any, extends: int, begin_ns: int) -> None:
        query = self.queries[number]
        self.fates[number] = Fate(query.stage, begin_ns - query.at_ns, self.now - query.at_ns)

    def wait(self, ms: float) -> None:
        self.now = max(self.now, self.queries[self.next].at_ns) if self.next < len(self.queries) else self.now

    def statistics(self) -> Any:
        return SimpleNamespace(clients=1, malformed=0)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def table() -> Iterator[WorkerTable]:
    made = WorkerTable.create("pool", "pool-0", metrics_of("pool", SloSection()))
    yield made
    made.close()


def real_loop(
    queries: list[Query], limits: dict[str, Any], table: WorkerTable, patch: pytest.MonkeyPatch
) -> list[Fate]:
    machine = Machine(queries, limits["slots"] + limits["spare_slots"])
    index: Any = SimpleNamespace(dim=1)
    patch.setattr(process, "open_shard", lambda *a: Shard(Served("docs", 1), index, Checksums({})))
    patch.setattr(process, "_open", lambda *a: machine)
    patch.setattr(process, "RingServer", lambda *a, **k: machine)
    patch.setattr(process, "_direction", lambda dim, number: np.full(1, -1.0))
    patch.setattr(process, "time", SimpleNamespace(monotonic_ns=lambda: machine.now))
    plan = resolve(parse_config({"pool": limits, "collections": [{"name": "docs", "path": str(Path.cwd())}]}))
    worker = Worker(WorkerSpec(plan, "pool-0", 1, table.reference, os.getpid()))
    pool = process.Pool(worker)
    machine.now = 0
    while len(machine.fates) < len(queries):
        pool.step()
    worker.table.close()
    return [machine.fates[number] for number in range(len(queries))]


def arrivals(load: float, count: int = 1500) -> list[Query]:
    """30% prefill; at load 1 the pool has next to no time left."""
    random, at, found = Random(3), 0.0, []
    query_ns = 34 * (EACH_NS + FIXED_NS / 2) + QUERY_NS + 2 * ROUND_NS  # a narrow batch, and rounds of its own
    for _ in range(count):
        at += random.expovariate(load / query_ns)
        stage: Stage = "prefill" if random.random() < 0.3 else "decode"
        found.append(Query(int(at), stage, 32 + random.randint(1, 3)))
    return found


@pytest.mark.parametrize("target_s", [0.0, 0.02])
@pytest.mark.parametrize("load", [0.4, 0.6, 0.8])
def test_waits_and_latencies_of_both_stages_agree_with_the_real_loops(
    load: float, target_s: float, table: WorkerTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = arrivals(load)
    limits = {"slots": 16, "spare_slots": 16, "prefill_target_s": target_s}
    simulated = run_pool(queries, TIMES, parse_pool(limits))
    real = real_loop(queries, limits, table, monkeypatch)
    for stage in ("prefill", "decode"):
        for value in ("wait_ns", "latency_ns"):
            ours, theirs = (
                np.array([getattr(fate, value) for fate in fates if fate.stage == stage]) for fates in (simulated, real)
            )
            slack = 0.05 * fmean(fate.latency_ns for fate in real if fate.stage == stage)
            assert ours.mean() == pytest.approx(theirs.mean(), rel=0.15, abs=slack)
            for percent in (50, 95):
                assert np.percentile(ours, percent) == pytest.approx(
                    np.percentile(theirs, percent), rel=0.15, abs=slack
                )


def test_the_loop_counts_its_rounds_and_what_its_extends_and_the_rest_of_them_take(
    table: WorkerTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = arrivals(0.6, 300)
    real_loop(queries, {"slots": 16, "spare_slots": 16}, table, monkeypatch)
    named = {metric.name: metric for metric in metrics_of("pool", SloSection())}
    rounds, beside_s, extends_s, extends, slot_steps = (
        table.read(named[f"trinity_pool_{name}_total"])[0]
        for name in ("rounds", "round_seconds", "extend_seconds", "extends", "slot_steps")
    )
    assert 1 < rounds < extends
    assert slot_steps == sum(query.extends for query in queries)
    assert extends_s == pytest.approx((extends * FIXED_NS + slot_steps * EACH_NS) / 1e9)
    assert beside_s == pytest.approx((rounds * ROUND_NS + len(queries) * QUERY_NS) / 1e9)


def parse_pool(limits: dict[str, Any]) -> PoolSection:
    return parse_config({"pool": limits}).pool
