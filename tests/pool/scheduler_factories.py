"""Factories of schedulers and of named queries."""

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from ipc import Stage
from runtime.pool.settings import Policy
from runtime.pool.tables import NEVER_NS
from tests.pool.scheduler import Entry, Scheduler

STAGES = st.sampled_from(["prefill", "decode"])
USUAL = 40  # top_m: 13 extends expected
LONG = 400  # 103 extends expected, eight times as many


def entry(stage: Stage, name: int, *, deadline: int = NEVER_NS, arrival: int = 0, top_m: int = USUAL) -> Entry:
    return Entry(stage, arrival, name, deadline, top_m=top_m)


def scheduler(slots: int, reserve: float, queue: int = 1000, **policy: Any) -> Scheduler:
    """Return a scheduler whose prefill queries are due at their callers' deadlines, unless configured otherwise."""
    policy = {"prefill_target_ns": NEVER_NS} | policy
    return Scheduler(Policy(slots=slots, reserve=reserve, queue=queue, **policy))


def filled(made: Scheduler, *entries: Entry, now: int = 0) -> Scheduler:
    for one in entries:
        made.add(one, now)
    return made


def names(entries: Iterable[Entry]) -> list[int]:
    return [one.query for one in entries]


def measured(made: Scheduler, fixed: float, each: float) -> Scheduler:
    """Return a scheduler that has observed the cost of extends."""
    for _ in range(20):
        for active in (1, 8):
            made.learn_cost(active, fixed + each * active)
    return made


def with_credit(made: Scheduler) -> Scheduler:
    """Let prefill leave its share to an active decode query for a while, so that it earns credit."""
    made.advanced(1, 10**12)
    assert made.tables.credit_ns > 0
    return made
