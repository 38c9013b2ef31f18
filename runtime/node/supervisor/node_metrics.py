"""Metrics that the supervisor itself collects: states and resource usage of the workers, SLOs, machine memory."""

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import psutil

from runtime.node.config import NodeConfig
from runtime.node.control import law
from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.admin import NodeStatus, WorkerStatus
from runtime.node.supervisor.supervised_worker import Phase, SupervisedWorker
from runtime.node.supervisor_metrics import ControlMetrics, Family, NodeMetrics, ProcessMetrics

_WITH_HEARTBEAT = frozenset(phase.value for phase in (Phase.READY, Phase.STANDBY, Phase.DRAINING, Phase.KILLED))


@cache
def node_version() -> str:
    """Return the version of the installed distribution, "" in a checkout that is not installed."""
    try:
        return importlib.metadata.version("trinity-runtime")
    except importlib.metadata.PackageNotFoundError:
        return ""


class Usage(NamedTuple):
    """CPU time, resident memory and open file descriptors."""

    cpu_s: float = 0.0
    resident_bytes: int = 0
    fds: int = 0


def usage_of(pid: int, *, descendants: bool = False) -> Usage:
    """Return the usage of a process, or of all that it has started too; 0 if it has ended or `pid` is 0."""
    try:
        process = psutil.Process(pid) if pid else None
        processes = [] if process is None else [process, *(process.children(recursive=True) if descendants else ())]
        times = [one.cpu_times() for one in processes]
        return Usage(
            sum(time.user + time.system for time in times),
            sum(int(one.memory_info().rss) for one in processes),
            sum(one.num_fds() for one in processes),
        )
    except psutil.Error:
        return Usage()


def worker_status(worker: SupervisedWorker, now_s: float) -> WorkerStatus:
    """Return what `trinity status` shows of a worker."""
    pid = worker.process.pid if worker.process else 0
    usage = usage_of(pid, descendants=worker.placement.role == "engine")  # vLLM runs in its own
    return WorkerStatus(
        name=worker.name,
        phase=worker.phase.value,
        pid=pid,
        epoch=worker.epoch,
        restarts=worker.restarts,
        heartbeat_age_s=worker.heartbeat_age_s,
        resident_bytes=usage.resident_bytes,
        cpu_s=usage.cpu_s,
        fds=usage.fds,
        device=worker.placement.shown_device,
        cores=worker.placement.cores,
        note=worker.note(now_s),
        failed_starts=worker.failed_starts,
    )


def node_families(config: NodeConfig, workers: Sequence[WorkerPlan], status: NodeStatus) -> Iterator[Family]:
    """Yield the metric families that do not come from the workers' tables. `workers`: where they are placed."""
    statuses = status.workers
    yield ProcessMetrics.UP.of({s.name: s.phase == "ready" for s in statuses})
    # A worker writes no heartbeats while it loads, which may take minutes: that is not a hung loop.
    ages = {s.name: s.heartbeat_age_s if s.phase in _WITH_HEARTBEAT else 0.0 for s in statuses}
    yield ProcessMetrics.HEARTBEAT_AGE.of(ages)
    yield ProcessMetrics.STATE.of({(s.name, s.phase): 1.0 for s in statuses})
    yield ProcessMetrics.FAILED_STARTS.of({s.name: s.failed_starts for s in statuses})
    yield ProcessMetrics.RESTARTS.of({s.name: s.restarts for s in statuses})
    usages = {s.name: Usage(s.cpu_s, s.resident_bytes, s.fds) for s in (*statuses, *status.spares)}
    usages["supervisor"] = usage_of(os.getpid())
    yield ProcessMetrics.CPU_SECONDS.of({name: usage.cpu_s for name, usage in usages.items()})
    yield ProcessMetrics.RESIDENT.of({name: usage.resident_bytes for name, usage in usages.items()})
    yield ProcessMetrics.OPEN_FDS.of({name: usage.fds for name, usage in usages.items()})
    yield ProcessMetrics.STANDBY_UP.of({s.name: s.phase == "standby" for s in status.spares})
    slo = config.slo
    yield NodeMetrics.SLO_LIMIT.of({"ttft": slo.ttft_s, "tpot": slo.tpot_s, "search": slo.search_s})
    yield NodeMetrics.SLO_OBJECTIVE.now(slo.objective)
    yield ControlMetrics.LINK_TARGET.now(law.LINK_TARGET)
    yield ControlMetrics.STALL_TARGET.now(law.DECODE_STALL_TARGET)
    yield ControlMetrics.WAIT_TARGET.now(law.wait_target_s(config))
    yield NodeMetrics.INFO.of({node_version(): 1.0})
    yield NodeMetrics.DRAINING.now(status.draining or status.stopping)
    yield ProcessMetrics.INFO.of({(w.name, w.role, w.shown_device, w.gpu): 1.0 for w in workers})
    machine = psutil.virtual_memory()
    yield NodeMetrics.MEMORY.now(machine.total)
    yield NodeMetrics.MEMORY_AVAILABLE.now(machine.available)
