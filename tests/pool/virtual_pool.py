"""The pool's loop with its real scheduler on a virtual clock: what rounds, queries, extends and pauses cost is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from ipc import Request, Stage
from runtime.errors import DeadlineExceeded
from runtime.pool.estimate import Kind
from runtime.pool.pace import ends_round, round_ns
from runtime.pool.policy import Policy
from runtime.pool.queues import NEVER_NS, Entry
from runtime.pool.scheduler import Scheduler

SMALL, USUAL, LARGE = (Kind("docs", top_m, 4) for top_m in (64, 128, 512))
_EXTENDS = {SMALL: 19, USUAL: 35, LARGE: 130}  # as MiniLM's 70,639 vectors have them
_BATCHES = (1, 4, 8, 16)  # active slots of a warm-up


@dataclass(frozen=True)
class Costs:
    """In ns, of an extend: `fixed + each·active`; of a round beside its extends; of taking and answering a query; of a
    pause, and of a resumption. About what a CPU takes for MiniLM's 384 dimensions, Python with cold caches.
    """

    fixed: int = 1_300
    each: int = 7_200
    a_round: int = 60_000
    query: int = 25_000
    pause: int = 2_500


@dataclass(frozen=True)
class Asked:
    at_ns: int
    stage: Stage
    kind: Kind
    extends: int
    limit_ns: int | None = None  # until its deadline


@dataclass(frozen=True)
class Answer:
    stage: Stage
    kind: Kind
    latency_ns: int
    end_ns: int


def arrivals(rate: float, seconds: float, stage: Stage, kinds: dict[Kind, float], seed: int) -> list[Asked]:
    """Queries at random times, `rate` a second, of the kinds in these proportions."""
    random, at_s, found = Random(seed), 0.0, []
    while (at_s := at_s + random.expovariate(rate)) < seconds:
        (kind,) = random.choices(list(kinds), list(kinds.values()))
        found.append(Asked(int(at_s * 1e9), stage, kind, _EXTENDS[kind] + random.randint(-2, 3)))
    return found


def serve(
    queries: Sequence[Asked],
    costs: Costs,
    policy: Policy,
    make: Callable[[Policy], Scheduler[Request]] = Scheduler,
    *,
    places: int = 1 << 30,
    batches: bool = False,
) -> list[Answer]:
    """What becomes of `queries`, by time. Each stage has `places` in its ring: what finds none is dropped, and so
    is what cannot make its deadline. `batches`: answers go out when nothing runs any more."""
    scheduler = make(policy)
    for batch in _BATCHES * 5:
        scheduler.cost.learn(batch, costs.fixed + costs.each * batch)
    now = taken = 0
    outstanding: dict[Stage, int] = {"prefill": 0, "decode": 0}
    asked: dict[Entry[Request], Asked] = {}
    left: dict[Entry[Request], int] = {}
    active: dict[Entry[Request], None] = {}
    held: list[Entry[Request]] = []
    answers: list[Answer] = []
    while taken < len(queries) or scheduler.busy:
        while taken < len(queries) and queries[taken].at_ns <= now:
            query = queries[taken]
            taken += 1
            if outstanding[query.stage] < places:
                outstanding[query.stage] += 1
                now += costs.query // 2
                deadline_ns = NEVER_NS if query.limit_ns is None else query.at_ns + query.limit_ns
                entry: Entry[Request] = Entry(query.stage, deadline_ns, query.at_ns, None, query.kind)  # type: ignore[arg-type]
                asked[entry], left[entry] = query, query.extends
                try:
                    scheduler.add(entry, now)
                except DeadlineExceeded:
                    outstanding[query.stage] -= 1
        changes = scheduler.next(now)
        for entry in changes.late:
            outstanding[entry.stage] -= 1
        active |= dict.fromkeys([*changes.admitted, *changes.resumed])
        for entry in changes.paused:
            del active[entry]
        now += costs.pause * (len(changes.paused) + len(changes.resumed))
        if not active:
            if taken == len(queries):
                break
            now = max(now, queries[taken].at_ns)
            continue
        looks_ns = costs.a_round + round_ns(scheduler) + now
        quiet = not scheduler.held_back
        now += costs.a_round
        finished: list[Entry[Request]] = []
        while active and now < looks_ns and not ends_round(scheduler, [entry.stage for entry in finished]):
            if quiet and taken < len(queries) and queries[taken].at_ns <= now:
                break
            extend_ns = costs.fixed + costs.each * len(active)
            scheduler.advanced(1)
            scheduler.cost.learn(len(active), extend_ns)
            now += extend_ns
            for entry in list(active):
                left[entry] -= 1
                if not left[entry]:
                    del active[entry]
                    finished.append(entry)
        for entry in finished:
            now += costs.query // 2
            scheduler.finished(entry, asked[entry].extends)
            held.append(entry)
        if not (batches and active):
            for entry in held:
                query = asked.pop(entry)
                outstanding[query.stage] -= 1
                answers.append(Answer(query.stage, query.kind, now - query.at_ns, now))
            held = []
    return answers
