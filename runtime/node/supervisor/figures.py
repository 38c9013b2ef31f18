"""What the supervisor knows of its node, as metrics: its workers' states and processes, and what was promised."""

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from runtime.node.config import NodeConfig
from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.admin import WorkerStatus

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True)
class Usage:
    """What a process holds: seconds of processor time, resident bytes, threads, open descriptors."""

    cpu_s: float = 0.0
    resident_bytes: int = 0
    threads: int = 0
    fds: int = 0


def node_version() -> str:
    """The installed distribution's version; "" when run from a bare checkout."""
    try:
        return importlib.metadata.version("trinity-runtime")
    except importlib.metadata.PackageNotFoundError:
        return ""


def usage_of(pid: int) -> Usage:
    """Of a process of ours; nothing if it has just ended (or `pid` is 0)."""
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


@dataclass
class _Spent:
    """Processor time of a worker over all its lives: what earlier ones were last seen with is kept."""

    pid: int = 0
    before_s: float = 0.0
    seen_s: float = 0.0

    def total(self, pid: int, now_s: float) -> float:
        if pid != self.pid:
            self.before_s, self.pid, self.seen_s = self.before_s + self.seen_s, pid, 0.0
        self.seen_s = max(self.seen_s, now_s)
        return self.before_s + self.seen_s


@dataclass
class NodeFigures:
    """The families that do not come from the workers' tables. `usage` looks a process up."""

    config: NodeConfig
    workers: Sequence[WorkerPlan]
    version: str
    usage: Callable[[int], Usage] = usage_of
    _spent: dict[str, _Spent] = field(default_factory=dict)

    def families(
        self, statuses: Sequence[WorkerStatus], supervisor_pid: int, spares: Sequence[WorkerStatus] = ()
    ) -> Iterator[Family]:
        """All of them now. `spares`: the standby workers."""
        yield from self._states(statuses)
        pids = {status.name: status.pid for status in (*statuses, *spares)}
        yield from self._processes(pids | {"supervisor": supervisor_pid})
        loaded = [((s.name,), float(s.phase == "standby")) for s in spares]
        yield _gauge("trinity_standby_up", "1 while the standby worker could take another's place", ("worker",), loaded)
        yield from self._promises()
        yield _gauge("trinity_node_info", "The node's version", ("version",), [((self.version,), 1.0)])
        labels = ("worker", "role", "device", "uuid")
        places = [((w.name, w.role, w.shown_device, w.gpu), 1.0) for w in self.workers]
        yield _gauge("trinity_worker_info", "Where a worker is placed", labels, places)
        memory = psutil.virtual_memory()
        yield _gauge("trinity_node_memory_bytes", "The machine's memory", (), [((), float(memory.total))])
        available = [((), float(memory.available))]
        yield _gauge("trinity_node_memory_available_bytes", "What of it can be had", (), available)

    def _states(self, statuses: Sequence[WorkerStatus]) -> Iterator[Family]:
        worker = ("worker",)
        up = [((s.name,), float(s.phase == "ready")) for s in statuses]
        yield _gauge("trinity_worker_up", "1 while the worker is ready", worker, up)
        age = [((s.name,), s.heartbeat_age_s) for s in statuses]
        yield _gauge("trinity_worker_heartbeat_age_seconds", "Since the worker's last heartbeat", worker, age)
        state = [((s.name, s.phase), 1.0) for s in statuses]
        yield _gauge("trinity_worker_state", "The worker's state, 1", ("worker", "state"), state)
        failed = [((s.name,), float(s.failed_starts)) for s in statuses]
        help = "Starts of the worker that failed since it was last ready; 3 and more: it cannot run"
        yield _gauge("trinity_worker_failed_starts", help, worker, failed)
        restarts = CounterMetricFamily("trinity_worker_restarts_total", "Restarts of the worker", labels=worker)
        for status in statuses:
            restarts.add_metric([status.name], status.restarts)
        yield restarts

    def _processes(self, pids: dict[str, int]) -> Iterator[Family]:
        worker = ("worker",)
        usages = {name: self.usage(pid) for name, pid in pids.items()}
        cpu = CounterMetricFamily("trinity_worker_cpu_seconds_total", "Processor time, over restarts", labels=worker)
        for name, usage in usages.items():
            cpu.add_metric([name], self._spent.setdefault(name, _Spent()).total(pids[name], usage.cpu_s))
        yield cpu
        resident = [((name,), float(usage.resident_bytes)) for name, usage in usages.items()]
        yield _gauge("trinity_worker_resident_memory_bytes", "Resident memory", worker, resident)
        threads = [((name,), float(usage.threads)) for name, usage in usages.items()]
        yield _gauge("trinity_worker_threads", "Threads", worker, threads)
        fds = [((name,), float(usage.fds)) for name, usage in usages.items()]
        yield _gauge("trinity_worker_open_fds", "Open descriptors", worker, fds)

    def _promises(self) -> Iterator[Family]:
        slo, control = self.config.slo, self.config.control
        limits = [(("ttft",), slo.ttft_s), (("tpot",), slo.tpot_s), (("search",), slo.search_s)]
        yield _gauge("trinity_slo_limit_seconds", "The SLO's limit", ("slo",), limits)
        yield _gauge("trinity_slo_objective_ratio", "Promised share of requests", (), [((), slo.objective)])
        link = [((), control.link_target)]
        yield _gauge("trinity_control_link_target_ratio", "KV link use that is wanted at least", (), link)
        stall = [((), control.decode_stall_target)]
        yield _gauge("trinity_control_stall_target_ratio", "Stalled share of rows' time that is borne", (), stall)
        wait = [((), control.prefill_wait_target_s)]
        yield _gauge("trinity_control_wait_target_seconds", "P95 wait of prefill queries that is borne", (), wait)


def _gauge(
    name: str, text: str, labels: Sequence[str], values: Sequence[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
