"""Loads that change within a window, composed of the real traces.

A surge is one trace at 60, then 120, then 60% of the node's capacity for it: a busy hour between two quiet ones. A mix
is Azure's chats (about 210 tokens an answer), then documents (RAGPulse's prompts are three times, Mooncake's ten times
as long, their answers longer, so that more of the queries are decode's), then chats again, each at 110% of capacity: a
day, a night, a day. The node, its pool and its SLOs do not change; mixes have the documents' SLOs.
"""

from dataclasses import replace as moved
from typing import NamedTuple

from benchmarks.policy.bench import TRACES, Bench, Window
from runtime.simulator.capacity import capacity
from runtime.simulator.setup import Setup
from runtime.simulator.traces import at_rate
from runtime.simulator.workload import Slos


class Change(NamedTuple):
    """Consecutive phases (trace, load), and the trace whose SLOs apply."""

    slos_of: str
    phases: tuple[tuple[str, float], ...]


def _surge(trace: str) -> Change:
    return Change(trace, ((trace, 0.6), (trace, 1.2), (trace, 0.6)))


def _mix(documents: str) -> Change:
    return Change(documents, (("azure", 1.1), (documents, 1.1), ("azure", 1.1)))


CHANGES = {f"{trace} surge": _surge(trace) for trace in TRACES} | {
    f"chats, {documents}, chats": _mix(documents) for documents in ("ragpulse", "mooncake")
}


class ChangingBench(Bench):
    """A `Bench` of changes instead of traces. A phase has half as many requests as a window."""

    def slos(self, trace: str) -> Slos:
        return super().slos(CHANGES[trace].slos_of)

    def window(self, trace: str, begin: int) -> Window:
        """Return the requests of all phases, for which the pool is the scarcest resource; their times are not used."""
        return [arrival for phase in self._phases(trace, begin) for arrival in phase]

    def windows(self, trace: str) -> list[int]:
        phases = CHANGES[trace].phases
        windows = [super(ChangingBench, self).windows(name) for name, _ in phases]
        return [begin for begin in self.options.windows if all(begin in phase for phase in windows)]

    def arrivals(self, setup: Setup, trace: str, begin: int, load: float) -> Window:
        found: Window = []
        for phase, (_, share) in zip(self._phases(trace, begin), CHANGES[trace].phases, strict=True):
            began_s = found[-1].at_s if found else 0.0
            paced = at_rate(phase, load * share * capacity(setup, phase))
            found += [moved(arrival, at_s=began_s + arrival.at_s) for arrival in paced]
        return found

    def _phases(self, trace: str, begin: int) -> list[Window]:
        """Return the phases; those of one trace are different parts of its window."""
        each, seen, found = self.options.requests // 2, dict[str, int](), []
        for name, _ in CHANGES[trace].phases:
            first = begin + seen.get(name, 0)
            found.append(super().window(name, begin)[first - begin : first - begin + each])
            seen[name] = (seen.get(name, 0) + each) % self.options.requests
        return found
