"""A worker's library follows the pools that its client is attached to, and the worker's table tells how that goes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import starmap

from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import RetrievingMetrics
from runtime.retrieval.collection_registry import CollectionRegistry

_EVERY_NS = 500_000_000
_RELOADING_NS = 20_000_000


class BuildFollower:
    """`step` as often as one likes; it acts twice a second, and oftener while a reload is not over here.

    offered: the builds of a collection that the pools serve, as the worker's client knows.
    """

    def __init__(
        self, library: CollectionRegistry, offered: Callable[[str], Sequence[str]], table: WorkerTable
    ) -> None:
        self._library, self._offered, self._table = library, offered, table
        self._due_ns = 0
        table.begin_knob("reload", 0.0)
        table.begin_knob("reload_of", -1.0)

    def step(self, now_ns: int) -> None:
        """Open the documents of what is served by now, and say of which collections they are missing."""
        reload = self._table.knob("reload")
        reloading = reload != self._table.value(RetrievingMetrics.RELOAD)
        if now_ns < self._due_ns - reloading * (_EVERY_NS - _RELOADING_NS):
            return
        self._due_ns = now_ns + _EVERY_NS
        builds = {collection: self._offered(collection) for collection in self._library.dims}
        for collection, offered in builds.items():
            self._library.follow(collection, offered)
        asked = self._of_the_reload(builds) if reloading else ()
        troubles = self._library.troubles
        self._table.set(RetrievingMetrics.WITHOUT_DOCUMENTS, len(troubles))
        note = "; ".join(f"collection {name}: {trouble}" for name, trouble in troubles.items())
        if self._table.note != note:
            self._table.note = note
        refused = any(starmap(self._library.refused, asked))
        if reloading and (refused or all(starmap(self._library.up_to_date, asked))):
            self._table.set(RetrievingMetrics.RELOAD_REFUSED, refused)
            self._table.set(RetrievingMetrics.RELOAD, reload)

    def _of_the_reload(self, builds: Mapping[str, Sequence[str]]) -> Sequence[tuple[str, Sequence[str]]]:
        """Of these collections, which are in the configuration's order, that which is reloaded; or all."""
        number = int(self._table.knob("reload_of"))
        return list(builds.items())[number : number + 1] if number >= 0 else list(builds.items())
