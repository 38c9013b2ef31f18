"""Role changes of simulated workers by the planner. Each GPU has a worker of each role, one of which is active.

As in production the new worker starts while the old one serves, which then drains; here the new one receives no
requests before the old one has drained.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from runtime.node.control.planner import Planner, Work
from runtime.node.metrics.worker_metrics import Stage
from runtime.serving.frontend.router import Router
from runtime.serving.messages import Report
from runtime.simulator.stages.events import Events, ns

START_S = 10.0  # start time of a worker in its new role
_INTERVAL_S = 0.25


class Roles:
    """Active and inactive workers. `work` returns the node's state for a number of workers of each role."""

    def __init__(
        self,
        events: Events,
        router: Router,
        planner: Planner,
        work: Callable[[dict[Stage, int]], Work],
        is_idle: Callable[[str], bool],
    ) -> None:
        self._events, self._router, self._planner, self._work, self._is_idle = events, router, planner, work, is_idle
        self.inactive: set[str] = set()
        self._names: dict[Stage, list[str]] = {"prefill": [], "decode": []}
        self._moving = False
        self.stopped = False
        self.moves = 0

    def begin(self, names: dict[Stage, list[str]], inactive: Sequence[str]) -> None:
        """Set all workers of each role, and the initially inactive ones."""
        self._names, self.inactive = names, set(inactive)
        for name in inactive:
            self._update_router(name)
        self._check()

    def report(self, report: Report) -> None:
        """Forward a worker's report to the router; an inactive worker is reported as draining."""
        self._router.report(replace(report, draining=report.worker in self.inactive) if self.inactive else report)

    def _update_router(self, name: str) -> None:
        for worker in self._router.workers():
            if worker.hello.worker == name:
                worker.reported = replace(worker.reported, draining=name in self.inactive)

    def _active(self, role: Stage) -> list[str]:
        return [name for name in self._names[role] if name not in self.inactive]

    def _check(self) -> None:
        if self.stopped:
            return
        active = {role: len(self._active(role)) for role in self._names}
        move = self._planner.update(self._events.now_ns / 1e9, self._work(active))
        if move is not None and not self._moving:
            self._moving = True
            self.moves += 1
            name = self._active(move.role)[-1]
            self._events.after(ns(START_S), lambda: self._deactivate(name))
        self._events.after(ns(_INTERVAL_S), self._check)

    def _deactivate(self, name: str) -> None:
        self.inactive.add(name)
        self._update_router(name)
        self._drain(name)

    def _drain(self, name: str) -> None:
        """Wait until the old worker has drained, then activate the new one."""
        if self.stopped:
            return
        if not self._is_idle(name):
            self._events.after(ns(_INTERVAL_S), lambda: self._drain(name))
            return
        other = self._names["decode" if name in self._names["prefill"] else "prefill"]
        new = next(new for new in other if new in self.inactive)
        self.inactive.discard(new)
        self._update_router(new)
        self._moving = False
