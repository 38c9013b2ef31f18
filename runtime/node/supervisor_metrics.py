"""Declarations of the metrics that the supervisor itself exports: processes, SLOs, control loop, GPUs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Family: TypeAlias = "CounterMetricFamily | GaugeMetricFamily"


class NamedMetric:
    """Base of metric declarations. `str()` is the name in Prometheus."""

    name: str

    def __str__(self) -> str:
        return self.name


class SupervisorMetric(NamedMetric):
    """A gauge, or a counter if its name ends with `_total`."""

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name, self._help, self._labels = name, help, labels

    def of(self, values: Mapping[Any, float]) -> Family:
        """Return a family with these values, keyed by label values; a plain string if there is one label."""
        # Imported here: workers import this module and do not need Prometheus's client.
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = kind(self.name, self._help, labels=self._labels)
        for labels, value in values.items():
            family.add_metric((labels,) if isinstance(labels, str) else labels, value)
        return family

    def now(self, value: float) -> Family:
        """Return a family with one value, for a metric without labels."""
        return self.of({(): value})


class NodeMetrics:
    INFO = SupervisorMetric("trinity_node_info", "The node's version", "version")
    MEMORY = SupervisorMetric("trinity_node_memory_bytes", "Memory of the machine")
    MEMORY_AVAILABLE = SupervisorMetric("trinity_node_memory_available_bytes", "Available memory of the machine")
    DRAINING = SupervisorMetric(
        "trinity_node_draining", "1 while the node drains: /health fails, requests are still answered"
    )
    SLO_LIMIT = SupervisorMetric("trinity_slo_limit_seconds", "Latency limit of the SLO", "slo")
    SLO_OBJECTIVE = SupervisorMetric("trinity_slo_objective_ratio", "Share of requests that must meet the SLOs")


class ProcessMetrics:
    INFO = SupervisorMetric("trinity_worker_info", "Placement of the worker", "worker", "role", "device", "uuid")
    UP = SupervisorMetric("trinity_worker_up", "1 while the worker is ready", "worker")
    STANDBY_UP = SupervisorMetric(
        "trinity_standby_up", "1 while the standby worker is ready to replace a worker", "worker"
    )
    HEARTBEAT_AGE = SupervisorMetric(
        "trinity_worker_heartbeat_age_seconds", "Time since the worker's last heartbeat; 0 until it is ready", "worker"
    )
    STATE = SupervisorMetric("trinity_worker_state", "1 for the worker's current state", "worker", "state")
    FAILED_STARTS = SupervisorMetric(
        "trinity_worker_failed_starts",
        "Failed starts since the worker was last ready; 3 or more: it cannot run",
        "worker",
    )
    RESTARTS = SupervisorMetric("trinity_worker_restarts_total", "Restarts of the worker", "worker")
    CPU_SECONDS = SupervisorMetric("trinity_worker_cpu_seconds_total", "CPU time of the worker's process", "worker")
    RESIDENT = SupervisorMetric("trinity_worker_resident_memory_bytes", "Resident memory", "worker")
    OPEN_FDS = SupervisorMetric("trinity_worker_open_fds", "Open file descriptors", "worker")


class ControlMetrics:
    RESERVE = SupervisorMetric("trinity_control_reserve", "Share of pool slots reserved for prefill queries")
    FLUSH_PREFILL = SupervisorMetric(
        "trinity_control_flush_prefill_seconds", "How long a prefill query leaves free slots to decode"
    )
    CHANGES = SupervisorMetric("trinity_control_changes_total", "Changes made by the control loop")
    ROLE_LOAD = SupervisorMetric(
        "trinity_planner_load_ratio", "Load of a role over its capacity within the SLOs", "role"
    )
    MOVES = SupervisorMetric(
        "trinity_planner_moves_total", "Flips from this role to the other that the planner decided on", "role"
    )
    LINK_TARGET = SupervisorMetric("trinity_control_link_target_ratio", "Target of the KV link's use")
    STALL_TARGET = SupervisorMetric(
        "trinity_control_stall_target_ratio", "Target of the stalled share of decode rows' time"
    )
    WAIT_TARGET = SupervisorMetric("trinity_control_wait_target_seconds", "Target of prefill queries' P95 wait")


class GpuMetrics:
    NVML_UP = SupervisorMetric("trinity_nvml_up", "1 if NVML works; else reason has the error", "reason")
    MEMORY = SupervisorMetric("trinity_gpu_memory_bytes", "Memory", "gpu", "uuid")
    MEMORY_USED = SupervisorMetric("trinity_gpu_memory_used_bytes", "Memory in use", "gpu", "uuid")
    BUSY = SupervisorMetric("trinity_gpu_busy_ratio", "Share of time with a kernel running", "gpu", "uuid")
    MEMORY_BUSY = SupervisorMetric(
        "trinity_gpu_memory_busy_ratio", "Share of time in which memory was read or written", "gpu", "uuid"
    )
    POWER = SupervisorMetric("trinity_gpu_power_watts", "Power drawn", "gpu", "uuid")
