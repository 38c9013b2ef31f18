"""What the supervisor itself tells Prometheus, beside its workers' tables: of processes, promises, control and GPUs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


class NamedMetric:
    """Something with a name in Prometheus."""

    name: str

    def __str__(self) -> str:
        return self.name


class SupervisorMetric(NamedMetric):
    """A gauge, or a counter if its name ends with `_total`."""

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name, self._help, self._labels = name, help, labels

    def of(self, values: Mapping[Any, float]) -> "Family":
        """Its values now, by the values of its labels: a string, where it has one label."""
        # Here, for workers import the names and have no use for Prometheus's client.
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = kind(self.name, self._help, labels=self._labels)
        for labels, value in values.items():
            family.add_metric((labels,) if isinstance(labels, str) else labels, value)
        return family

    def now(self, value: float) -> "Family":
        """Its value, if it has no labels."""
        return self.of({(): value})


class NodeMetrics:
    INFO = SupervisorMetric("trinity_node_info", "The node's version", "version")
    MEMORY = SupervisorMetric("trinity_node_memory_bytes", "The machine's memory")
    MEMORY_AVAILABLE = SupervisorMetric("trinity_node_memory_available_bytes", "What of it can be had")
    DRAINING = SupervisorMetric("trinity_node_draining", "1 while the node drains: /health fails, it goes on to answer")
    SLO_LIMIT = SupervisorMetric("trinity_slo_limit_seconds", "The SLO's limit", "slo")
    SLO_OBJECTIVE = SupervisorMetric("trinity_slo_objective_ratio", "Promised share of requests")


class ProcessMetrics:
    INFO = SupervisorMetric("trinity_worker_info", "Where a worker is placed", "worker", "role", "device", "uuid")
    UP = SupervisorMetric("trinity_worker_up", "1 while the worker is ready", "worker")
    STANDBY_UP = SupervisorMetric(
        "trinity_standby_up", "1 while the standby worker could take another's place", "worker"
    )
    HEARTBEAT_AGE = SupervisorMetric(
        "trinity_worker_heartbeat_age_seconds", "Since the worker's last heartbeat", "worker"
    )
    STATE = SupervisorMetric("trinity_worker_state", "The worker's state, 1", "worker", "state")
    FAILED_STARTS = SupervisorMetric(
        "trinity_worker_failed_starts",
        "Starts of the worker that failed since it was last ready; 3 and more: it cannot run",
        "worker",
    )
    RESTARTS = SupervisorMetric("trinity_worker_restarts_total", "Restarts of the worker", "worker")
    CPU_SECONDS = SupervisorMetric("trinity_worker_cpu_seconds_total", "Processor time, over restarts", "worker")
    RESIDENT = SupervisorMetric("trinity_worker_resident_memory_bytes", "Resident memory", "worker")
    THREADS = SupervisorMetric("trinity_worker_threads", "Threads", "worker")
    OPEN_FDS = SupervisorMetric("trinity_worker_open_fds", "Open descriptors", "worker")


class ControlMetrics:
    RESERVE = SupervisorMetric("trinity_control_reserve", "Share of pool slots owed to prefill queries")
    FLUSH_PREFILL = SupervisorMetric(
        "trinity_control_flush_prefill_seconds", "How long prefill leaves the slots to decode"
    )
    CHANGES = SupervisorMetric("trinity_control_changes_total", "Changes made by the control loop")
    ROLE_LOAD = SupervisorMetric(
        "trinity_planner_load_ratio", "What a role does over what it can do within the SLOs", "role"
    )
    MOVES = SupervisorMetric("trinity_planner_moves_total", "Workers that were to leave a role for the other", "role")
    LINK_TARGET = SupervisorMetric("trinity_control_link_target_ratio", "KV link use that is wanted at least")
    STALL_TARGET = SupervisorMetric("trinity_control_stall_target_ratio", "Stalled share of rows' time that is borne")
    WAIT_TARGET = SupervisorMetric("trinity_control_wait_target_seconds", "P95 wait of prefill queries that is borne")


class GpuMetrics:
    NVML_UP = SupervisorMetric("trinity_nvml_up", "1 if NVML works; else reason says why not", "reason")
    MEMORY = SupervisorMetric("trinity_gpu_memory_bytes", "Memory", "gpu", "uuid")
    MEMORY_USED = SupervisorMetric("trinity_gpu_memory_used_bytes", "Memory in use", "gpu", "uuid")
    BUSY = SupervisorMetric("trinity_gpu_busy_ratio", "Share of time with a kernel running", "gpu", "uuid")
    MEMORY_BUSY = SupervisorMetric(
        "trinity_gpu_memory_busy_ratio", "Share of time in which memory was read or written", "gpu", "uuid"
    )
    POWER = SupervisorMetric("trinity_gpu_power_watts", "Power drawn", "gpu", "uuid")
    TEMPERATURE = SupervisorMetric("trinity_gpu_temperature_celsius", "Temperature", "gpu", "uuid")
