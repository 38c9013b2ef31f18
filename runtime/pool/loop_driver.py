"""Driver of the compiled loop: allocates its memory, sleeps while it is idle, and handles the exits that need Python.

`serve_loop` alternates rounds of the loop and sleeps until an exit needs Python:

    rounds ──▶ nothing to do ──▶ spin ──▶ sleep ──▶ a client rings ──▶ rounds …
      └─ every 1 ms: look for the server's other events

So a pool that queries wake, however often, enters Python no more often than a busy one.
"""

import os
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from numba import float32, float64, int64

from gpu.engine import Backend, Report
from ipc import SessionServer
from ipc.native import intrinsics
from ipc.native.records import (
    Record,
    address_of,
    array_from,
    new_array,
    numpy_view,
    record,
    record_at,
)
from ipc.ring import exchange
from ipc.ring.descriptors import STATUS_CODES
from ipc.ring.doorbell import SpinBudget, learn_wait, spin_ns
from ipc.ring.exchange import ClientTable
from runtime.node.metrics.table import WorkerTable
from runtime.pool import loop_layout as layout
from runtime.pool.collections.resolver import FilterResolver
from runtime.pool.collections.scopes import InUse, Scopes
from runtime.pool.compiled import compiled
from runtime.pool.estimates import learn_cost
from runtime.pool.filtered_requests import FilteredRequests, WaitingRequest
from runtime.pool.loop import drop_client, end_set_aside, enqueue, run_loop
from runtime.pool.loop_layout import EngineFunctions, Loop, Search, fill_metrics, loop_at
from runtime.pool.settings import Policy
from runtime.pool.sizing import ExtendCost
from runtime.pool.tables import DECODE, FREE, PREFILL, Tables, new_tables

_CALIBRATION_WEIGHT = 8  # of a measurement at start, in extends
_MAX_EVICTIONS = 4096  # clients that can be pending for eviction at once

SERVER_EVENT = layout.CANCEL + 1
"""Exit reason of `serve_loop` besides those of `run_loop`: the server's descriptor is readable, but not for a query."""

_MS = 1_000_000
_NO_WAIT = 0  # in place of a `Wait`'s address
_EVENTS_NS = _MS  # how often a busy loop looks for session messages, dead clients and writes to collections


@record
class Wait(Record):
    """What the loop sleeps on."""

    descriptor: int  # the server's, readable on any of its events
    bell: int  # the eventfd that clients ring, one of these events
    budget: int  # address of the spin budget


_wait_at = record_at(Wait)


class PoolLoop:
    """A pool's loop over a server's client table, an engine and a worker's metrics table, which must all outlive it.

    max_dim: dimension of the longest vector; max_width: largest search_width of a query; spin_ns: longest spin before a
    sleep; clock: address of a word with the time in ns, 0 for the machine's clock; scopes: the filters that a thread of
    its own has resolved, which `close` stops.
    """

    def __init__(
        self,
        policy: Policy,
        server: SessionServer,
        backend: Backend,
        table: WorkerTable,
        *,
        max_dim: int,
        max_width: int,
        spin_ns: int = 0,
        clock: int = 0,
        scopes: Scopes,
    ) -> None:
        self._server, self._backend, self._scopes = server, backend, scopes
        tables = new_tables(policy)
        self._entries, slots = tables.entry_count, tables.engine_slots
        self.memory = Loop(
            tables=tables,
            searches=new_array(Search, self._entries),
            clients=array_from(ClientTable, server.client_table.address),
            engine=EngineFunctions.of(backend),
            max_width=max_width,
            report=array_from(Report, address_of(report := new_array(int, 2 + 2 * slots))),
            owners=new_array(int, slots),
            evicted=new_array(int, _MAX_EVICTIONS),
            scopes=self._scopes.table,
        )
        self.tables: Tables = self.memory.tables
        if clock:
            self.memory.clock = array_from(int, clock)
        self._report = report
        fill_metrics(self.memory.metrics, table)
        self._states = numpy_view(tables.entries, self._entries)["state"]
        self._parts = numpy_view(self.memory.searches, self._entries)["parts"]
        self._vectors = np.zeros((0, 0), np.float32)
        self._spin = SpinBudget(spin_ns)
        self._wait = Wait(descriptor=server.fileno(), bell=server.bell_fileno, budget=self._spin.address)
        self._at = address_of(self.memory)
        most_k = server.client_table.fields.max_k
        # Sized for the largest results; only pages that queries over several parts touch use memory.
        self._part_results = np.zeros((self._entries, most_k, 3), np.int32)
        self._merge_buffer = np.zeros((2, most_k, 3), np.int32)
        self.memory.part_results = self._part_results.ctypes.data
        self.memory.part_result_bytes = self._part_results.strides[0]
        self.memory.merge_buffer = self._merge_buffer.ctypes.data
        self.filtered = FilteredRequests(server, self._scopes, FilterResolver(self.wake), self._end_set_aside)
        self.resize_vectors(max_dim)

    def resize_vectors(self, max_dim: int) -> None:
        """Grow the vectors' rows to `max_dim`. Queries in the pool keep their vectors."""
        stride = -(-max_dim // 16) * 16
        if stride <= self._vectors.shape[1]:
            return
        vectors = np.zeros((self._entries, stride), np.float32)
        if self._vectors.size:
            vectors[:, : self._vectors.shape[1]] = self._vectors
        self._vectors = vectors
        self.memory.vectors, self.memory.vector_bytes = vectors.ctypes.data, vectors.strides[0]

    # ---- state

    @property
    def waiting(self) -> tuple[int, int]:
        """Prefill and decode queries that wait for a slot."""
        return self.tables.queues[PREFILL].count, self.tables.queues[DECODE].count

    @property
    def active(self) -> int:
        return self.tables.active[PREFILL].count + self.tables.active[DECODE].count

    @property
    def paused(self) -> int:
        return self.tables.paused.count

    @property
    def busy(self) -> bool:
        """Whether any query is in the pool, or waits for its filter."""
        return self.tables.free.count < self._entries or bool(len(self.filtered))

    @property
    def padded(self) -> int:
        """Slots beyond the active ones that the last extend covered."""
        return self.memory.padded

    def set_knobs(self, reserve: float, flush_prefill_ns: int) -> None:
        """Set r and τ_pre."""
        self.tables.reserve, self.tables.flush_prefill_ns = reserve, flush_prefill_ns

    def learn(self, measured: Sequence[ExtendCost]) -> None:
        """Initialise the cost model of an extend with measurements."""
        for _ in range(_CALIBRATION_WEIGHT):
            for cost in measured:
                self.learn_extend(cost.active, cost.extend_ns)

    def learn_extend(self, active: int, extend_ns: float) -> None:
        """Update the cost model with one extend."""
        _learn_cost(self._at, float(active), float(extend_ns))

    def compile(self) -> None:
        """Compile all functions at start, so that no query waits for it."""
        for function, types in (*CALLED_OFTEN, *CALLED_RARELY):
            function.compile(types)

    # ---- running

    def run(self, until_ns: int, spin_ns: int) -> int:
        """Run the loop until `until_ns` at most; see `run_loop`. Return IDLE or TIME_UP; handle all other exits.

        Raises the engine's error if the engine fails.
        """
        self.drop_gone_clients()
        return self._handle_exit(serve_loop(self._at, _NO_WAIT, until_ns, spin_ns), until_ns, spin_ns)

    def serve(self, until_ns: int) -> int:
        """As `run`, but sleep while there is nothing to do; see `serve_loop`. Return TIME_UP, IDLE or SERVER_EVENT."""
        self.drop_gone_clients()
        stopped = serve_loop(self._at, address_of(self._wait), until_ns, self._spin.ns)
        return self._handle_exit(stopped, until_ns, self._spin.ns)

    def _handle_exit(self, stopped: int, until_ns: int, spin_ns: int) -> int:
        """Handle the loop's exits and resume it, until one is for the caller."""
        while True:
            if stopped == layout.EVICTIONS:
                self._evict()
            elif stopped == layout.UNKNOWN_FILTER:
                self.filtered.receive(time.monotonic_ns())
                self._after_set_aside()
            elif stopped == layout.FILTERS_RESOLVED:
                self._enqueue_resolved()
            elif stopped == layout.CANCEL:
                self.filtered.cancel()
                self._after_set_aside()
            elif stopped == layout.ENGINE_FAILED:
                self._backend.check()
                raise RuntimeError("the engine failed without an error")
            else:
                self._server.client_table.ring_bells()
                return stopped
            stopped = serve_loop(self._at, _NO_WAIT, until_ns, spin_ns)

    def wake(self) -> None:
        """Make the loop return to `FilteredRequests`. Called by the resolver's thread."""
        self.memory.resolved = 1  # before the bell: the loop looks after each sleep
        os.eventfd_write(self._server.bell_fileno, 1)

    def _enqueue_resolved(self) -> None:
        """Enqueue the requests whose filters have been resolved."""
        self.memory.resolved = 0  # first: what is resolved from now on sets it again
        self.drop_gone_clients()
        now = time.monotonic_ns()
        for request in self.filtered.resolved(now, self.parts_in_use, self.invalidate_filters):
            _enqueue(self._at, request.aside.vector, now)
        self._after_set_aside()

    def expire_filtered(self, now_ns: int) -> None:
        """End requests that have waited for their filters until their deadlines."""
        if len(self.filtered):
            self.filtered.expire(now_ns)
            self._after_set_aside()

    def _end_set_aside(self, request: WaitingRequest, status: str) -> None:
        stage = request.aside.request.stage
        _end_set_aside(self._at, request.row, request.request_id, stage, request.received_ns, STATUS_CODES[status])

    def _after_set_aside(self) -> None:
        self.memory.set_aside = len(self.filtered)
        self.drop_gone_clients()
        self._server.client_table.ring_bells()

    def filters_changed(self, collection: int, scopes: Iterable[int]) -> None:
        """Invalidate the scopes of a changed collection's filters; filters in resolution are not shared."""
        self.filtered.changed(collection)
        self.invalidate_filters(scopes)

    def invalidate_filters(self, scopes: Iterable[int]) -> None:
        """Invalidate the clients' cached numbers of these scopes."""
        for number in scopes:
            self._server.invalidate_filter(number)

    def parts_in_use(self) -> InUse:
        """Return a predicate: whether queries in the pool search the parts at an address."""
        return set(self._parts[self._states != FREE].tolist()).__contains__

    def _evict(self) -> None:
        rows = [self.memory.evicted[i] for i in range(self.memory.evict_count)]
        self.memory.evict_count = 0
        for row in rows:
            self._server.evict(row)
        self.drop_gone_clients()

    def drop_gone_clients(self) -> None:
        """Drop the queries of clients that are gone, after each housekeeping."""
        for row in self._server.client_table.take_vacated():
            self.filtered.drop_client(row)
            drop_client(self._at, row)
            self.memory.set_aside = len(self.filtered)

    def close(self) -> None:
        """Stop the thread that resolves filters."""
        self.filtered.close()


@compiled
def _enqueue(at: int, vector: npt.NDArray[np.float32], now: int) -> None:
    loop = loop_at(at)
    enqueue(loop, loop.clients[0], vector.ctypes.data, now)


@compiled
def _end_set_aside(at: int, row: int, request_id: int, stage: int, received: int, status: int) -> None:
    loop = loop_at(at)
    end_set_aside(loop, loop.clients[0], row, request_id, stage, received, status)


@compiled
def _learn_cost(at: int, active: float, took_ns: float) -> None:
    learn_cost(loop_at(at).tables.cost, active, took_ns)


@compiled
def serve_loop(at: int, wait_at: int, until: int, spin: int) -> int:
    """Serve until `until`, or until an exit needs Python. Sleep at least once before returning IDLE.

    A query that ends a sleep is answered before the return, within 1 ms. Without a `Wait` (_NO_WAIT) it is `run_loop`:
    each function that Python calls is compiled with all of the loop.
    """
    if wait_at == _NO_WAIT:
        return run_loop(at, until, spin)
    loop, wait = loop_at(at), _wait_at(wait_at)
    clients = loop.clients[0]
    now, rounds_until, slept = intrinsics.monotonic_ns(), until, False
    while True:
        stopped = run_loop(at, min(now + _EVENTS_NS, rounds_until), spin_ns(wait.budget))
        now = intrinsics.monotonic_ns()
        if stopped == layout.TIME_UP and now < rounds_until and not clients.pending_bells:
            if intrinsics.wait_readable(wait.descriptor, 0) > 0:
                return SERVER_EVENT
            continue
        if stopped != layout.IDLE or clients.pending_bells or (slept and now >= until):
            return stopped
        limit = max(until - now, _MS)
        rung = exchange.sleep(clients, wait.descriptor, -(-limit // _MS))
        begin, now, slept = now, intrinsics.monotonic_ns(), True
        learn_wait(wait.budget, now - begin)
        if rung or loop.resolved:
            intrinsics.read_word(wait.bell)  # silence the bell; other events of the server are polled at `until`
            rounds_until = max(until, now + _MS)
        else:
            return SERVER_EVENT if now < until else layout.TIME_UP


CALLED_OFTEN = ((serve_loop, (int64, int64, int64, int64)),)
CALLED_RARELY = (
    (drop_client, (int64, int64)),
    (_enqueue, (int64, float32[::1], int64)),
    (_end_set_aside, (int64, int64, int64, int64, int64, int64)),
    (_learn_cost, (int64, float64, float64)),
)
"""Functions that Python calls, and the types of their arguments."""
