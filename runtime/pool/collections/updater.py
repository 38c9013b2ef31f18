"""Replacement of a pool's collections between two extends: load the new index, renew sessions, unload the old index."""

from gpu import GpuError
from ipc import SessionServer
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool.collections.catalogue import Change, PoolCatalogue
from runtime.pool.collections.served import ServedCollections
from runtime.pool.collections.shard import Shard
from runtime.pool.loop_driver import PoolLoop


class CollectionUpdater:
    """Applies a catalogue's changes to a pool's engine and sessions. One thread; `step` never blocks.

    A query is answered from the index in its session's catalogue: a replaced index stays in the engine until no session
    offers it and no slot searches it.
    """

    def __init__(
        self,
        catalogue: PoolCatalogue,
        server: SessionServer,
        table: WorkerTable,
        loop: PoolLoop,
        live: ServedCollections,
    ) -> None:
        self._catalogue, self._server, self._table = catalogue, server, table
        self._loop, self._live = loop, live
        self._names, self._offered = catalogue.names, catalogue.offer.served
        self._unloading: dict[str, Shard] = {}
        self._pending: list[Change] = []
        table.begin_knob("reload", 0.0)
        table.begin_knob("reload_of", -1.0)
        self._reload = table.knob("reload")  # this process has started with the current files
        self._report()

    def step(self, now_ns: int) -> bool:
        """Apply pending changes. Return whether the offered catalogue has changed."""
        self._poll_reload()
        renewed, pending, self._pending = False, self._pending, []
        for change in (*pending, *self._catalogue.poll(now_ns)):
            renewed |= self._apply(change)
        if renewed:
            self._renew()
        renewed |= self.update_live(now_ns)
        for key, shard in tuple(self._unloading.items()):
            if self._server.in_use(shard.served.name, shard.served.identity):
                continue
            if self._live.remove(key, self._loop.parts_in_use(), self._loop.filters_changed):
                del self._unloading[key]
        self._report()
        return renewed

    def _poll_reload(self) -> None:
        """Start a reload that the supervisor has requested."""
        requested = self._table.knob("reload")
        if requested != self._reload and not self._catalogue.reloading:
            self._reload, number = requested, int(self._table.knob("reload_of"))
            self._catalogue.reload(self._names if number < 0 else self._names[number : number + 1])

    def _apply(self, change: Change) -> bool:
        """Apply one change. Return whether sessions are to be renewed."""
        if change.new is not None:
            if change.new.key in self._unloading:  # the same build, found good again: wait until it is unloaded
                self._pending.append(change)
                return False
            try:
                self._live.add(change.new.key, change.new.reader, change.new.served.demanded)
            except GpuError as error:
                self._catalogue.refuse(change, str(error))
                return False
            self._catalogue.accept(change)
        if change.old is not None:
            self._unloading[change.old.key] = change.old
        return True

    @property
    def due_ns(self) -> int:
        """When collections are next due to be read."""
        return self._live.due_ns

    def update_live(self, now_ns: int) -> bool:
        """Apply new writes, if that is due. Return whether sessions were renewed."""
        self._live.look()
        if now_ns < self._live.due_ns:
            return False
        self._live.step(now_ns, self._loop.parts_in_use, self._loop.filters_changed)
        changed = self._catalogue.offer.served != self._offered
        if changed:
            self._renew()
        return changed

    def _renew(self) -> None:
        """Tell the sessions what is served now."""
        offer = self._catalogue.offer
        self._offered = offer.served
        self._server.renew(offer)

    def _report(self) -> None:
        """Write the collections' state into the metrics table."""
        catalogue, table = self._catalogue, self._table
        table.set(PoolMetrics.UNAVAILABLE, catalogue.unavailable)
        table.set(PoolMetrics.CHECKSUMS, catalogue.checked_share)
        if table.note != (note := catalogue.note):
            table.note = note
        if not catalogue.reloading and not self._pending:
            table.set(PoolMetrics.RELOAD_REFUSED, catalogue.reload_failed)
            table.set(PoolMetrics.RELOAD, self._reload)

    def close(self) -> None:
        """Stop background tasks."""
        self._live.close()
        self._catalogue.close()
