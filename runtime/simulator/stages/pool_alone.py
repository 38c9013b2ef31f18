"""A vector pool by itself on the virtual clock: queries that come at given times, whoever asks them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ipc import Stage
from runtime.node.config import NodeConfig
from runtime.pool.scheduler import Scheduler
from runtime.pool.settings import policy_of
from runtime.simulator.events import Events
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.stages.pool import Search, SimPool, slots_of
from runtime.simulator.times.service import ServiceTimes


@dataclass(frozen=True, slots=True)
class Query:
    """A query comes `at_ns`, and takes so many extends. top_m: as it asks; 0: as `[pool]` has it. limit_ns: from
    `at_ns` to its deadline, if it has one."""

    at_ns: int
    stage: Stage
    extends: int
    top_m: int = 0
    limit_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Fate:
    """How long a query waited for its slot, and how long it took until its answer was written; both from `at_ns`.

    `status` is "ok", or the code of the error that it was refused with: the two times mean nothing then.
    """

    stage: Stage
    wait_ns: int
    latency_ns: int
    status: str = "ok"


def run_pool(queries: Sequence[Query], times: ServiceTimes, config: NodeConfig) -> list[Fate]:
    """What becomes of `queries` (by time), by production's policy; in the order given."""
    events = Events()
    limits = config.pool
    pool = SimPool(events, times, Scheduler(policy_of(config, slots_of(limits, times))), limits, Gpu())
    fates: dict[int, Fate] = {}

    def ask(number: int, query: Query) -> None:
        def answered(status: str) -> None:
            took_ns = search.ended_ns - query.at_ns
            fates[number] = Fate(query.stage, search.begun_ns - query.at_ns, took_ns, status)

        deadline_ns = 1 << 62 if query.limit_ns is None else query.at_ns + query.limit_ns
        search = Search(query.stage, query.extends, query.at_ns, deadline_ns, answered, top_m=query.top_m)
        pool.ask(search)

    for number, query in enumerate(queries):
        events.at(query.at_ns, lambda number=number, query=query: ask(number, query))  # type: ignore[misc]
    events.run()
    return [fates[number] for number in range(len(queries))]
