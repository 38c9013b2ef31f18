"""A vector pool on the virtual clock, with queries that arrive at given times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from ipc import Stage
from runtime.node.config import NodeConfig
from runtime.pool.settings import policy_of
from runtime.pool.tables import NEVER_NS
from runtime.simulator.stages.events import Events
from runtime.simulator.stages.pool import Pools, slots_of
from runtime.simulator.stages.pool_tables import Gpu
from runtime.simulator.times.service import ServiceTimes


@dataclass(frozen=True, slots=True)
class Query:
    """A query that arrives at `at_ns` and takes so many extends. top_m: 0 for the default of `[pool]`. limit_ns: its
    deadline, relative to `at_ns`, if it has one."""

    at_ns: int
    stage: Stage
    extends: int
    top_m: int = 0
    limit_ns: int | None = None


@dataclass(frozen=True, slots=True)
class QueryOutcome:
    """Wait of a query for its slot, and latency until its result is written, both from `at_ns`.

    `status` is "ok", or the code of the error that it was refused with, and then the times are undefined.
    """

    stage: Stage
    wait_ns: int
    latency_ns: int
    status: str = "ok"


def run_pool(queries: Sequence[Query], times: ServiceTimes, config: NodeConfig, **policy: Any) -> list[QueryOutcome]:
    """Run `queries` (sorted by time) through the simulated pool with production's policy; returns their outcomes in
    order. `policy`: settings of it in place of the configuration's."""
    events, limits = Events(), config.pool
    rules = replace(policy_of(config, slots_of(limits, times), limits.devices[0]), **policy)
    pools = Pools(events, times, limits, [(rules, Gpu())], Random(0), capacity=len(queries) + 1)
    group = pools.group([0])
    statuses: dict[int, str] = {}
    for number, query in enumerate(queries):
        deadline_ns = NEVER_NS if query.limit_ns is None else query.at_ns + query.limit_ns
        reply = partial(statuses.__setitem__, number)
        assigned = pools.submit_at(
            query.at_ns, group, query.stage, deadline_ns, reply, extends=query.extends, top_m=query.top_m
        )
        assert assigned == number, "queries are numbered consecutively"
    events.run()
    outcomes = []
    for number, query in enumerate(queries):
        begun_ns, ended_ns = pools.times_of(number)
        outcomes.append(QueryOutcome(query.stage, begun_ns - query.at_ns, ended_ns - query.at_ns, statuses[number]))
    return outcomes
