"""A simulated vector pool: production's scheduler over a batch of extends on the virtual clock."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.node.metrics import POOL_WAIT_PREFILL
from runtime.pool.estimate import Kind
from runtime.pool.pace import ends_round, round_ns
from runtime.pool.queues import Entry
from runtime.pool.scheduler import Scheduler
from runtime.simulator.events import Events, ns
from runtime.simulator.gpu import Gpu
from runtime.simulator.naive import PoolScheduler
from runtime.simulator.service import ServiceTimes
from runtime.simulator.step_batch import StepBatch


@dataclass(slots=True, eq=False)
class Search:
    """A query: how many extends it will take, and whom its end is told (its status as `ipc` has it)."""

    stage: Stage
    extends: int
    asked_ns: int
    deadline_ns: int
    reply: Callable[[str], None]
    left: int = 0  # extends, while it is paused
    begun_ns: int = 0  # when it had a slot
    ended_ns: int = 0  # when its answer was written
    pool: "SimPool | None" = None  # that it was sent to


class SimPool:
    """One pool worker. `kind` is what the scheduler knows of all queries here: they ask with the same parameters."""

    def __init__(
        self,
        events: Events,
        times: ServiceTimes,
        scheduler: PoolScheduler[Search],
        kind: Kind,
        gpu: Gpu,
    ) -> None:
        self._events, self._times, self._kind, self._gpu = events, times, kind, gpu
        self.scheduler = scheduler
        self._entries: dict[Search, Entry[Search]] = {}  # in the batch
        self.batch: StepBatch[Search] = StepBatch(
            events, self._between, self._extend_ns, self._loop_ns, ns(times.wake_s), self._ends_round
        )
        self._round_ns = ns(times.round_s)
        self._came = 0  # queries that this round gave a slot
        self._quiet = True  # whether this round ends when someone comes
        self._member_steps = 0  # of the batch, before this round
        self._pace = 1.0
        self._wake_ns = -1
        self.wait_counts = [0.0] * (len(POOL_WAIT_PREFILL.buckets) + 1)
        self.wait_ns = 0
        self.served = 0

    def ask(self, search: Search) -> None:
        """A query has come through the ring."""
        entry = Entry(search.stage, search.deadline_ns, self._events.now_ns, search, self._kind)
        try:
            self.scheduler.add(entry, self._events.now_ns)
        except (Overloaded, DeadlineExceeded) as error:
            self._answer(search, error.code)
            return
        if self._quiet or not self.batch:
            self.batch.poke()

    def cancel(self, search: Search) -> None:
        """Forget it if it waits; one that has a slot is let go on, as its end is near. No answer follows."""
        self.scheduler.remove(lambda other: other is search)

    def _between(self, done: list[Search], steps: int) -> int:
        now = self._events.now_ns
        if steps:
            self._advanced(steps)
        for search in done:
            self.scheduler.finished(self._entries.pop(search), search.extends)
            self.served += 1
            search.ended_ns = now
            self._answer(search, "ok")
        changes = self.scheduler.next(now)
        for entry in changes.late:
            self._answer(entry.query, "deadline_exceeded")
        for entry in changes.resumed:
            self.batch.join(entry.query, entry.query.left)
        for entry in changes.admitted:
            self._admit(entry)
        for entry in changes.paused:  # last: a query may be admitted and paused at once, for another's sake
            entry.query.left = self.batch.leave(entry.query)
        return self._most_steps(now)

    def _advanced(self, steps: int) -> None:
        self.scheduler.advanced(steps)
        active = (self.batch.member_steps - self._member_steps) / steps  # on average: some may have left on the way
        self._member_steps = self.batch.member_steps
        alone_ns = ns(self._times.extend_time_s(active))
        if isinstance(self.scheduler, Scheduler):
            self.scheduler.cost.learn(active, alone_ns * self._pace)
        if self._pace > 1:
            self._gpu.owe(steps * alone_ns)

    def _admit(self, entry: Entry[Search]) -> None:
        search = entry.query
        self._came += 1
        self._entries[search] = entry
        self.batch.join(search, search.extends)
        search.begun_ns = self._events.now_ns + self._round_ns // 2
        wait_ns = search.begun_ns - search.asked_ns
        self.wait_ns += wait_ns
        if search.stage == "prefill":
            self.wait_counts[bisect.bisect_left(POOL_WAIT_PREFILL.buckets, wait_ns / 1e9)] += 1

    def _most_steps(self, now: int) -> int:
        """How many extends nothing can change of itself in: the scheduler is asked again then."""
        if not self.batch and (until := self.scheduler.held_until(now)) is not None and until != self._wake_ns:
            self._wake_ns = until
            self._events.at(until, self.batch.poke)
        self._quiet = not self.scheduler.held_back
        if self._quiet:
            return 1 << 30  # who comes ends it
        return -(-round_ns(self.scheduler) // max(self._extend_ns(), 1))

    def _extend_ns(self) -> int:
        self._pace = self._gpu.pace
        return ns(self._times.extend_time_s(len(self.batch)) * self._pace)

    def _loop_ns(self) -> int:
        """What the loop takes beside extends."""
        came, self._came = self._came, 0
        return self._round_ns + ns(came * self._times.query_s)

    def _ends_round(self, done: list[Search]) -> bool:
        return ends_round(self.scheduler, [search.stage for search in done])

    def _answer(self, search: Search, status: str) -> None:
        self._events.after(ns(self._times.ring_s), lambda: search.reply(status))
