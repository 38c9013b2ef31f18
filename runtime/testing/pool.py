"""Pool workers in the caller's process: real rings, real engine, real tables."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from gpu import Engine
from ipc import RingClient, SessionServer
from runtime.node.config import parse_config
from runtime.node.metrics.kinds import Histogram, Metric
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import MAX_K, RING_SLOTS, NodePlan
from runtime.pool.collections.shard import OpenShard, open_shard
from runtime.pool.process import MakeArena, Pool, Timing
from runtime.testing.worker import make_worker


def plan_of(
    collection: Path,
    *others: dict[str, Any],
    shards: int = 1,
    ring_slots: int = RING_SLOTS,
    max_k: int = MAX_K,
    **pool: Any,
) -> NodePlan:
    """Return a plan with the collection `docs`, other collections, and these settings of the pool."""
    docs = {"name": "docs", "path": str(collection), "shards": shards}
    plan = lay_out(parse_config({"pool": pool, "collections": [docs, *others]}))
    return structs.replace(plan, ring_slots=ring_slots, max_k=max_k)


class InProcessPool:
    """One pool worker, driven by `step`, or by a thread between `start` and `close`."""

    def __init__(
        self,
        plan: NodePlan,
        name: str = "pool-0",
        epoch: int = 1,
        timing: Timing | None = None,
        *,
        opener: OpenShard = open_shard,
        make_arena: MakeArena | None = None,
        **spec: Any,
    ) -> None:
        """`opener`, `make_arena`: as in `Pool`. `spec`: other fields of `WorkerSpec`."""
        self.table = WorkerTable.create("pool", name, plan.config.slo)
        self.worker = make_worker(plan, name, epoch, self.table, **spec)
        self.pool = Pool(self.worker, timing, opener=opener, make_arena=make_arena)
        self.endpoint = plan.endpoint(name)
        self._step_lock = threading.RLock()
        self._running = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def engine(self) -> Engine:
        return self.pool.engine

    @property
    def server(self) -> SessionServer:
        return self.pool.server

    def step(self) -> None:
        self.pool.step()

    def start(self) -> "InProcessPool":
        self._running.set()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def _serve(self) -> None:
        while self._running.is_set():
            with self._step_lock:
                if self._running.is_set():
                    self.pool.step()
            time.sleep(0)  # lets `held` acquire the lock

    @contextmanager
    def held(self) -> Iterator[None]:
        """Suspend the pool's thread for the duration of the block."""
        with self._step_lock:
            yield

    def die(self) -> None:
        """End every session at once; the pool's queries are lost."""
        with self._step_lock:
            self._running.clear()
            self.pool.close()

    def close(self) -> None:
        self.die()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def attach(self, name: str = "test", *, arena: bool = False) -> RingClient:
        """Return an attached client; the pool is stepped until it is."""
        made: list[RingClient] = []

        def connect() -> None:
            made.append(RingClient(self.endpoint, name, timeout_ms=60_000.0, arena=arena))

        thread = threading.Thread(target=connect)
        thread.start()
        while thread.is_alive():
            self.step()
        return made[0]

    def metric(self, metric: Metric) -> float:
        """Return the value of a counter or gauge, or the count of a histogram."""
        *counts, last = self.table.read(metric)
        return sum(counts) if isinstance(metric, Histogram) else last
