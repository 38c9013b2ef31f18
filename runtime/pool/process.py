"""Process of a vector-pool worker: drives the compiled loop, and between its runs the control work in Python."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu import DeviceUnavailable, Engine, GraphIndex, OutOfDeviceMemory, open_engine
from gpu.slots import MAX_SLOTS
from ipc import IpcError, Served, SessionServer
from ipc.ring.exchange import SessionCollection
from ipc.session.device_arena import DeviceArena, arena_bytes
from runtime.errors import CollectionError, ConfigError, ResourceBusy, TrinityError
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.worker import Worker
from runtime.node.worker_config import MAX_TOP_M, SEARCH_WIDTH
from runtime.pool.collections.catalogue import PoolCatalogue
from runtime.pool.collections.scopes import Scopes
from runtime.pool.collections.served import ServedCollections, sample_index
from runtime.pool.collections.shard import OpenShard, Shard, engine_key, open_shard
from runtime.pool.collections.updater import CollectionUpdater
from runtime.pool.loop_driver import SERVER_EVENT, PoolLoop
from runtime.pool.loop_parts import compiled_in_background
from runtime.pool.settings import policy_of
from runtime.pool.sizing import BUDGET_NS, ExtendCost, fewest_slots, measure
from runtime.retrieval import answer_store
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, embedder_dim
from runtime.retrieval.stores.collection import ensure

_ARENA_SLOTS = 4096  # query vectors that clients on GPUs may have in this GPU's memory: 64 for each of 64 clients
_SPIN_NS = 200_000  # how long a pool with cores of its own spins on its rings before it sleeps
_SWITCH_S = 0.0005  # how long the thread that resolves filters keeps the interpreter's lock when the loop wants it
_MAX_SEARCH_WIDTH = 8  # of a query
AUTO_SLOTS = {"cpu": 32}
AUTO_GPU_SLOTS = 512
"""Most active slots that `slots = "auto"` considers."""
DEFAULT_SLOTS = 4
"""Of a pool without a collection that could be measured."""
MakeArena = Callable[[Worker, int], DeviceArena | None]


@dataclass(frozen=True)
class Timing:
    """Intervals of a pool's control work.

    `control_ns`: longest run of the loop without Python's control work, which takes about 0.15 ms. `check_ns`: how
    often the files of an unavailable collection are checked for changes.
    """

    control_ns: int = 100_000_000
    check_ns: int = 5_000_000_000


class Pool:
    """One pool worker: its `engine`, session `server`, `loop`, `catalogue`, `live` collections and `arena`."""

    def __init__(
        self,
        worker: Worker,
        timing: Timing | None = None,
        *,
        opener: OpenShard = open_shard,
        make_arena: MakeArena | None = None,
    ) -> None:
        """`opener` opens a collection's files; `make_arena` makes a GPU arena for vectors of a given dimension.

        Tests replace both.
        """
        self._timing = timing or Timing()
        config = worker.plan.config
        limits = config.pool
        self._worker, self._table = worker, worker.table
        if config.stores_answers:
            _ensure_answers(worker)
        if config.stores.path:
            _ensure_stores(worker)
        self.catalogue = catalogue = PoolCatalogue(
            worker.plan.collections,
            worker.placement.index,
            worker.log,
            stage=worker.placement.stage,
            strict=not worker.node_ready,
            suspicious=worker.faulted,
            opener=opener,
            check_every_ns=self._timing.check_ns,
        )
        worker.startup.mark("collections")
        auto = AUTO_SLOTS.get(worker.placement.device, AUTO_GPU_SLOTS)
        most = limits.slots if isinstance(limits.slots, int) else auto
        with compiled_in_background(worker.placement.device):
            self.engine = _open_engine(worker, catalogue.served, min(2 * most, MAX_SLOTS))
        self._backend = backend = self.engine.backend()
        self.scopes = Scopes()
        self.live = ServedCollections(self.engine, self.scopes, worker.log)
        with _device_errors(worker):
            for shard in catalogue.served:
                self.live.add(shard.key, shard.reader, shard.served.demanded, self.engine.dims)
        measured = self._measure(self.live.indexes, most)
        policy = policy_of(config, slots_of(limits.slots, measured), worker.placement.device)
        worker.startup.mark("first searches")
        self.arena = (make_arena or arena_of)(worker, catalogue.offer.max_dim)
        self.server = SessionServer(
            worker.plan.endpoint(worker.name),
            catalogue.offer,
            epoch=worker.epoch,
            ring_slots=worker.plan.ring_slots,
            max_k=worker.plan.max_k,
            max_top_m=MAX_TOP_M,
            arena=self.arena,
            searches=self._searches,
        )
        self.loop = PoolLoop(
            policy,
            self.server,
            backend,
            worker.table,
            max_dim=catalogue.offer.max_dim,
            max_width=_MAX_SEARCH_WIDTH,
            spin_ns=_SPIN_NS if worker.placement.spin else 0,
            scopes=self.scopes,
        )
        for collection in measured:
            self.loop.learn(collection)
        self.loop.compile()
        worker.startup.mark("loop")
        if (writes := self.live.watch.fileno()) is not None:
            self.server.wake_on(writes)
        self.engine.interrupt_when(self.server.has_requests)
        self._updater = CollectionUpdater(catalogue, self.server, worker.table, self.loop, self.live)
        self._table.begin_knob("reserve", limits.reserve)
        self._table.begin_knob("flush_prefill_s", 0.0)
        self._table.set(PoolMetrics.SLOTS, policy.slots)
        self._control_ns = 0  # when control work is next due
        self.control_runs = 0
        self._apply_knobs()

    def _searches(self, served: Served) -> SessionCollection:
        """Return what requests without a filter search: nothing where every request must have one."""
        key = engine_key(served.name, served.identity)
        live = self.live.find(key)
        assert live is not None, "it is in the catalogue"
        return SessionCollection(number=live.scope, scope=-1 if served.demanded else live.scope)

    def _measure(self, indexes: Mapping[str, GraphIndex], most: int) -> list[list[ExtendCost]]:
        """Measure extends over every collection. This also compiles the engine and faults in memory at start."""
        limits, number = self._worker.plan.config.pool, self._backend.number
        part_ns = BUDGET_NS // max(len(indexes), 1)
        return [
            measure(self._backend, index.data, number(name), limits.top_m, SEARCH_WIDTH, most, budget_ns=part_ns)
            for name, index in indexes.items()
        ]

    @property
    def busy(self) -> bool:
        """Whether any query is in the pool."""
        return self.loop.busy

    def step(self) -> None:
        """Serve queries until control work is due, and do it."""
        stopped = self.loop.serve(min(self._control_ns, self._updater.due_ns))
        now = time.monotonic_ns()
        self._updater.update_live(now)
        if now >= self._control_ns or (stopped == SERVER_EVENT and self.server.has_events):
            self._control(now)

    def _control(self, now: int) -> None:
        """Do the control work: sessions, knobs, changes of collections, heartbeat and gauges."""
        self._control_ns = now + self._timing.control_ns
        self.control_runs += 1
        self._table.beat()
        self.server.housekeep(now)
        self.loop.drop_gone_clients()
        self.loop.expire_filtered(now)
        self._apply_knobs()
        if self._updater.step(now):
            self.loop.resize_vectors(self.catalogue.offer.max_dim)
        self._write_gauges()

    def _apply_knobs(self) -> None:
        """Apply the knobs that the supervisor's control loop has set."""
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
        """Accept no new requests: clients of a node with several pools use the others."""
        self.server.drain()

    def close(self) -> None:
        self._updater.close()
        self.loop.close()
        self.server.close()
        self.engine.close()  # first: freeing the GPU's memory would wait for a resident kernel
        if self.arena is not None:
            self.arena.close()


def slots_of(configured: int | str, measured: Sequence[Sequence[ExtendCost]]) -> int:
    """Return N: as configured, or the largest that any collection's measurement gives."""
    if isinstance(configured, int):
        return configured
    return max((fewest_slots(costs) for costs in measured if costs), default=DEFAULT_SLOTS)


def arena_of(worker: Worker, dim: int) -> DeviceArena | None:
    """Return an arena in this worker's GPU memory, for vectors of clients on GPUs; None without a GPU or CUDA IPC."""
    device = worker.placement.device
    if device == "cpu":
        return None
    from ipc.memory.cuda import CudaMemory

    try:
        memory = CudaMemory.create(arena_bytes(_ARENA_SLOTS, 4 * dim), device)
        _ = memory.reference
    except IpcError as error:  # for example on a MIG device
        worker.log.warning("vectors from GPUs go through host memory: %s", error)
        return None
    return DeviceArena(memory, _ARENA_SLOTS, 4 * dim, worker.epoch)


def _ensure_answers(worker: Worker) -> None:
    """Create the answer cache's collection if it does not exist. On failure the pool serves the other collections."""
    try:
        answer_store.ensure(worker.plan.answers, embedder_dim(DEFAULT_EMBEDDER))
    except CollectionError as error:
        worker.log.warning("the answer cache is unavailable: %s", error.message)


def _ensure_stores(worker: Worker) -> None:
    """Create the collection of the stores' passages if it does not exist. On failure the others are served."""
    try:
        ensure(Path(worker.plan.config.stores.path) / "collection", DEFAULT_EMBEDDER)
    except TrinityError as error:
        worker.log.warning("vector stores are unavailable: %s", error.message)


def _open_engine(worker: Worker, served: Sequence[Shard], slots: int) -> Engine:
    """Open the engine on this worker's device. Raises ConfigError, ResourceBusy."""
    limits, device = worker.plan.config.pool, worker.placement.device
    indexes, samples = dict[str, GraphIndex](), dict[str, GraphIndex]()
    for shard in served if device != "cpu" else ():  # buffers of a GPU get their sizes when it is opened
        segments = shard.reader.state.segments
        indexes |= {f"{shard.key}/{segment.info.number}": segment.index for segment in segments}
        if not segments:
            samples[f"{shard.key}/sample"] = sample_index(shard.reader.description)
    with _device_errors(worker):
        engine = open_engine(
            device,
            {**indexes, **samples},
            slots=slots,
            max_top_m=MAX_TOP_M,
            max_k=worker.plan.max_k,
            max_search_width=_MAX_SEARCH_WIDTH,
            resident=worker.placement.exclusive_gpu and limits.form == "auto",
        )
    for name in samples:  # they were loaded for these sizes only
        engine.unload(name)
    return engine


@contextlib.contextmanager
def _device_errors(worker: Worker) -> Iterator[None]:
    """Translate device errors: ResourceBusy if memory is short, ConfigError if the device cannot be used."""
    device = worker.placement.device
    try:
        yield
    except OutOfDeviceMemory as error:
        raise ResourceBusy(f"pool.devices: {worker.name} does not fit on {device!r}: {error}") from error
    except DeviceUnavailable as error:
        raise ConfigError(f"pool.devices: {worker.name} cannot run on {device!r}: {error}") from error


def run(worker: Worker) -> None:
    """Run a pool worker: serve until it is stopped, then finish its queries (the supervisor bounds that time)."""
    pool = Pool(worker)
    sys.setswitchinterval(_SWITCH_S)
    worker.ready()
    while not worker.stopping:
        pool.step()
    pool.drain()
    pool.step()  # receive requests that clients sent before they saw the drain
    while pool.busy:
        pool.step()
    pool.close()
