"""A vector-pool worker's process. Its loop: receive → schedule → extend → publish."""

import time
from collections.abc import Callable, Mapping
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from gpu import DeviceUnavailable, Engine, GpuError, GraphIndex, OutOfDeviceMemory, SearchParams, open_engine
from gpu.slots import MAX_SLOTS
from ipc import IpcError, Memo, Parameters, Request, RingServer, Stage
from ipc.device_arena import DeviceArena, arena_bytes
from runtime.errors import ConfigError, DeadlineExceeded, Overloaded, ResourceBusy
from runtime.node.config import PoolSection
from runtime.node.metrics import MALFORMED_MESSAGES, POOL_EXTENDS, POOL_LATENCY, POOL_WAIT_DECODE, POOL_WAIT_PREFILL
from runtime.node.worker import Worker
from runtime.pool.catalogue import PoolCatalogue
from runtime.pool.estimate import Kind
from runtime.pool.pace import NEWS_NS, ends_round, round_ns
from runtime.pool.policy import Policy
from runtime.pool.queues import NEVER_NS, Entry
from runtime.pool.replacing import Replacing
from runtime.pool.scheduler import Scheduler
from runtime.pool.shard import key_of, open_shard

_IDLE_MS = 100.0  # the longest sleep: the loop writes its heartbeat in between
_TABLE_NS = 2_000_000  # how often gauges are written, and knobs read
_SPIN_US = 200.0  # how long a pool with cores of its own looks at its rings before it sleeps
_RECEIVE = 64  # requests a round: what has a slot is not kept waiting by many arrivals
_CALIBRATED = (8, 1, 16, 4)  # active slots of warm-up batches, after those that compile
_SEARCH_WIDTH = 8  # that a query may ask for, or the configured default if that is wider
_RECEIVED = {stage: f"trinity_pool_queries_{stage}_total" for stage in get_args(Stage)}
_MISSED = {stage: f"trinity_pool_missed_{stage}_total" for stage in get_args(Stage)}


class Pool:
    """One pool worker: ring server → scheduler → engine → ring server."""

    def __init__(self, worker: Worker, scheduler: Callable[[Policy], Scheduler[Request]] = Scheduler) -> None:
        config = worker.plan.config
        limits = config.pool
        policy = policy_of(limits)
        self._worker, self._table = worker, worker.table
        self._targeted = policy.prefill_target_ns > 0
        catalogue = PoolCatalogue(
            config.collections,
            worker.place.index,
            worker.log,
            strict=not worker.node_ready,
            suspicious=worker.faulted,
            opener=open_shard,
        )
        indexes = {shard.key: shard.index for shard in catalogue.served}
        worker.start.part("collections")
        self._engine = _open(worker, indexes, policy.engine_slots)
        self._scheduler = scheduler(policy)
        self._warm_up(indexes, SearchParams(1, limits.top_m, limits.search_width))
        worker.start.part("first searches")
        self._slots: list[Entry[Request] | None] = [None] * policy.engine_slots  # who has the engine's slot
        self._begin_ns = [0] * policy.engine_slots  # since when
        self._known: Memo[Parameters, tuple[Kind, SearchParams]] = Memo(_known)
        self._table_ns = 0  # when gauges are written next
        self._extends_ns = 0  # what this round's extends took
        self._arena = _arena(worker, catalogue.offer.max_dim)
        self._server = RingServer(
            worker.plan.endpoint(worker.name),
            catalogue.offer,
            epoch=worker.epoch,
            ring_slots=limits.ring_slots,
            max_k=limits.max_k,
            max_top_m=limits.max_top_m,
            spin_us=_SPIN_US if worker.place.spin else 0.0,
            arena=self._arena,
        )
        self._engine.interrupt_when(self._server.has_news)
        self._replacing = Replacing(catalogue, self._engine, self._server, worker.table)
        self._table.begin_knob("reserve", limits.reserve)
        self._table.begin_knob("flush_prefill_s", limits.flush_prefill_s)
        self._table.set("trinity_pool_slots", limits.slots)
        self._malformed = 0  # session messages that the metric has

    def _warm_up(self, indexes: Mapping[str, GraphIndex], params: SearchParams) -> None:
        """Queries through every collection: compiling and first touches belong to the start, not to a user's query.

        The scheduler learns what extends cost with few and with many active slots.
        """
        for name, index in indexes.items():
            self._extend_until_one_is_done(name, index.dim, 1, params)  # compiles
            for active in (min(active, self._engine.free_slots) for active in _CALIBRATED):
                for ns in self._extend_until_one_is_done(name, index.dim, active, params):
                    self._scheduler.cost.learn(active, ns)

    def _extend_until_one_is_done(self, name: str, dim: int, active: int, params: SearchParams) -> list[int]:
        """What each extend took, in ns."""
        engine, times, done = self._engine, [], False
        slots = [engine.admit(_direction(dim, n), params, name) for n in range(active)]
        while not done:
            begin_ns = time.monotonic_ns()
            done = len(engine.extend()) > 0
            times.append((time.monotonic_ns() - begin_ns) // engine.extends_made)
        for slot in slots:
            engine.release(slot)
        return times

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    def step(self) -> None:
        """One round of the loop."""
        begin = time.monotonic_ns()
        self._table.beat()
        self._receive()
        self._schedule()
        self._extends_ns = 0
        finished = self._extend()
        self._publish(finished)
        self._tell()
        if self._extends_ns:
            self._table.add("trinity_pool_rounds_total")
            self._table.add("trinity_pool_extend_seconds_total", self._extends_ns / 1e9)
            self._table.add("trinity_pool_round_seconds_total", (time.monotonic_ns() - begin - self._extends_ns) / 1e9)
        if not self._engine.active_slots:
            self._rest()

    def _tell(self) -> None:
        """Now and then the table learns how things are."""
        now = time.monotonic_ns()
        if now >= self._table_ns:
            self._table_ns = now + _TABLE_NS
            self._turn_knobs()
            self._replacing.step(now)
            self._write_gauges()

    def _turn_knobs(self) -> None:
        """What the supervisor's control loop wants by now."""
        self._scheduler.reserve = min(max(self._table.knob("reserve"), 0.0), 1.0)
        self._scheduler.flush_prefill_ns = int(min(max(self._table.knob("flush_prefill_s"), 0.0), 1.0) * 1e9)

    def _write_gauges(self) -> None:
        scheduler, table = self._scheduler, self._table
        waiting = scheduler.waiting
        table.set("trinity_pool_queue_prefill", waiting["prefill"])
        table.set("trinity_pool_queue_decode", waiting["decode"])
        table.set("trinity_pool_active_slots", self._engine.active_slots)
        table.set("trinity_pool_padded_slots", self._engine.padded_slots if self._engine.active_slots else 0)
        table.set("trinity_pool_paused_slots", scheduler.paused)
        table.set("trinity_pool_width", scheduler.width)
        table.set("trinity_pool_reserve_ratio", scheduler.reserve)
        table.set("trinity_pool_flush_prefill_seconds", scheduler.flush_prefill_ns / 1e9)
        sessions = self._server.statistics()
        table.set("trinity_pool_clients", sessions.clients)
        table.add(MALFORMED_MESSAGES.name, sessions.malformed - self._malformed)
        self._malformed = sessions.malformed

    def _rest(self) -> None:
        """Nothing runs: sleep until a request comes, or what is held back for company must wait no longer."""
        now = time.monotonic_ns()
        until = self._scheduler.held_until(now)
        if until is not None:
            self._server.wait(min((until - now) / 1e6, _IDLE_MS))
        elif not self.busy:
            self._server.wait(_IDLE_MS)

    # ---- receive

    def _receive(self) -> None:
        for request in self._server.receive(_RECEIVE):
            stage, now = request.parameters.stage, request.receive_ns
            self._table.add(_RECEIVED[stage])
            try:
                kind, _ = self._known[request.parameters]
                self._scheduler.add(Entry(stage, request.deadline_ns or NEVER_NS, now, request, kind), now)
            except GpuError:
                self._refuse(request, "invalid_request")
            except Overloaded:
                self._refuse(request, "overloaded")
            except DeadlineExceeded:
                self._refuse(request, "deadline_exceeded")
        for cancel in self._server.cancellations():
            self._cancel(cancel.client, cancel.request_id)

    def _cancel(self, client: int, request_id: int) -> None:
        for slot, entry in enumerate(self._slots):
            if entry is not None and (entry.query.client, entry.query.request_id) == (client, request_id):
                self._scheduler.left(entry)
                self._free(slot)
                self._server.publish(client, request_id, "cancelled")
                return
        waiting = self._scheduler.remove(lambda request: (request.client, request.request_id) == (client, request_id))
        if waiting is not None:
            self._server.publish(client, request_id, "cancelled")

    # ---- schedule

    def _schedule(self) -> None:
        now = time.monotonic_ns()
        changes = self._scheduler.next(now)
        for entry in changes.late:
            self._refuse(entry.query, "deadline_exceeded")
        for entry in changes.admitted:
            self._admit(entry, now)
        for entry in changes.paused:
            if entry.slot >= 0:  # it may have been refused by the engine just now
                self._engine.pause(entry.slot)
                self._table.add("trinity_pool_preemptions_total")
        for entry in changes.resumed:
            self._engine.resume(entry.slot)

    def _admit(self, entry: Entry[Request], now: int) -> None:
        request = entry.query
        try:
            kind, params = self._known[request.parameters]
            slot = self._engine.admit(request.vector, params, kind.collection)
        except GpuError:
            self._scheduler.left(entry)
            self._refuse(request, "invalid_request")
            return
        self._slots[slot], self._begin_ns[slot], entry.slot = entry, now, slot
        wait = POOL_WAIT_PREFILL if entry.stage == "prefill" else POOL_WAIT_DECODE
        self._table.observe(wait, (now - request.enqueue_ns) / 1e9)

    # ---- extend

    def _extend(self) -> list[int]:
        """Advance every active query, extend after extend, until it is worth while to look around; who finished."""
        engine, scheduler = self._engine, self._scheduler
        if not engine.active_slots:
            return []
        finished: list[int] = []
        extends = slot_steps = padded_steps = 0
        begin = time.monotonic_ns()
        until = begin + round_ns(scheduler)
        ask_ns = NEVER_NS if scheduler.held_back else begin + NEWS_NS
        over = False
        while not over:
            active = engine.active_slots
            finished += engine.extend().tolist()
            made = engine.extends_made
            extends += made
            slot_steps += made * active
            padded_steps += made * engine.padded_slots
            now = time.monotonic_ns()
            over = now >= until or not engine.active_slots or (bool(finished) and self._ends_round(finished))
            if now >= ask_ns:
                over = over or self._server.has_news()
                ask_ns = now + NEWS_NS
        scheduler.advanced(extends)
        scheduler.cost.learn(slot_steps / extends, (now - begin) / extends)
        self._extends_ns = now - begin
        add = self._table.add
        add("trinity_pool_extends_total", extends)
        add("trinity_pool_slot_steps_total", slot_steps)
        add("trinity_pool_padded_slot_steps_total", padded_steps)
        return finished

    def _ends_round(self, finished: list[int]) -> bool:
        return ends_round(self._scheduler, [entry.stage for slot in finished if (entry := self._slots[slot])])

    # ---- publish

    def _publish(self, finished: list[int]) -> None:
        for slot in finished:
            entry = self._slots[slot]
            assert entry is not None
            request = entry.query
            ids, distances = self._engine.result(slot)
            found = len(ids) if ids[-1] != -1 else int(np.count_nonzero(ids != -1))
            extends = self._engine.extends(slot)
            self._server.publish(
                request.client, request.request_id, "ok", ids[:found], distances[:found],
                extends=extends, begin_ns=self._begin_ns[slot],
            )  # fmt: skip
            self._scheduler.finished(entry, extends)
            self._free(slot)
            now = time.monotonic_ns()
            if now > (min(entry.due_ns, entry.deadline_ns) if self._targeted else entry.deadline_ns):
                self._table.add(_MISSED[entry.stage])
            self._table.observe(POOL_LATENCY, (now - request.enqueue_ns) / 1e9)
            self._table.observe(POOL_EXTENDS, extends)

    def _free(self, slot: int) -> None:
        self._slots[slot] = None
        self._engine.release(slot)

    def _refuse(self, request: Request, status: str) -> None:
        self._table.add("trinity_pool_queries_refused_total")
        self._table.add(f"trinity_pool_refused_{status}_total")
        self._server.publish(request.client, request.request_id, status)

    def drain(self) -> None:
        """Take nothing new: clients of a node with several pools turn to the others."""
        self._server.drain()

    def close(self) -> None:
        self._replacing.close()
        self._server.close()
        if self._arena is not None:
            self._arena.close()
        self._engine.close()


def _arena(worker: Worker, dim: int) -> DeviceArena | None:
    """Where clients on GPUs may put their vectors: in the memory of this worker's GPU, if it has one."""
    slots, device = worker.plan.config.pool.arena_slots, worker.place.device
    if device == "cpu" or not slots:
        return None
    from ipc.cuda_memory import CudaMemory

    try:
        memory = CudaMemory.create(arena_bytes(slots, 4 * dim), device)
        _ = memory.reference
    except IpcError as error:  # a MIG device has no CUDA IPC, say
        worker.log.warning("no arena for vectors from GPUs: %s", error)
        return None
    return DeviceArena(memory, slots, 4 * dim, worker.epoch)


def _open(worker: Worker, indexes: Mapping[str, GraphIndex], slots: int) -> Engine:
    """The engine on this worker's device. Raises ConfigError where it cannot be there, or not with these indexes."""
    limits, device = worker.plan.config.pool, worker.place.device
    try:
        return open_engine(
            device,
            indexes,
            slots=slots,
            max_top_m=limits.max_top_m,
            max_k=limits.max_k,
            max_search_width=max(limits.search_width, _SEARCH_WIDTH),
            extends_per_launch=limits.extends_per_launch,
        )
    except OutOfDeviceMemory as error:
        raise ResourceBusy(f"pool.devices: {worker.name} does not fit on {device!r}: {error}") from error
    except DeviceUnavailable as error:
        raise ConfigError(f"pool.devices: {worker.name} cannot run on {device!r}: {error}") from error


def _direction(dim: int, number: int) -> NDArray[np.float32]:
    """Queries that differ, whatever the data."""
    return np.cos(np.arange(dim, dtype=np.float32) * (number + 1))


def _known(asked: Parameters) -> tuple[Kind, SearchParams]:
    """What scheduler and engine make of a query's parameters. Raises `GpuError`."""
    params = SearchParams(asked.k, asked.top_m, asked.search_width, asked.patience)
    return Kind(key_of(asked.collection, asked.identity), asked.top_m, asked.search_width, asked.patience), params


def policy_of(limits: PoolSection) -> Policy:
    """The scheduler's settings, as configured."""
    return Policy(
        slots=limits.slots,
        spare=min(limits.spare_slots, MAX_SLOTS - limits.slots),
        queue=limits.queue,
        reserve=limits.reserve,
        prefill_target_ns=int(limits.prefill_target_s * 1e9),
        aging_ns=int(limits.aging_s * 1e9),
        flush_prefill_ns=int(limits.flush_prefill_s * 1e9),
        flush_ns=int(limits.flush_s * 1e9),
        max_pauses=limits.max_pauses,
        decode_stall_ns=int(limits.decode_stall_s * 1e9),
    )


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
