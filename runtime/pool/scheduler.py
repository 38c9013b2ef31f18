"""Which queries are active in the next extends. Pure: no clock, no engine, no ring; the simulator runs it as it is.

Two queues. Q_pre holds prefill queries, the least slack first: slack = due − (now + Ê·T_ext), where `due` is the
arrival plus L_pre,max or the deadline if that is earlier. Q_dec holds decode queries by their *turns*: the arrival plus
`stretch` times what a query of that size takes alone. So a short one passes long ones that came a little earlier;
those whose Ê have as many bits are alike, and are served first come, first served.

- **Reserve.** Of N slots ⌈rN⌉ are owed to prefill: while fewer are prefill's and its queries wait, every slot that
  comes free is theirs. Beyond that prefill goes first too, until decode's next query has aged: then the older one does.
  A share that one stage cannot fill goes to the other at once.
- **Preemption.** A waiting prefill query without slack left takes an active decode query's place while fewer than
  ⌈rN⌉ are prefill's, and while prefill queries run, only as many decode queries are active beside them as let the most
  pressed one be answered in time, by the measured cost of an extend. In a full batch, a waiting decode query takes the
  place of an active one whose turn is after its own and that has `_MUCH_LONGER` times its extends left. The others are
  paused: they keep their engine slots and their turns. None is paused more than `max_pauses` times. Pauses never make
  the batch so narrow that too much of an extend is its fixed part (see Width): where an extend costs the same however
  many are in it, as on a GPU, nobody is paused for a speed that would not come.
- **No starvation.** When decode queries wait or are paused and none was active for `decode_stall_ns`, the one whose
  turn it is has the next place and is not paused any more. So a decode query is answered, whatever prefill does, no
  later than (p + 1)·(decode_stall + the rest of one prefill query + the longest decode query + a round) after it
  came, with `p` others that were active then or have turns before its own. However many come, `p` grows no more once it
  has waited for `stretch` times what its size takes alone.
- **Width.** A narrow batch is faster for those in it and wastes more of each extend on its fixed part. The batch is as
  wide as keeps the waste under `waste` of the rest, N slots at most. Everyone who waits pays for the waste, so the more
  wait the less is put up with; unless prefill is to be answered as soon as possible (L_pre,max = 0): then the batch
  stays narrow, and pauses may cost `_URGENT_WASTE`. A crowd has `_CROWDED_WIDTH` places in any case, so that the loop
  can see to several that have finished at a time (`pace`).
- **Company.** While nothing runs, a query waits for others until the flush timeout of its stage is over.
- **Admission.** `add` refuses what finds the queue full, and what cannot make its deadline by the estimates: beside
  as many as it would share the batch with. Else a crowd would be answered a little too late, every one of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.pool.estimate import ExtendCost, ExtendEstimate
from runtime.pool.pace import round_ns
from runtime.pool.policy import CROWD, Policy
from runtime.pool.queues import NEVER_NS, DecodeQueue, Entry, Queue
from runtime.pool.running import RunningBatch, turn

T = TypeVar("T")
_HALF = 4  # queries that wait, at which only half the waste is put up with (1 or 16 do alike)
_CROWDED_WIDTH = 8  # the least that is active in a crowd, on a CPU (see Width)
_MUCH_LONGER = 2.0  # in extends that are left, for a decode query to give its place to another
_URGENT_WASTE = 0.25  # of capacity, at most, for prefill queries that are to be answered as soon as possible


@dataclass(slots=True)
class Round(Generic[T]):
    """What changes before the next extends. `late` have left the queue: they cannot make their deadlines any more."""

    admitted: list[Entry[T]] = field(default_factory=list)
    paused: list[Entry[T]] = field(default_factory=list)
    resumed: list[Entry[T]] = field(default_factory=list)
    late: list[Entry[T]] = field(default_factory=list)


class Scheduler(Generic[T]):
    """The running batch's places, given to the queries of two queues; see the module's text.

    A caller gives it every query (`add`), asks before each round who changes place (`next`), says what was done
    (`advanced`, `cost.learn`), and who left its slot (`finished`, `left`) or its queue (`remove`).
    """

    stretch = 16  # more would bring short decode queries little, and cost long ones more

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.reserve = policy.reserve
        self.flush_prefill_ns = policy.flush_prefill_ns
        self.extends = ExtendEstimate()
        self.cost = ExtendCost()
        self._prefill: Queue[T] = Queue()
        self._decode: DecodeQueue[T] = DecodeQueue()
        self._batch: RunningBatch[T] = RunningBatch(policy.max_pauses)
        self._done = 0  # extends so far
        self._decode_ran_ns: int | None = None  # when a decode query was active, or none wanted to be

    # ---- what is so

    @property
    def waiting(self) -> dict[Stage, int]:
        return {"prefill": len(self._prefill), "decode": len(self._decode)}

    @property
    def running(self) -> dict[Stage, int]:
        """Active queries by stage."""
        return {"prefill": len(self._batch.prefill), "decode": len(self._batch.decode)}

    @property
    def paused(self) -> int:
        return len(self._batch.paused)

    @property
    def busy(self) -> bool:
        return bool(self._batch.held or self._prefill or self._decode)

    @property
    def crowded(self) -> bool:
        """Whether so many wait or are paused that throughput counts more than the next answer."""
        return len(self._prefill) + len(self._decode) + len(self._batch.paused) >= CROWD

    @property
    def held_back(self) -> bool:
        """Whether a query waits for its place, or is paused."""
        return bool(self._prefill or self._decode or self._batch.paused)

    @property
    def width(self) -> int:
        """How many active queries are worth while now, N at most."""
        width = self._worthwhile(len(self._prefill) + len(self._decode))
        return max(width, min(_CROWDED_WIDTH, self._policy.slots)) if self.crowded else width

    def _worthwhile(self, waiting: int) -> int:
        """The same, were so many waiting."""
        policy = self._policy
        waste = policy.waste if policy.prefill_target_ns == 0 else policy.waste / (1 + waiting / _HALF)
        return self.cost.worthwhile(policy.slots, waste)

    def reserved(self, slots: int) -> int:
        """⌈r·slots⌉."""
        return math.ceil(self.reserve * slots)

    # ---- queries come and go

    def add(self, entry: Entry[T], now_ns: int) -> None:
        """Let a query wait. Raises `Overloaded` when the queue is full and `DeadlineExceeded` for a hopeless one.

        Decode queries leave a quarter of the queue free, so that there is room for prefill queries however many come.
        """
        policy = self._policy
        waiting = len(self._prefill) + len(self._decode)
        if waiting >= policy.queue:
            raise Overloaded(f"the pool's queue is full: {waiting} queries wait, and {policy.queue} may")
        if entry.stage == "decode" and len(self._decode) >= policy.decode_queue:
            raise Overloaded(f"{len(self._decode)} decode queries wait, and {policy.decode_queue} may")
        entry.extends = self.extends.of(entry.kind)
        if entry.deadline_ns != NEVER_NS and self._finish_ns(entry, now_ns) >= entry.deadline_ns:
            raise DeadlineExceeded("the pool cannot answer the query before its deadline")
        if entry.stage == "decode":
            self._decode.place(entry, self.stretch * self.cost.of(1))
            self._decode.push(entry)
            return
        entry.due_ns = min(entry.deadline_ns, entry.arrival_ns + policy.prefill_target_ns)
        entry.start_by_ns = entry.due_ns - int(entry.extends * self.cost.of(policy.slots))
        self._prefill.push(entry)

    def _finish_ns(self, entry: Entry[T], now_ns: int) -> int:
        """When the query would be answered if all went well for it: decode queries wait for those before them."""
        ahead = 0.0
        if entry.stage == "decode":
            width = self.width
            ahead = self._decode.work_before(entry) / width * self.cost.of(width)
        return now_ns + int(ahead + self._run_ns(entry))

    def _run_ns(self, entry: Entry[T]) -> float:
        """What a waiting query takes from its slot to its answer, beside those that would share the batch with it.

        Decode is paused for prefill, for which only prefill counts. Decode's answers wait for the end of a round in a
        crowd.
        """
        batch = self._batch
        if entry.stage == "prefill":
            return entry.extends * self.cost.of(min(max(len(batch.prefill) + len(self._prefill), 1), self.width))
        beside = batch.active + len(self._prefill) + len(self._decode)
        run_ns = entry.extends * self.cost.of(min(max(beside, 1), self.width))
        return run_ns + round_ns(self) if run_ns and self.crowded else run_ns

    def advanced(self, extends: int) -> None:
        """Every active query has advanced by `extends`. What they took: `cost.learn`."""
        self._done += extends

    def finished(self, entry: Entry[T], extends: int) -> None:
        """A query is answered, after so many extends, and has left its slot."""
        self.extends.learn(entry.kind, extends)
        self._batch.leave(entry)

    def left(self, entry: Entry[T]) -> None:
        """A query has left its slot without an answer."""
        self._batch.leave(entry)

    def remove(self, matches: Callable[[T], bool]) -> T | None:
        """Take the waiting query that `matches` out (it was cancelled, or its client is gone); None if none does."""
        found = self._prefill.take_out(matches) or self._decode.take_out(matches)
        return found.query if found else None

    # ---- who is active next

    def next(self, now_ns: int) -> Round[T]:
        """Give the places of the next round's extends."""
        batch, width = self._batch, self.width
        changes: Round[T] = Round()
        self._drop_late(now_ns, changes)
        if batch.decode or not (batch.paused or self._decode) or self._decode_ran_ns is None:
            self._decode_ran_ns = now_ns
        if not batch.held and self.held_until(now_ns) is not None:
            return changes
        if now_ns - self._decode_ran_ns >= self._policy.decode_stall_ns and batch.active < width:
            self._let_one_decode_run(changes)
        if self._prefill:
            self._preempt(now_ns, width, changes)
        self._fill(now_ns, width, changes)
        if self._decode and not self._prefill:
            self._let_shorter_run(width, changes)
        if batch.prefill:
            self._make_room(now_ns, width, changes)
        return changes

    def held_until(self, now_ns: int) -> int | None:
        """Until when what waits is held back for company; None if it is not, or nothing waits."""
        prefill, decode, batch = self._prefill, self._decode, self._batch
        waiting = len(prefill) + len(decode)
        if not waiting or batch.held or waiting >= self.width:
            return None
        until = NEVER_NS
        if prefill:
            until = min(prefill.front.arrival_ns + self.flush_prefill_ns, prefill.front.start_by_ns)
        if decode:
            until = min(until, decode.oldest_ns + self._policy.flush_ns)
        return until if until > now_ns else None

    def _drop_late(self, now_ns: int, changes: Round[T]) -> None:
        """Those at the front that cannot make their deadlines any more."""
        for queue in (self._prefill, self._decode):
            while queue:
                deadline_ns = queue.front.deadline_ns
                if deadline_ns == NEVER_NS or deadline_ns > now_ns + self._run_ns(queue.front):
                    break
                changes.late.append(queue.take())

    def _let_one_decode_run(self, changes: Round[T]) -> None:
        if self._may_start("decode"):
            self._batch.settle(self._start("decode", changes))

    def _preempt(self, now_ns: int, width: int, changes: Round[T]) -> None:
        """Decode queries give their places to waiting prefill queries without slack, as far as prefill is owed them."""
        batch, owed = self._batch, self.reserved(width)
        while batch.active >= width and len(batch.prefill) < owed and self._may_start("prefill"):
            if self._prefill.front.start_by_ns > now_ns or not self._pause_last(changes):
                return
            self._start("prefill", changes)

    def _fill(self, now_ns: int, width: int, changes: Round[T]) -> None:
        batch, room = self._batch, self._decode_room(now_ns, width)
        while batch.active < width:
            stage = self._choose(now_ns, width)
            if stage == "decode" and len(batch.decode) >= room:
                stage = "prefill" if self._may_start("prefill") else None
            if stage is None:
                return
            self._start(stage, changes)
            if stage == "prefill":
                room = self._decode_room(now_ns, width)

    def _let_shorter_run(self, width: int, changes: Round[T]) -> None:
        """Decode queries give their places to much shorter ones whose turn is before theirs.

        Half of the spare slots are left to prefill.
        """
        batch, policy = self._batch, self._policy
        while batch.active >= width and self._decode and batch.held < policy.slots + policy.spare // 2:
            longer, shorter = batch.last(), self._next_decode()
            if shorter in batch.paused or longer is None or longer.start_by_ns <= shorter.start_by_ns:
                return
            if self._left(longer) < _MUCH_LONGER * shorter.extends:
                return
            self._pause(longer, changes)
            self._start("decode", changes)

    def _make_room(self, now_ns: int, width: int, changes: Round[T]) -> None:
        """Pause decode queries until those that are left let prefill be in time."""
        room = self._decode_room(now_ns, width)
        while len(self._batch.decode) > room:
            if not self._pause_last(changes):
                return

    def _choose(self, now_ns: int, width: int) -> Stage | None:
        """Whose turn the next place is."""
        decode = self._may_start("decode")
        if not (self._prefill and self._may_start("prefill")):
            return "decode" if decode else None
        if not decode:
            return "prefill"
        if len(self._batch.prefill) < self.reserved(width):
            return "prefill"
        arrival = self._next_decode().arrival_ns
        aged = now_ns - arrival >= self._policy.aging_ns and arrival < self._prefill.front.arrival_ns
        return "decode" if aged else "prefill"

    def _decode_room(self, now_ns: int, width: int) -> int:
        """How many decode queries may be active beside the prefill queries that are."""
        prefill = self._batch.prefill
        if not prefill:
            return width
        allowed = min((entry.due_ns - now_ns) / self._left(entry) for entry in prefill)
        return max(0, self.cost.most_within(allowed, width) - len(prefill), self._fewest(width) - len(prefill))

    def _fewest(self, width: int) -> int:
        """Below how many active queries pauses would waste more than they may."""
        if self._policy.prefill_target_ns == 0:
            return self.cost.worthwhile(width, _URGENT_WASTE)
        return min(width, self._worthwhile(len(self._decode)))

    def _left(self, entry: Entry[T]) -> float:
        """Extends that an active query is expected to take yet. Some take more than expected: never next to none."""
        return max(entry.extends - (self._done - entry.began), 0.25 * entry.extends, 1.0)

    def _may_start(self, stage: Stage) -> bool:
        batch = self._batch
        if stage == "decode" and batch.paused:
            return True
        queue = self._prefill if stage == "prefill" else self._decode
        return bool(queue) and batch.held < self._policy.engine_slots

    def _next_decode(self) -> Entry[T]:
        """Whose turn it is, paused or waiting. There is one that may start."""
        paused, waiting = self._batch.paused, self._decode
        if not paused:
            return waiting.front
        if waiting and self._batch.held < self._policy.engine_slots:
            return min(paused[0], waiting.front, key=turn)
        return paused[0]

    def _start(self, stage: Stage, changes: Round[T]) -> Entry[T]:
        """The next query of a stage becomes active."""
        batch = self._batch
        if stage == "decode" and batch.paused and self._next_decode() is batch.paused[0]:
            entry = batch.resume(self._done)
            if entry in changes.paused:
                changes.paused.remove(entry)
            else:
                changes.resumed.append(entry)
            return entry
        entry = (self._prefill if stage == "prefill" else self._decode).take()
        batch.admit(entry, self._done)
        changes.admitted.append(entry)
        return entry

    def _pause_last(self, changes: Round[T]) -> bool:
        entry = self._batch.last()
        if entry is not None:
            self._pause(entry, changes)
        return entry is not None

    def _pause(self, entry: Entry[T], changes: Round[T]) -> None:
        self._batch.pause(entry, self._done)
        if entry in changes.resumed:
            changes.resumed.remove(entry)
        else:
            changes.paused.append(entry)
