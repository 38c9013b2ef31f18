"""A scheduler and queries for it, by name."""

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from ipc import Stage
from runtime.pool.estimate import Kind
from runtime.pool.policy import Policy
from runtime.pool.queues import NEVER_NS, Entry
from runtime.pool.scheduler import Scheduler

STAGES = st.sampled_from(["prefill", "decode"])
KIND = Kind("docs", 40, 4)  # 13 extends are expected
LONG = Kind("docs", 400, 4)  # 103 extends are expected, eight times as many


def entry(stage: Stage, name: int, *, deadline: int = NEVER_NS, arrival: int = 0, kind: Kind = KIND) -> Entry[int]:
    return Entry(stage, deadline, arrival, name, kind)


def scheduler(slots: int, reserve: float, queue: int = 1000, **policy: Any) -> Scheduler[int]:
    return Scheduler(Policy(slots=slots, reserve=reserve, queue=queue, **policy))


def filled(made: Scheduler[int], *entries: Entry[int], now: int = 0) -> Scheduler[int]:
    for one in entries:
        made.add(one, now)
    return made


def names(entries: Iterable[Entry[int]]) -> list[int]:
    return [one.query for one in entries]


def measured(made: Scheduler[int], fixed: float, each: float) -> Scheduler[int]:
    """A scheduler that has seen what extends cost."""
    for _ in range(20):
        for active in (1, 8):
            made.cost.learn(active, fixed + each * active)
    return made


def advanced(made: Scheduler[int], extends: int) -> Scheduler[int]:
    made.advanced(extends)
    return made
