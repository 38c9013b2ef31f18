"""Pool workers inside the caller's process: real rings, real engine, real tables."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu import Engine
from ipc import RingClient, SessionServer
from runtime.node.config import parse_config
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import Histogram, Metric
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import NodePlan
from runtime.pool.collections.shard import OpenShard, open_shard
from runtime.pool.process import MakeArena, Pool, Timing
from runtime.testing.worker import make_worker


def plan_of(collection: Path, *others: dict[str, Any], shards: int = 1, demand: str = "", **pool: Any) -> NodePlan:
    """A plan with the collection `docs`, other collections, and these settings of the pool."""
    docs = {"name": "docs", "path": str(collection), "shards": shards, "demand": demand}
    return lay_out(parse_config({"pool": pool, "collections": [docs, *others]}))


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
        """`opener`, `make_arena`: as of `Pool`. `told`: what else its supervisor says, of `WorkerSpec`."""
        self.table = WorkerTable.create("pool", name, plan.config.slo)
        self.worker = make_worker(plan, name, epoch, self.table, **spec)
        self.pool = Pool(self.worker, timing, opener=opener, make_arena=make_arena)
        self.endpoint = plan.endpoint(name)
        self._turn = threading.RLock()
        self._wanted = threading.Event()
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
        self._wanted.set()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def _serve(self) -> None:
        while self._wanted.is_set():
            with self._turn:
                if self._wanted.is_set():
                    self.pool.step()
            time.sleep(0)  # lets `held` have its turn

    @contextmanager
    def held(self) -> Iterator[None]:
        """The pool does nothing meanwhile."""
        with self._turn:
            yield

    def die(self) -> None:
        """End every session at once. What the pool has is lost."""
        with self._turn:
            self._wanted.clear()
            self.pool.close()

    def close(self) -> None:
        self.die()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def attach(self, name: str = "test") -> RingClient:
        """A client; the pool steps until it is attached."""
        made: list[RingClient] = []
        thread = threading.Thread(target=lambda: made.append(RingClient(self.endpoint, name, timeout_ms=60_000.0)))
        thread.start()
        while thread.is_alive():
            self.step()
        return made[0]

    def metric(self, metric: Metric) -> float:
        """A counter's or gauge's value, a histogram's count."""
        *counts, last = self.table.read(metric)
        return sum(counts) if isinstance(metric, Histogram) else last
