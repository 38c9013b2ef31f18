"""Reload handling of a worker: its registry follows the builds that its pools serve."""

from collections.abc import Callable, Mapping, Sequence
from itertools import starmap

from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import RetrievingMetrics
from runtime.retrieval.collection_registry import CollectionRegistry

_EVERY_NS = 500_000_000
_RELOADING_NS = 20_000_000


class BuildFollower:
    """Opens the documents of builds that the pools have begun to serve, and reports the state in the worker's table.

    `step` may be called at any rate: it acts twice a second, and every 20 ms while a reload is pending here.

    served: returns the builds of a collection that the pools serve, as the worker's client knows them. report: called
    as often as it acts, to set more metrics.
    """

    def __init__(
        self,
        registry: CollectionRegistry,
        served: Callable[[str], Sequence[str]],
        table: WorkerTable,
        report: Callable[[WorkerTable], None] = lambda table: None,
    ) -> None:
        self._registry, self._served, self._table, self._report = registry, served, table, report
        self._due_ns = 0
        table.begin_knob("reload", 0.0)
        table.begin_knob("reload_of", -1.0)

    def step(self, now_ns: int) -> None:
        """Open the documents of the builds served now; report collections without documents, and finished reloads."""
        reload = self._table.knob("reload")
        reloading = reload != self._table.value(RetrievingMetrics.RELOAD)
        if now_ns < self._due_ns - reloading * (_EVERY_NS - _RELOADING_NS):
            return
        self._due_ns = now_ns + _EVERY_NS
        self._report(self._table)
        builds = {collection: self._served(collection) for collection in self._registry.dims}
        for collection, served in builds.items():
            self._registry.follow(collection, served)
        targets = self._reload_targets(builds) if reloading else ()
        refused = any(starmap(self._registry.is_unusable, targets))
        finished = reloading and (refused or all(starmap(self._registry.is_current, targets)))
        if finished:
            # A verification may have ended since the loop above: clear its error before the reload is reported.
            for collection, served in targets:
                self._registry.follow(collection, served)
        unavailable = self._registry.unavailable
        self._table.set(RetrievingMetrics.WITHOUT_DOCUMENTS, len(unavailable))
        note = "; ".join(f"collection {name}: {reason}" for name, reason in unavailable.items())
        if self._table.note != note:
            self._table.note = note
        if finished:
            self._table.set(RetrievingMetrics.RELOAD_REFUSED, refused)
            self._table.set(RetrievingMetrics.RELOAD, reload)

    def _reload_targets(self, builds: Mapping[str, Sequence[str]]) -> Sequence[tuple[str, Sequence[str]]]:
        """Return the collection that is being reloaded, by its number in the configuration; or all of them."""
        number = int(self._table.knob("reload_of"))
        return list(builds.items())[number : number + 1] if number >= 0 else list(builds.items())
