"""Collections that were rebuilt are taken up by one pool worker after the other, while the others serve; then by those
that look their documents up, so that what lies in the directory may be replaced again as soon as a reload is over."""

import logging
from collections.abc import Sequence

import msgspec

from runtime.node.config import Role
from runtime.node.metrics.worker_metrics import PoolMetrics, RetrievingMetrics
from runtime.node.supervisor.supervised_worker import Child, Phase

_ROLES: tuple[Role, ...] = ("pool", "prefill", "decode", "frontend")

log = logging.getLogger("supervisor")


class Reload(msgspec.Struct, frozen=True):
    """The reload of this number: whether it is `over`, who has `done` it, and what kept it from going on."""

    number: int
    over: bool
    done: tuple[str, ...] = ()
    trouble: str = ""


class Reloading:
    """A reload at a time; another one takes its place. `step` is called by the supervisor's loop."""

    def __init__(self, children: Sequence[Child], collections: Sequence[str]) -> None:
        self._children, self._collections = children, collections  # the supervisor's own: workers come and go
        self._number, self._which = 0, -1.0
        self._waiting: list[str] = []
        self._told = ""  # the worker that is at it
        self._done: list[str] = []
        self._trouble = ""

    def ask(self, collection: str) -> Reload:
        """Have one collection reloaded, or with "" all of them."""
        if not self._collections or (collection and collection not in self._collections):
            known = ", ".join(self._collections) or "none"
            return Reload(0, True, trouble=f"no collection {collection!r} on this node; known: {known}")
        self._number += 1
        self._which = float(self._collections.index(collection)) if collection else -1.0
        self._waiting = [child.name for role in _ROLES for child in self._children if child.place.role == role]
        self._told, self._done, self._trouble = "", [], ""
        log.info("%s: reload %d", f"collection {collection}" if collection else "every collection", self._number)
        return self.state()

    def state(self) -> Reload:
        """How far it is."""
        over = not self._waiting or bool(self._trouble)
        return Reload(self._number, over, tuple(self._done), self._trouble)

    def step(self) -> None:
        """Go on where that is possible: the next worker when the one before has answered."""
        if not self._waiting or self._trouble:
            return
        name = self._waiting[0]
        child = next((child for child in self._children if child.name == name), None)
        # Who starts may have opened what was there before; who does not run opens what is there when it does.
        if child is None or (self._told != name and child.phase not in (Phase.READY, Phase.STARTING)):
            self._waiting.pop(0)
        elif child.phase is Phase.READY:
            self._ask_or_hear(child)

    def _ask_or_hear(self, child: Child) -> None:
        table, pool = child.table, child.place.role == "pool"
        metrics = PoolMetrics if pool else RetrievingMetrics
        if self._told != child.name:
            self._told = child.name
            table.set_knob("reload_of", self._which)
            table.set_knob("reload", float(self._number))
        elif table.value(metrics.RELOAD) == self._number:
            self._waiting.pop(0)
            if table.value(metrics.RELOAD_REFUSED):
                self._trouble = f"{child.name}: {table.note or 'the collection cannot be served'}"
            else:
                self._done.append(child.name)
