"""Policy benchmark: which policy serves more requests within their SLOs? Simulated on real traces, at 90 to 120% load.

    python -m benchmarks.policy --data DIR [--processes 2]

Everything is simulated: production's scheduler, router and control law on a virtual clock. Only the simulator itself is
timed, and the same seed gives the same figures on any machine.

A node of 3 prefill and 4 decode GPUs, with the vector pool as its scarcest resource: an extend costs `--fixed` s (each
of them: the number of slots depends on it) plus a cost per slot at which the pool is fully busy at 100% load, and the
next resource at 80%. With an H100's own extend times the pool would have nothing to decide; this is the case for which
policies exist: searches that are hard for the pool. The pool has the default settings, with the trace's SLOs: the
control law sets r.

Goodput is over *sent* requests: the rate times the share that met TTFT and TPOT. Every policy gets the same requests at
the same times, from several windows of each trace, each with its own seed. The traces' own rates are scaled (RAGPulse's
by far the most: it has 42 requests an hour).
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace as moved
from functools import cache
from itertools import product

import msgspec
from msgspec.structs import replace

from benchmarks.policy.records import FIXED, OTHERS, SHIPPED, Row
from runtime.node.config import DecodeSection, HttpSection, KvSection, NodeConfig, PrefillSection, SloSection
from runtime.simulator.capacity import capacity, demands
from runtime.simulator.node import simulate
from runtime.simulator.plot import draw
from runtime.simulator.policies import PolicyChoice
from runtime.simulator.result import Result
from runtime.simulator.setup import Setup
from runtime.simulator.stages.pool import slots_of
from runtime.simulator.traces import Arrival, at_rate, load_trace
from runtime.simulator.workload import Slos, Workload

TRACES = {
    "azure": ("azure-2023-conv.csv", Slos(ttft_s=0.5, tpot_s=0.025)),
    "mooncake": ("mooncake-conversation.jsonl.gz", Slos(ttft_s=5.0, tpot_s=0.05)),
    "ragpulse": ("ragpulse/0_trace.jsonl.gz", Slos(ttft_s=1.0, tpot_s=0.025)),
}
SPARE = 1.25  # a request's use of the pool relative to the next resource
_ROUNDS = 4

Window = list[Arrival]


class Job(msgspec.Struct, frozen=True):
    """One simulation: a window of a trace at a load, under a policy."""

    trace: str
    window: int
    fixed_s: float
    load: float
    policy: str


class Bench:
    """Creates setups and windows from the options, and runs jobs; each process has a copy."""

    def __init__(self, options: argparse.Namespace, workload: Workload | None = None) -> None:
        self.options, self._workload = options, workload or Workload()

    def window(self, trace: str, begin: int) -> Window:
        """Return a window of a trace, at its own times."""
        return self._part(trace, begin)

    @cache  # noqa: B019  (lives as long as the process)
    def _part(self, trace: str, begin: int) -> Window:
        file, _ = TRACES[trace]
        found = load_trace(self.options.data / file, begin + self.options.requests)[begin:]
        return [moved(arrival, at_s=arrival.at_s - found[0].at_s) for arrival in found]

    def windows(self, trace: str) -> list[int]:
        """Return the first requests of the windows for which the trace is long enough."""
        count = len(load_trace(self.options.data / TRACES[trace][0]))
        return [begin for begin in self.options.windows if begin + self.options.requests <= count]

    def slos(self, trace: str) -> Slos:
        """Return the node's SLOs."""
        return TRACES[trace][1]

    def arrivals(self, setup: Setup, trace: str, begin: int, load: float) -> Window:
        """Return the window, scaled to the load."""
        found = self.window(trace, begin)
        return at_rate(found, load * capacity(setup, found))

    @cache  # noqa: B019
    def setup(self, trace: str, begin: int, fixed_s: float) -> Setup:
        """Return the first table's node, whose pool is the scarcest resource for this window."""
        slos = self.slos(trace)
        made = Setup(config=node(slos), slos=slos, workload=self._workload, seed=self.options.seed + begin)
        return scarce_pool(made, self.window(trace, begin), fixed_s)

    def run(self, job: Job) -> Result:
        setup = replace(self.setup(job.trace, job.window, job.fixed_s), policy=PolicyChoice.parse(job.policy))
        return simulate(setup, self.arrivals(setup, job.trace, job.window, job.load))


def node(slos: Slos) -> NodeConfig:
    """Return the first table's node: default settings without KV tiers, and with SLOs."""
    return NodeConfig(
        kv=KvSection(host_mib=0),
        http=HttpSection(max_in_flight=100_000),
        slo=SloSection(ttft_s=slos.ttft_s, tpot_s=slos.tpot_s),
        prefill=PrefillSection(workers=3, slots=16, chunk_tokens=2048),
        decode=DecodeSection(workers=4, slots=64),
    )


def scarce_pool(setup: Setup, arrivals: Window, fixed_s: float) -> Setup:
    """Return the setup with a cost per slot at which the pool is the scarcest resource."""
    needs = demands(setup, arrivals)
    others = max(seconds for name, seconds in needs.items() if name != "pool")
    unit = demands(replace(setup, times=replace(setup.times, extend_s=0.0, extend_slot_s=1e-6)), arrivals)["pool"]
    times = replace(setup.times, extend_s=fixed_s)
    for _ in range(_ROUNDS):  # the number of slots depends on their cost
        slots = slots_of(setup.config.pool, times)
        times = replace(times, extend_slot_s=SPARE * others / unit * 1e-6 - fixed_s / slots)
        if times.extend_slot_s < 0:
            sys.exit(f"--fixed {fixed_s}: longer than a whole extend of {slots} slots may take")
    return replace(setup, times=times)


def policies(bench: Bench, pool: ProcessPoolExecutor, traces: Iterable[str], loads: Iterable[float]) -> Iterator[Row]:
    options = bench.options
    names = (SHIPPED, *OTHERS, *FIXED)
    for trace, fixed_s in product(traces, options.fixed):
        windows = bench.windows(trace)
        setups = [bench.setup(trace, window, fixed_s) for window in windows]
        slots = [slots_of(setup.config.pool, setup.times) for setup in setups]
        for load in loads:
            jobs = [Job(trace, window, fixed_s, load, name) for name in names for window in windows]
            found = list(pool.map(bench.run, jobs))
            runs = {
                name: [result for job, result in zip(jobs, found, strict=True) if job.policy == name] for name in names
            }
            row = Row.of(trace, fixed_s, slots, load, runs)
            print(row.line(), file=sys.stderr, flush=True)
            if trace in TRACES and load == 1.0 and fixed_s == options.fixed[0]:
                shown = [runs[SHIPPED][0], runs["fifo"][0]]
                draw(shown, options.out / f"policy-{trace}.png")
            yield row
