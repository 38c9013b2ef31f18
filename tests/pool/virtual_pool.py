"""The pool's policy on a virtual clock: what extends, rounds of the loop and queries cost is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ipc import Stage
from runtime.errors import DeadlineExceeded
from runtime.pool.settings import Policy
from runtime.pool.tables import NEVER_NS
from tests.pool.scheduler import Entry, Scheduler

SMALL, USUAL, LARGE = 64, 128, 512  # top_m
_EXTENDS = {SMALL: 19, USUAL: 35, LARGE: 130}  # as MiniLM's 70,639 vectors have them
_BATCHES = (1, 4, 8, 16)  # active slots of a calibration


@dataclass(frozen=True)
class Costs:
    """In ns, of an extend: `fixed + each·active`; of a round of the loop beside it; of taking and answering a query.
    About what a CPU takes for MiniLM's 384 dimensions in the compiled loop.
    """

    fixed: int = 300
    each: int = 4_500
    a_round: int = 500
    query: int = 2_000


@dataclass(frozen=True)
class Asked:
    at_ns: int
    stage: Stage
    top_m: int
    extends: int
    limit_ns: int | None = None  # until its deadline


@dataclass(frozen=True)
class Answer:
    stage: Stage
    top_m: int
    latency_ns: int
    end_ns: int


def arrivals(rate: float, seconds: float, stage: Stage, kinds: dict[int, float], seed: int) -> list[Asked]:
    """Queries at random times, `rate` a second, of the kinds (top_m) in these proportions."""
    random, at_s, found = Random(seed), 0.0, []
    while (at_s := at_s + random.expovariate(rate)) < seconds:
        (kind,) = random.choices(list(kinds), list(kinds.values()))
        found.append(Asked(int(at_s * 1e9), stage, kind, _EXTENDS[kind] + random.randint(-2, 3)))
    return found


def serve(queries: Sequence[Asked], costs: Costs, policy: Policy, *, places: int = 1 << 30) -> list[Answer]:
    """What becomes of `queries`, by time. Each stage has `places` in its ring: what finds none is dropped, and so is
    what cannot make its deadline."""
    scheduler: Scheduler[Asked] = Scheduler(policy)
    for batch in _BATCHES * 5:
        scheduler.learn_cost(batch, costs.fixed + costs.each * batch)
    now = taken = 0
    outstanding: dict[Stage, int] = {"prefill": 0, "decode": 0}
    left: dict[Entry[Asked], int] = {}
    active: dict[Entry[Asked], None] = {}
    held: list[Entry[Asked]] = []
    answers: list[Answer] = []
    while taken < len(queries) or scheduler.busy or held:
        begin = now
        while taken < len(queries) and queries[taken].at_ns <= now:
            query = queries[taken]
            taken += 1
            if outstanding[query.stage] >= places:
                continue
            now += costs.query // 2
            deadline_ns = NEVER_NS if query.limit_ns is None else query.at_ns + query.limit_ns
            entry = Entry(query.stage, query.at_ns, query, deadline_ns, top_m=query.top_m)
            try:
                scheduler.add(entry, now)
            except DeadlineExceeded:
                continue
            outstanding[query.stage] += 1
            left[entry] = query.extends
        changes = scheduler.next(now)
        for entry in changes.late:
            outstanding[entry.stage] -= 1
        active |= dict.fromkeys([*changes.admitted, *changes.resumed])
        for entry in changes.paused:
            del active[entry]
        now += costs.a_round
        if not active:
            if taken < len(queries):
                now = max(now, queries[taken].at_ns)
            continue
        now += costs.fixed + costs.each * len(active)
        scheduler.advanced(1, now - begin)
        for entry in list(active):
            left[entry] -= 1
            if not left[entry]:
                del active[entry]
                now += costs.query // 2
                scheduler.finished(entry, entry.query.extends)
                held.append(entry)
        if not (policy.rules == "static" and active):
            for entry in held:
                outstanding[entry.stage] -= 1
                answers.append(Answer(entry.stage, entry.top_m, now - entry.query.at_ns, now))
            held = []
    return answers
