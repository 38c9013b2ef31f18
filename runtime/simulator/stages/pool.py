"""A simulated vector pool: production's policy over a batch of extends on the virtual clock."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.node.config import PoolSection
from runtime.node.metrics.columns import POOL_WAIT_PREFILL
from runtime.pool.scheduler import Entry, Scheduler
from runtime.pool.sizing import Measured, fewest_slots
from runtime.simulator.events import Events, ns
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.stages.naive import PoolScheduler
from runtime.simulator.stages.step_batch import StepBatch
from runtime.simulator.times.service import ServiceTimes

_LOOK_NS = 100_000  # how often the policy is asked while someone waits and nobody comes or ends
_MOST_SLOTS = 512


@dataclass(slots=True, eq=False)
class Search:
    """A query: how many extends it will take, and whom its end is told (its status as `ipc` has it)."""

    stage: Stage
    extends: int
    asked_ns: int
    deadline_ns: int
    reply: Callable[[str], None]
    top_m: int = 0  # 0: the pool's default
    left: int = 0  # extends, while it is paused
    begun_ns: int = 0  # when it had a slot
    ended_ns: int = 0  # when its answer was written
    pool: "SimPool | None" = None  # that it was sent to


def slots_of(limits: PoolSection, times: ServiceTimes) -> int:
    """N: as configured, or as a pool would find it with these extends."""
    if isinstance(limits.slots, int):
        return limits.slots
    sizes = [1 << power for power in range(_MOST_SLOTS.bit_length())]
    return fewest_slots([Measured(size, times.extend_time_s(size) * 1e9) for size in sizes])


class SimPool:
    """One pool worker. Queries ask with the parameters that `limits` has as defaults, but for their own `top_m`."""

    def __init__(
        self, events: Events, times: ServiceTimes, scheduler: PoolScheduler[Search], limits: PoolSection, gpu: Gpu
    ) -> None:
        self._events, self._times, self._limits, self._gpu = events, times, limits, gpu
        self.scheduler = scheduler
        if isinstance(scheduler, Scheduler):  # as a pool has measured it before its first query
            for active in (1, 2, 4, 8) * 4:
                scheduler.learn_cost(active, (times.extend_time_s(active) + times.round_s) * 1e9)
        self._ring_ns = ns(times.ring_s)
        self._entries: dict[Search, Entry[Search]] = {}  # waiting or with a slot
        self.batch: StepBatch[Search] = StepBatch(
            events, self._between, self._step_ns, self._queries_ns, ns(times.wake_s)
        )
        self._came = 0  # queries that were given a slot just now
        self._member_steps = 0  # of the batch, so far
        self._pace = 1.0
        self._each_ns = 0  # a step of the run under way
        self._wake_ns = -1
        self.wait_counts = [0.0] * (len(POOL_WAIT_PREFILL.buckets) + 1)
        self.wait_ns = 0
        self.served = 0

    def ask(self, search: Search) -> None:
        """A query has come through the ring: it joins the next extend, if the policy lets it."""
        limits = self._limits
        entry = Entry(
            search.stage, self._events.now_ns, search, search.deadline_ns,
            top_m=search.top_m or limits.top_m, search_width=limits.search_width,
        )  # fmt: skip
        try:
            self.scheduler.add(entry, self._events.now_ns)
        except (Overloaded, DeadlineExceeded) as error:
            self._answer(search, error.code)
            return
        self._entries[search] = entry
        self.batch.poke()

    def cancel(self, search: Search) -> None:
        """Forget it if it waits; one that has a slot is let go on, as its end is near. No answer follows."""
        if search in self._entries and not search.begun_ns:
            self.scheduler.left(self._entries.pop(search))

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
            del self._entries[entry.query]
            self._answer(entry.query, "deadline_exceeded")
        for entry in changes.paused:
            entry.query.left = self.batch.leave(entry.query)
        for entry in changes.resumed:
            self.batch.join(entry.query, entry.query.left)
        for entry in changes.admitted:
            self._admit(entry)
        return self._most_steps(now)

    def _advanced(self, steps: int) -> None:
        active = (self.batch.member_steps - self._member_steps) / steps  # on average: some may have left on the way
        self._member_steps = self.batch.member_steps
        self.scheduler.advanced(steps, steps * self._each_ns)
        if self._pace > 1:
            self._gpu.owe(steps * ns(self._times.extend_time_s(active)))

    def _admit(self, entry: Entry[Search]) -> None:
        search = entry.query
        self._came += 1
        self.batch.join(search, search.extends)
        search.begun_ns = self._events.now_ns
        wait_ns = search.begun_ns - search.asked_ns
        self.wait_ns += wait_ns
        if search.stage == "prefill":
            self.wait_counts[bisect.bisect_left(POOL_WAIT_PREFILL.buckets, wait_ns / 1e9)] += 1

    def _most_steps(self, now: int) -> int:
        """How many extends nothing can change of itself in: the policy is asked again then."""
        if not self.batch and (until := self.scheduler.held_until(now)) is not None and until != self._wake_ns:
            self._wake_ns = until
            self._events.at(until, self.batch.poke)
        if len(self._entries) <= len(self.batch):
            return 1 << 30  # who comes or ends ends it
        return -(-_LOOK_NS // max(self._step_ns(), 1))

    def _step_ns(self) -> int:
        """One extend, and the loop about it."""
        self._pace = self._gpu.pace
        self._each_ns = ns(self._times.extend_time_s(len(self.batch)) * self._pace + self._times.round_s)
        return self._each_ns

    def _queries_ns(self) -> int:
        """What taking in and answering queries costs beside extends."""
        came, self._came = self._came, 0
        return ns(came * self._times.query_s)

    def _answer(self, search: Search, status: str) -> None:
        self._events.after(self._ring_ns, partial(search.reply, status))
