"""Metrics that the supervisor itself collects: states and resource usage of the workers, SLOs, machine memory."""

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from runtime.node.config import NodeConfig
from runtime.node.control import law
from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.admin import WorkerStatus
from runtime.node.supervisor.supervised_worker import Phase, SupervisedWorker
from runtime.node.supervisor_metrics import ControlMetrics, NodeMetrics, ProcessMetrics

if TYPE_CHECKING:
    from runtime.node.supervisor_metrics import Family

_WITH_HEARTBEAT = frozenset(phase.value for phase in (Phase.READY, Phase.STANDBY, Phase.DRAINING, Phase.KILLED))


@dataclass(frozen=True)
class Usage:
    """Resource usage of a process: CPU seconds, resident bytes, threads, open descriptors."""

    cpu_s: float = 0.0
    resident_bytes: int = 0
    threads: int = 0
    fds: int = 0


def node_version() -> str:
    """Return the version of the installed distribution, "" in a checkout that is not installed."""
    try:
        return importlib.metadata.version("trinity-runtime")
    except importlib.metadata.PackageNotFoundError:
        return ""


def process_usage(pid: int) -> Usage:
    """Return the usage of one process; all 0 if it has ended or `pid` is 0."""
    if not pid:
        return Usage()
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Usage(
                times.user + times.system,
                int(process.memory_info().rss),
                process.num_threads(),
                process.num_fds(),
            )
    except psutil.Error:
        return Usage()


def tree_usage(pid: int) -> Usage:
    """Return the usage of a process and all of its descendants."""
    try:
        descendants = psutil.Process(pid).children(recursive=True) if pid else []
    except psutil.Error:
        descendants = []
    usages = [process_usage(one) for one in (pid, *(process.pid for process in descendants))]
    return Usage(
        sum(usage.cpu_s for usage in usages),
        sum(usage.resident_bytes for usage in usages),
        sum(usage.threads for usage in usages),
        sum(usage.fds for usage in usages),
    )


def worker_status(worker: SupervisedWorker, now_s: float) -> WorkerStatus:
    """Return what `trinity status` shows of a worker."""
    usage = tree_usage if worker.placement.role == "engine" else process_usage
    pid = worker.process.pid if worker.process else 0
    return WorkerStatus(
        name=worker.name,
        phase=worker.phase.value,
        pid=pid,
        epoch=worker.epoch,
        restarts=worker.restarts,
        heartbeat_age_s=worker.heartbeat_age_s,
        resident_bytes=usage(pid).resident_bytes,
        device=worker.placement.shown_device,
        cores=worker.placement.cores,
        note=worker.note(now_s),
        failed_starts=worker.failed_starts,
    )


@dataclass
class _CpuTime:
    """CPU time of a worker over all of its processes: of ended ones, the last value read."""

    pid: int = 0
    before_s: float = 0.0  # of earlier processes
    seen_s: float = 0.0  # of the current one

    def total(self, pid: int, now_s: float) -> float:
        if pid != self.pid:
            self.before_s, self.pid, self.seen_s = self.before_s + self.seen_s, pid, 0.0
        self.seen_s = max(self.seen_s, now_s)
        return self.before_s + self.seen_s


@dataclass
class NodeMetricsSource:
    """Source of the metric families that do not come from the workers' tables. `usage` reads a process's usage."""

    config: NodeConfig
    workers: Sequence[WorkerPlan]
    version: str
    usage: Callable[[int], Usage] = process_usage
    _cpu_times: dict[str, _CpuTime] = field(default_factory=dict)

    def families(
        self,
        statuses: Sequence[WorkerStatus],
        supervisor_pid: int,
        spares: Sequence[WorkerStatus] = (),
        draining: bool = False,
    ) -> "Iterator[Family]":
        """Yield all families with their current values. `spares`: the standby workers."""
        yield from _states(statuses)
        pids = {status.name: status.pid for status in (*statuses, *spares)}
        yield from self._processes(pids | {"supervisor": supervisor_pid})
        yield ProcessMetrics.STANDBY_UP.of({s.name: s.phase == "standby" for s in spares})
        yield from self._targets()
        yield NodeMetrics.INFO.of({self.version: 1.0})
        yield NodeMetrics.DRAINING.now(draining)
        yield ProcessMetrics.INFO.of({(w.name, w.role, w.shown_device, w.gpu): 1.0 for w in self.workers})
        memory = psutil.virtual_memory()
        yield NodeMetrics.MEMORY.now(memory.total)
        yield NodeMetrics.MEMORY_AVAILABLE.now(memory.available)

    def _processes(self, pids: dict[str, int]) -> "Iterator[Family]":
        engines = {place.name for place in self.workers if place.role == "engine"}  # vLLM runs in their descendants
        usages = {name: (tree_usage if name in engines else self.usage)(pid) for name, pid in pids.items()}
        totals = {
            name: self._cpu_times.setdefault(name, _CpuTime()).total(pids[name], u.cpu_s) for name, u in usages.items()
        }
        yield ProcessMetrics.CPU_SECONDS.of(totals)
        yield ProcessMetrics.RESIDENT.of({name: usage.resident_bytes for name, usage in usages.items()})
        yield ProcessMetrics.THREADS.of({name: usage.threads for name, usage in usages.items()})
        yield ProcessMetrics.OPEN_FDS.of({name: usage.fds for name, usage in usages.items()})

    def _targets(self) -> "Iterator[Family]":
        slo = self.config.slo
        yield NodeMetrics.SLO_LIMIT.of({"ttft": slo.ttft_s, "tpot": slo.tpot_s, "search": slo.search_s})
        yield NodeMetrics.SLO_OBJECTIVE.now(slo.objective)
        yield ControlMetrics.LINK_TARGET.now(law.LINK_TARGET)
        yield ControlMetrics.STALL_TARGET.now(law.DECODE_STALL_TARGET)
        yield ControlMetrics.WAIT_TARGET.now(law.wait_target_s(self.config))


def _states(statuses: Sequence[WorkerStatus]) -> "Iterator[Family]":
    yield ProcessMetrics.UP.of({s.name: s.phase == "ready" for s in statuses})
    # A worker writes no heartbeats while it loads, which may take minutes: that is not a hung loop.
    ages = {s.name: s.heartbeat_age_s if s.phase in _WITH_HEARTBEAT else 0.0 for s in statuses}
    yield ProcessMetrics.HEARTBEAT_AGE.of(ages)
    yield ProcessMetrics.STATE.of({(s.name, s.phase): 1.0 for s in statuses})
    yield ProcessMetrics.FAILED_STARTS.of({s.name: s.failed_starts for s in statuses})
    yield ProcessMetrics.RESTARTS.of({s.name: s.restarts for s in statuses})
