"""A vector-pool worker's process: the compiled loop, and between its turns what only Python can do."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpu import DeviceUnavailable, Engine, GraphIndex, OutOfDeviceMemory, open_engine
from gpu.slots import MAX_SLOTS
from ipc import IpcError, Served, SessionServer
from ipc.session.device_arena import DeviceArena, arena_bytes
from runtime.errors import CollectionError, ConfigError, ResourceBusy
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.worker import Worker
from runtime.pool.collections.catalogue import PoolCatalogue
from runtime.pool.collections.live import LiveCollections, like_segments
from runtime.pool.collections.scopes import Scopes
from runtime.pool.collections.shard import OpenShard, Shard, desk_number, key_of, open_shard
from runtime.pool.collections.updater import CollectionUpdater
from runtime.pool.loop_driver import SERVER_EVENT, PoolLoop
from runtime.pool.settings import policy_of
from runtime.pool.sizing import Measured, fewest_slots, measure
from runtime.retrieval import answer_store
from runtime.retrieval.embedding.loading import embedder_dim

_SPIN_NS = 200_000  # how long a pool with cores of its own looks at its rings before it sleeps
_SEARCH_WIDTH = 8  # that a query may ask for, or the configured default if that is wider
AUTO_SLOTS = {"cpu": 32}
AUTO_GPU_SLOTS = 512
"""The most active slots that `slots = "auto"` considers."""
SLOTS_UNMEASURED = 4
"""As long as there is no collection to measure with."""
MakeArena = Callable[[Worker, int], DeviceArena | None]


@dataclass(frozen=True)
class Timing:
    """`control_ns`: how often the loop returns to Python, for about 0.15 ms each, when nothing calls it before.
    `look_ns`: how often it is looked whether an unavailable collection's files have changed."""

    control_ns: int = 100_000_000
    look_ns: int = 5_000_000_000


class Pool:
    """One pool worker: rings → loop → rings. Its parts: `engine`, `server`, `loop`, `catalogue`, `arena`."""

    def __init__(
        self,
        worker: Worker,
        timing: Timing | None = None,
        *,
        opener: OpenShard = open_shard,
        make_arena: MakeArena | None = None,
    ) -> None:
        """`opener` and `make_arena` (given the longest vector): in place of what opens a collection's files, and of
        what makes an arena in the memory of the worker's GPU."""
        self._timing = timing or Timing()
        config = worker.plan.config
        limits = config.pool
        self._worker, self._table = worker, worker.table
        if config.stores_answers:
            _make_answers(worker)
        self.catalogue = catalogue = PoolCatalogue(
            worker.plan.collections,
            worker.placement.index,
            worker.log,
            strict=not worker.node_ready,
            suspicious=worker.faulted,
            opener=opener,
            look_every_ns=self._timing.look_ns,
        )
        indexes = {shard.key: shard.index for shard in catalogue.served if shard.index is not None}
        worker.startup.mark("collections")
        most = (
            limits.slots if isinstance(limits.slots, int) else AUTO_SLOTS.get(worker.placement.device, AUTO_GPU_SLOTS)
        )
        self.engine = _open(worker, indexes, catalogue.served, min(2 * most, MAX_SLOTS))
        self._backend = backend = self.engine.backend()
        self.scopes = Scopes()
        self.live = LiveCollections(self.engine, self.scopes, worker.log)
        with _fits(worker):
            for shard in catalogue.served:
                if shard.live is not None:
                    self.live.begin(shard.key, shard.live, shard.served.demanded)
        measured = self._measure(indexes | self.live.indexes, most)
        policy = policy_of(config, slots_of(limits.slots, measured))
        worker.startup.mark("first searches")
        self.arena = (make_arena or arena_of)(worker, catalogue.offer.max_dim)
        self.server = SessionServer(
            worker.plan.endpoint(worker.name),
            catalogue.offer,
            epoch=worker.epoch,
            ring_slots=limits.ring_slots,
            max_k=limits.max_k,
            max_top_m=limits.max_top_m,
            arena=self.arena,
            number=self._desk_number,
        )
        self.loop = PoolLoop(
            policy,
            self.server,
            backend,
            worker.table,
            max_dim=catalogue.offer.max_dim,
            max_width=max(limits.search_width, _SEARCH_WIDTH),
            spin_ns=_SPIN_NS if worker.placement.spin else 0,
            scopes=self.scopes,
        )
        for collection in measured:
            self.loop.learn(collection)
        self.loop.compile()
        worker.startup.mark("loop")
        self.engine.interrupt_when(self.server.has_requests)
        self._updater = CollectionUpdater(
            catalogue, self.engine, self.server, worker.table, self.loop, self.scopes, self.live
        )
        self._table.begin_knob("reserve", limits.reserve)
        self._table.begin_knob("flush_prefill_s", limits.flush_prefill_s)
        self._table.set(PoolMetrics.SLOTS, policy.slots)
        self._control_ns = 0  # when Python is next needed
        self.control_turns = 0
        self._turn_knobs()

    def _desk_number(self, served: Served) -> int:
        key = key_of(served.name, served.identity)
        live = self.live.number_of(key)
        return desk_number(served, self._backend.number(key) if live is None else live)

    def _measure(self, indexes: Mapping[str, GraphIndex], most: int) -> list[list[Measured]]:
        """Queries through every collection: compiling and first touches belong to the start, not to a user's query."""
        limits, number = self._worker.plan.config.pool, self._backend.number
        return [
            measure(self._backend, index.data, number(name), limits.top_m, limits.search_width, most)
            for name, index in indexes.items()
        ]

    @property
    def busy(self) -> bool:
        """Whether a query is in the pool."""
        return self.loop.busy or self.server.copying

    def step(self) -> None:
        """One turn: queries are served, until there is something to do that only Python can."""
        stopped = self.loop.serve(min(self._control_ns, self._updater.due_ns))
        now = time.monotonic_ns()
        if stopped == SERVER_EVENT or now >= self._control_ns:
            self._control(now)
        else:
            self._updater.follow_writers(now)

    def _control(self, now: int) -> None:
        """Clients come and go, knobs turn, collections change; the table learns how things are."""
        self._control_ns = now + self._timing.control_ns
        self.control_turns += 1
        self._table.beat()
        self.server.housekeep(now)
        self.loop.drop_gone_clients()
        self._turn_knobs()
        if self._updater.step(now):
            self.loop.resize_vectors(self.catalogue.offer.max_dim)
        self._write_gauges()

    def _turn_knobs(self) -> None:
        """What the supervisor's control loop wants by now."""
        reserve = min(max(self._table.knob("reserve"), 0.0), 1.0)
        flush_s = min(max(self._table.knob("flush_prefill_s"), 0.0), 60.0)
        self.loop.set_knobs(reserve, int(flush_s * 1e9))
        self._table.set(PoolMetrics.RESERVE, reserve)
        self._table.set(PoolMetrics.FLUSH_PREFILL, flush_s)

    def _write_gauges(self) -> None:
        loop, table = self.loop, self._table
        prefill, decode = loop.waiting
        active = loop.active
        table.set(PoolMetrics.QUEUE_DEPTH["prefill"], prefill)
        table.set(PoolMetrics.QUEUE_DEPTH["decode"], decode)
        table.set(PoolMetrics.ACTIVE_SLOTS, active)
        table.set(PoolMetrics.PADDED_SLOTS, loop.padded if active else 0)
        table.set(PoolMetrics.PAUSED_SLOTS, loop.paused)
        table.set(PoolMetrics.CLIENTS, self.server.client_count)
        table.total(PoolMetrics.MALFORMED, self.server.malformed)

    def drain(self) -> None:
        """Take nothing new: clients of a node with several pools turn to the others."""
        self.server.drain()

    def close(self) -> None:
        self._updater.close()
        self.server.close()
        self.engine.close()  # first: freeing the GPU's memory would wait for blocks that stay on it
        if self.arena is not None:
            self.arena.close()


def slots_of(configured: int | str, measured: Sequence[Sequence[Measured]]) -> int:
    """N: as configured, or as the collection asks for that wants most of them."""
    if isinstance(configured, int):
        return configured
    return max((fewest_slots(one) for one in measured), default=SLOTS_UNMEASURED)


def arena_of(worker: Worker, dim: int) -> DeviceArena | None:
    """Where clients on GPUs may put their vectors: in the memory of this worker's GPU, if it has one."""
    slots, device = worker.plan.config.pool.arena_slots, worker.placement.device
    if device == "cpu" or not slots:
        return None
    from ipc.memory.cuda import CudaMemory

    try:
        memory = CudaMemory.create(arena_bytes(slots, 4 * dim), device)
        _ = memory.reference
    except IpcError as error:  # a MIG device has no CUDA IPC, say
        worker.log.warning("no arena for vectors from GPUs: %s", error)
        return None
    return DeviceArena(memory, slots, 4 * dim, worker.epoch)


def _make_answers(worker: Worker) -> None:
    """Have the collection of stored answers, whoever starts first. Without it the pool serves the others."""
    try:
        answer_store.ensure(worker.plan.answers, embedder_dim(worker.plan.config.answer_cache.embedder))
    except CollectionError as error:
        worker.log.warning("no answers are stored: %s", error.message)


def _open(worker: Worker, indexes: Mapping[str, GraphIndex], served: Sequence[Shard], slots: int) -> Engine:
    """The engine on this worker's device. Raises ConfigError where it cannot be there, or not with these indexes."""
    limits, device = worker.plan.config.pool, worker.placement.device
    lives = {} if device == "cpu" else {shard.key: shard.live for shard in served if shard.live is not None}
    samples = {f"{key}/sample": like_segments(live.description) for key, live in lives.items()}
    with _fits(worker):
        engine = open_engine(
            device,
            {**indexes, **samples},
            slots=slots,
            max_top_m=limits.max_top_m,
            max_k=limits.max_k,
            max_search_width=max(limits.search_width, _SEARCH_WIDTH),
            extends_per_launch=limits.extends_per_launch,
            resident=worker.placement.exclusive_gpu and limits.form == "auto",
        )
    for name in samples:  # that there is room for the like of it is all that was wanted
        engine.unload(name)
    return engine


@contextlib.contextmanager
def _fits(worker: Worker) -> Iterator[None]:
    """Raises ResourceBusy for what the worker's device has no room for, ConfigError where it cannot be used."""
    device = worker.placement.device
    try:
        yield
    except OutOfDeviceMemory as error:
        raise ResourceBusy(f"pool.devices: {worker.name} does not fit on {device!r}: {error}") from error
    except DeviceUnavailable as error:
        raise ConfigError(f"pool.devices: {worker.name} cannot run on {device!r}: {error}") from error


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
