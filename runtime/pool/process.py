"""A vector-pool worker's process. Its loop: receive → schedule → extend → publish."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpu import CpuEngine, Engine, GpuError, GraphIndex, SearchParams
from ipc import Request, RingServer, Stage
from runtime.errors import Overloaded
from runtime.node.metrics import POOL_EXTENDS, POOL_LATENCY, POOL_WAIT_DECODE, POOL_WAIT_PREFILL
from runtime.node.worker import Worker
from runtime.pool.scheduler import Queued, Scheduler
from runtime.retrieval.collection import Collection

_IDLE_MS = 100.0  # the longest sleep: the loop writes its heartbeat in between
_NEVER_NS = 1 << 62
_SEARCH_WIDTH = 8  # that a query may ask for, or the configured default if that is wider


@dataclass(frozen=True)
class Running:
    """A query in a slot of the running batch, since `begin_ns`."""

    request: Request
    stage: Stage
    begin_ns: int


class Pool:
    """One pool worker: ring server → scheduler → engine → ring server."""

    def __init__(self, worker: Worker) -> None:
        config = worker.plan.config
        limits = config.pool
        self._worker, self._table = worker, worker.table
        indexes = {c.name: Collection.open(Path(c.path)).index for c in config.collections}
        self._engine: Engine = CpuEngine(
            indexes,
            slots=limits.slots,
            max_top_m=limits.max_top_m,
            max_k=limits.max_k,
            max_search_width=max(limits.search_width, _SEARCH_WIDTH),
        )
        self._warm_up(indexes, SearchParams(1, limits.top_m, limits.search_width))
        self._scheduler: Scheduler[Request] = Scheduler(limits.slots, limits.reserve, limits.queue)
        self._running: dict[int, Running] = {}  # slot → query
        self._server = RingServer(
            worker.plan.endpoint(worker.name),
            {name: index.dim for name, index in indexes.items()},
            epoch=worker.epoch,
            ring_slots=limits.ring_slots,
            max_k=limits.max_k,
            max_top_m=limits.max_top_m,
        )
        self._table.set("trinity_pool_slots", limits.slots)

    def _warm_up(self, indexes: Mapping[str, GraphIndex], params: SearchParams) -> None:
        """A query through every collection: compiling and first touches belong to the start, not to a user's query."""
        for name, index in indexes.items():
            slot = self._engine.admit(np.ones(index.dim, np.float32), params, name)
            while slot not in self._engine.extend():
                pass
            self._engine.release(slot)

    @property
    def busy(self) -> bool:
        return bool(self._running) or any(self._scheduler.waiting.values())

    def step(self) -> None:
        """One round of the loop."""
        self._table.beat()
        self._receive()
        self._schedule()
        finished = self._extend()
        self._publish(finished)
        if not self.busy:
            self._server.wait(_IDLE_MS)

    # ---- receive

    def _receive(self) -> None:
        for request in self._server.receive():
            stage = request.stage
            self._table.add(f"trinity_pool_queries_{stage}_total")
            try:
                self._scheduler.add(Queued(stage, request.deadline_ns or _NEVER_NS, request.receive_ns, request))
            except Overloaded:
                self._refuse(request, "overloaded")
        for cancel in self._server.cancellations():
            self._cancel(cancel.client, cancel.request_id)

    def _cancel(self, client: int, request_id: int) -> None:
        for slot, running in list(self._running.items()):
            if (running.request.client, running.request.request_id) == (client, request_id):
                self._leave(slot)
                self._server.publish(client, request_id, "cancelled")
                return
        waiting = self._scheduler.remove(lambda request: (request.client, request.request_id) == (client, request_id))
        if waiting is not None:
            self._server.publish(client, request_id, "cancelled")

    # ---- schedule

    def _schedule(self) -> None:
        now = time.monotonic_ns()
        chosen, expired = self._scheduler.next(now)
        for queued in expired:
            self._refuse(queued.query, "deadline_exceeded")
        for queued in chosen:
            self._admit(queued, now)

    def _admit(self, queued: Queued[Request], now: int) -> None:
        request = queued.query
        try:
            params = SearchParams(request.k, request.top_m, request.search_width, request.patience)
            slot = self._engine.admit(request.vector, params, request.collection)
        except GpuError:
            self._scheduler.finished(queued.stage)
            self._refuse(request, "invalid_request")
            return
        self._running[slot] = Running(request, queued.stage, now)
        wait = POOL_WAIT_PREFILL if queued.stage == "prefill" else POOL_WAIT_DECODE
        self._table.observe(wait, (now - request.enqueue_ns) / 1e9)

    # ---- extend

    def _extend(self) -> list[int]:
        """Advance every running query by one extend; the slots that finished."""
        active = self._engine.active_slots
        if not active:
            return []
        self._table.add("trinity_pool_extends_total")
        self._table.add("trinity_pool_slot_steps_total", active)
        return list(map(int, self._engine.extend()))

    # ---- publish

    def _publish(self, finished: list[int]) -> None:
        for slot in finished:
            running = self._running[slot]
            request = running.request
            ids, distances = self._engine.result(slot)
            found = int(np.count_nonzero(ids != -1))
            extends = self._engine.extends(slot)
            self._server.publish(
                request.client, request.request_id, "ok", ids[:found], distances[:found],
                extends=extends, begin_ns=running.begin_ns,
            )  # fmt: skip
            self._leave(slot)
            self._table.observe(POOL_LATENCY, (time.monotonic_ns() - request.enqueue_ns) / 1e9)
            self._table.observe(POOL_EXTENDS, extends)
        waiting = self._scheduler.waiting
        self._table.set("trinity_pool_queue_prefill", waiting["prefill"])
        self._table.set("trinity_pool_queue_decode", waiting["decode"])
        self._table.set("trinity_pool_active_slots", len(self._running))
        self._table.set("trinity_pool_clients", self._server.statistics().clients)

    def _leave(self, slot: int) -> None:
        self._scheduler.finished(self._running.pop(slot).stage)
        self._engine.release(slot)

    def _refuse(self, request: Request, status: str) -> None:
        self._table.add("trinity_pool_queries_refused_total")
        self._server.publish(request.client, request.request_id, status)

    def drain(self) -> None:
        """Take nothing new: clients of a node with several pools turn to the others."""
        self._server.drain()

    def close(self) -> None:
        self._server.close()


def run(worker: Worker) -> None:
    """The process: serve until told to stop, and until what it has is finished (the supervisor bounds that)."""
    pool = Pool(worker)
    worker.ready()
    while not worker.stopping:
        pool.step()
    pool.drain()
    pool.step()  # with what was asked before the clients could know
    while pool.busy:
        pool.step()
    pool.close()
