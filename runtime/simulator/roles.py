"""Workers of the simulated node that change their role, as the planner says: each GPU has a worker of either role, of
which one takes requests. As in production the new worker starts beside the old one, which serves meanwhile and then
drains; but here the new one takes nothing until the old one has ended."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from runtime.node.control.planner import Planner, Work
from runtime.node.metrics.worker_metrics import Stage
from runtime.serving.frontend.router import Router
from runtime.serving.messages import Report
from runtime.simulator.events import Events, ns

START_S = 10.0  # until a worker is ready in its new role
_LOOK_S = 0.25


class Roles:
    """`away` are the workers that take nothing. `work` tells the node's state with so many workers of each role."""

    def __init__(
        self,
        events: Events,
        router: Router,
        planner: Planner,
        work: Callable[[dict[Stage, int]], Work],
        rests: Callable[[str], bool],
    ) -> None:
        self._events, self._router, self._planner, self._work, self._rests = events, router, planner, work, rests
        self.away: set[str] = set()
        self._names: dict[Stage, list[str]] = {"prefill": [], "decode": []}
        self._moving = False
        self.stopped = False
        self.moves = 0

    def begin(self, names: dict[Stage, list[str]], away: Sequence[str]) -> None:
        """All workers of either role, and those that take nothing at first."""
        self._names, self.away = names, set(away)
        for name in away:
            self._tell(name)
        self._look()

    def report(self, report: Report) -> None:
        """A worker's report to the router, which is told too who takes nothing."""
        self._router.report(replace(report, draining=report.worker in self.away) if self.away else report)

    def _tell(self, name: str) -> None:
        for worker in self._router.workers():
            if worker.hello.worker == name:
                worker.reported = replace(worker.reported, draining=name in self.away)

    def _there(self, role: Stage) -> list[str]:
        return [name for name in self._names[role] if name not in self.away]

    def _look(self) -> None:
        if self.stopped:
            return
        there = {role: len(self._there(role)) for role in self._names}
        move = self._planner.update(self._events.now_ns / 1e9, self._work(there))
        if move is not None and not self._moving:
            self._moving = True
            self.moves += 1
            name = self._there(move.role)[-1]
            self._events.after(ns(START_S), lambda: self._leave(name))
        self._events.after(ns(_LOOK_S), self._look)

    def _leave(self, name: str) -> None:
        self.away.add(name)
        self._tell(name)
        self._drain(name)

    def _drain(self, name: str) -> None:
        """Wait until the old worker has ended, then have the new one take requests."""
        if self.stopped:
            return
        if not self._rests(name):
            self._events.after(ns(_LOOK_S), lambda: self._drain(name))
            return
        other = self._names["decode" if name in self._names["prefill"] else "prefill"]
        new = next(new for new in other if new in self.away)
        self.away.discard(new)
        self._tell(new)
        self._moving = False
