"""The real loop over real rings with a virtual engine: extends take configured times on a virtual clock."""

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu import SearchParams
from gpu.slots import Collections
from ipc import RingClient, SearchSpec, SessionServer, new_token, private_endpoint
from ipc.ring.exchange import SessionCollection
from runtime.node.config import NodeConfig
from runtime.node.metrics.table import WorkerTable
from runtime.pool.collections.scopes import Part, Parts, Scopes
from runtime.pool.loop_driver import PoolLoop
from runtime.pool.loop_layout import IDLE
from runtime.pool.settings import Policy
from tests.pool.callbacks import Callbacks
from tests.pool.standalone_pool import Query, QueryOutcome

_FOREVER = 1 << 62


class _Collection(Collections):
    """A collection without an index, whose queries are numbers."""

    def __init__(self) -> None:
        super().__init__({})
        self._numbers, self._dims["docs"] = {"docs": 0}, 1


class VirtualEngine:
    """Engine for `Callbacks`: an extend takes `fixed + each·active` ns, the admission of a query `query` ns."""

    extends_made, padded_slots = 1, 0

    def __init__(self, queries: Sequence[Query], fixed: int, each: int, query: int) -> None:
        self.queries, self.costs = queries, (fixed, each, query)
        self.clock = np.zeros(1, np.int64)
        self.dims = {"docs": 1}
        self.left: dict[int, int] = {}  # extends by slot
        self.number: dict[int, int] = {}  # the query in each slot
        self.paused: set[int] = set()
        self.begun: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.batches: list[list[int]] = []  # the queries of each extend
        self.arrive: Any = None  # called when time has passed

    @property
    def now(self) -> int:
        return int(self.clock[0])

    def admit(self, query: npt.NDArray[np.float32], params: SearchParams, collection: str) -> int:
        slot = next(slot for slot in range(4096) if slot not in self.left)
        self.number[slot] = number = int(query[0])
        self.left[slot] = self.queries[number].extends
        self.begun.setdefault(number, self.now)
        self.clock[0] += self.costs[2]
        return slot

    def extend(self) -> npt.NDArray[np.int32]:
        active = [slot for slot in self.left if slot not in self.paused and self.left[slot]]
        self.batches.append([self.number[slot] for slot in active])
        self.clock[0] += self.costs[0] + self.costs[1] * len(active)
        for slot in active:
            self.left[slot] -= 1
        self.arrive()
        return np.array([slot for slot in active if not self.left[slot]], np.int32)

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        self.ended[self.number[slot]] = self.now
        return np.array([self.number[slot]]), np.zeros(1, np.float32)

    def extends(self, slot: int) -> int:
        return self.queries[self.number[slot]].extends

    def release(self, slot: int) -> None:
        del self.left[slot]
        self.paused.discard(slot)

    def pause(self, slot: int) -> None:
        self.paused.add(slot)

    def resume(self, slot: int) -> None:
        self.paused.remove(slot)


class VirtualPool:
    """Runs timed `queries` through the real loop. `table` holds its metrics, `engine` its record, `server` sessions."""

    def __init__(
        self,
        queries: Sequence[Query],
        policy: Policy,
        *,
        fixed: int,
        each: int,
        query: int = 0,
    ) -> None:
        self._stack = ExitStack()
        self.queries, self._sent = queries, 0
        self.table = WorkerTable.create("pool", "pool-0", NodeConfig().slo)
        self._stack.callback(self.table.close)
        scopes = Scopes()
        scope = scopes.add_collection(Parts([Part(0, None, 0)]))
        self.server = SessionServer(
            private_endpoint("trinity-test", new_token()), {"docs": 1}, epoch=1, ring_slots=8192,
            searches=lambda _: SessionCollection(number=scope, scope=scope),
        )  # fmt: skip
        self._stack.callback(self.server.close)
        self.engine = VirtualEngine(queries, fixed, each, query)
        self.engine.arrive = self._arrive
        called: Any = self.engine  # engine functions called back
        self._callbacks = Callbacks(called, _Collection())
        self.loop = PoolLoop(
            policy, self.server, self._callbacks.backend(), self.table,
            max_dim=1, max_width=8, clock=int(self.engine.clock.ctypes.data), scopes=scopes,
        )  # fmt: skip
        for active in (1, 2, 4, 8, 16) * 4:
            self.loop.learn_extend(active, fixed + each * active)
        made: list[RingClient] = []
        thread = threading.Thread(
            target=lambda: made.append(RingClient(self.server.endpoint, "virtual", timeout_ms=60_000.0))
        )
        thread.start()
        while thread.is_alive():
            self.server.housekeep(time.monotonic_ns())
            thread.join(0.001)
        (self._client,) = made
        self._stack.callback(self._client.close)

    def _arrive(self) -> None:
        while self._sent < len(self.queries) and self.queries[self._sent].at_ns <= self.engine.now:
            query = self.queries[self._sent]
            vector = np.array([self._sent], np.float32)
            self._client.submit(vector, SearchSpec("docs", 1, query.stage, top_m=128, search_width=4))
            self._sent += 1

    def run(self) -> list[QueryOutcome]:
        """Run all queries. Return their outcomes in order."""
        ended = 0
        while ended < len(self.queries):
            self._arrive()
            if self.loop.run(_FOREVER, 0) == IDLE and self._sent < len(self.queries):
                self.engine.clock[0] = max(self.engine.now, self.queries[self._sent].at_ns)
            ended += len(self._client.poll())
        begun, done = self.engine.begun, self.engine.ended
        return [
            QueryOutcome(query.stage, begun[number] - query.at_ns, done[number] - query.at_ns)
            for number, query in enumerate(self.queries)
        ]

    def close(self) -> None:
        self._stack.close()
