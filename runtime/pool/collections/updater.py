"""A pool's collections change between two extends: the engine gets the new index, sessions are renewed, the old index
goes when nobody can ask for it any more."""

from gpu import Engine, GpuError
from ipc import SessionServer
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool.collections.catalogue import Change, PoolCatalogue
from runtime.pool.collections.live import LiveCollections
from runtime.pool.collections.scopes import Scopes
from runtime.pool.collections.shard import Shard, desk_number
from runtime.pool.loop_driver import PoolLoop


class CollectionUpdater:
    """Brings what a catalogue finds to a pool's engine and its clients. One thread; `step` never waits.

    A query is answered from the index that its session was offered, however long it waits: what was replaced stays in
    the engine until no session offers it and no slot searches it.
    """

    def __init__(
        self,
        catalogue: PoolCatalogue,
        engine: Engine,
        server: SessionServer,
        table: WorkerTable,
        loop: PoolLoop,
        scopes: Scopes,
        live: LiveCollections,
    ) -> None:
        self._catalogue, self._engine, self._server, self._table = catalogue, engine, server, table
        self._loop, self._scopes, self._live, self._backend = loop, scopes, live, engine.backend()
        for shard in catalogue.served:
            if shard.live is None:
                self._take_filters(shard)
        self._names = catalogue.names
        self._leaving: dict[str, Shard] = {}
        self._pending: list[Change] = []
        table.begin_knob("reload", 0.0)
        table.begin_knob("reload_of", -1.0)
        self._reload = table.knob("reload")  # what this process has begun with is what lies there now
        self._tell()

    def step(self, now_ns: int) -> bool:
        """Do what is to be done now. Whether another catalogue is offered."""
        self._hear()
        renewed, pending, self._pending = False, self._pending, []
        for change in (*pending, *self._catalogue.poll(now_ns)):
            renewed |= self._apply(change)
        if renewed:
            self._server.renew(self._catalogue.offer)
        renewed |= self.follow_writers(now_ns)
        for key, shard in tuple(self._leaving.items()):
            if self._server.in_use(shard.served.name, shard.served.identity):
                continue
            if self._unload(key, shard):
                del self._leaving[key]
        self._tell()
        return renewed

    def _hear(self) -> None:
        """What the supervisor wants reloaded."""
        wanted = self._table.knob("reload")
        if wanted != self._reload and not self._catalogue.reloading:
            self._reload, number = wanted, int(self._table.knob("reload_of"))
            self._catalogue.reload(self._names if number < 0 else self._names[number : number + 1])

    def _apply(self, change: Change) -> bool:
        """Whether sessions are to be renewed."""
        if change.new is not None:
            if change.new.key in self._leaving:  # the same build, taken out and found whole: not before that has left
                self._pending.append(change)
                return False
            try:
                self._load(change.new)
            except GpuError as error:
                self._catalogue.refuse(change, str(error))
                return False
            self._catalogue.accept(change)
        if change.old is not None:
            self._leaving[change.old.key] = change.old
        return True

    def _load(self, shard: Shard) -> None:
        """Have the engine search it. Raises `GpuError`."""
        if shard.live is not None:
            self._live.begin(shard.key, shard.live, shard.served.demanded)
        elif shard.index is not None:
            self._engine.load(shard.key, shard.index)
            self._take_filters(shard)

    def _unload(self, key: str, shard: Shard) -> bool:
        """Whether it has left the engine, now that no session offers it."""
        if shard.live is not None:
            return self._live.end(key, self._loop.parts_in_use(), self._loop.forget_filters)
        number = desk_number(shard.served, self._backend.number(key))
        if not self._engine.unload(key):
            return False
        self._loop.forget_filters(self._scopes.withdraw(number))
        return True

    def _take_filters(self, shard: Shard) -> None:
        """Filters of a collection are evaluated from now on."""
        number = self._backend.number(shard.key)
        self._scopes.serve(desk_number(shard.served, number), shard.filtered(number))

    @property
    def due_ns(self) -> int:
        """When live collections are to be looked at again."""
        return self._live.due_ns

    def follow_writers(self, now_ns: int) -> bool:
        """Bring live collections up to date, if that is due. Whether sessions were told of attributes that are new."""
        if now_ns < self._live.due_ns:
            return False
        self._live.step(now_ns, self._loop.parts_in_use, self._loop.forget_filters)
        learnt = False
        for shard in self._catalogue.served:
            if shard.live is not None:
                schema = {name: str(kind) for name, kind in self._live.schema(shard.key).items()}
                if schema != shard.served.attributes:
                    self._catalogue.learn(shard.served.name, schema)
                    learnt = True
        if learnt:
            self._server.renew(self._catalogue.offer)
        return learnt

    def _tell(self) -> None:
        catalogue, table = self._catalogue, self._table
        table.set(PoolMetrics.UNAVAILABLE, catalogue.unavailable)
        table.set(PoolMetrics.CHECKSUMS, catalogue.checked_share)
        if table.note != (note := catalogue.note):
            table.note = note
        if not catalogue.reloading and not self._pending:
            table.set(PoolMetrics.RELOAD_REFUSED, catalogue.refused)
            table.set(PoolMetrics.RELOAD, self._reload)

    def close(self) -> None:
        """End what is done beside the loop."""
        self._live.close()
        self._catalogue.close()
