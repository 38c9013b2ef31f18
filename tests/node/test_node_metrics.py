"""Node metrics of the supervisor: worker processes and SLOs."""

import os
import subprocess
import sys

import pytest
from prometheus_client import Metric as Family

from runtime.node.config import NodeConfig, SloSection
from runtime.node.placement.plan import WorkerPlan
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.admin import NodeStatus, WorkerStatus
from runtime.node.supervisor.node_metrics import Usage, node_families, usage_of

POOL = WorkerPlan(role="pool", index=0, device="cpu", cores=(), threads=1)


def status(pid: int, phase: str = "ready", heartbeat_age_s: float = 0.5) -> WorkerStatus:
    return WorkerStatus(
        name="pool-0", phase=phase, pid=pid, epoch=1, restarts=2, heartbeat_age_s=heartbeat_age_s,
        resident_bytes=4096, device="cpu", cores=(), cpu_s=3.0, fds=6,
    )  # fmt: skip


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    found = [s.value for s in families[name].samples if labels.items() <= s.labels.items()]
    assert len(found) == 1, (name, labels)
    return float(found[0])


def read(worker: WorkerStatus, config: NodeConfig = NodeConfig()) -> dict[str, Family]:  # noqa: B008
    status = NodeStatus(NodeInfo("n", 1, "", "", (), ()), False, (worker,))
    return {family.name: family for family in node_families(config, [POOL], status)}


def test_a_workers_state_age_restarts_and_process_are_exported() -> None:
    found = read(status(7))
    assert value(found, "trinity_worker_up", worker="pool-0") == 1
    assert value(found, "trinity_worker_state", worker="pool-0", state="ready") == 1
    assert value(found, "trinity_worker_heartbeat_age_seconds", worker="pool-0") == 0.5
    assert value(found, "trinity_worker_restarts", worker="pool-0") == 2
    assert value(found, "trinity_worker_resident_memory_bytes", worker="pool-0") == 4096
    assert value(found, "trinity_worker_cpu_seconds", worker="pool-0") == 3.0
    assert value(found, "trinity_worker_open_fds", worker="pool-0") == 6
    assert value(found, "trinity_worker_resident_memory_bytes", worker="supervisor") > 1 << 20
    assert value(found, "trinity_worker_info", worker="pool-0", role="pool", device="cpu") == 1


@pytest.mark.parametrize(
    ("phase", "age"),
    [("starting", 0), ("backoff", 0), ("stopped", 0), ("ready", 25), ("draining", 25), ("killed", 25)],
)
def test_a_worker_that_loads_for_long_has_no_old_heartbeat(phase: str, age: float) -> None:
    """`TrinityHeartbeatOld` reports hung loops, and not starts of more than 15 s."""
    found = read(status(7, phase, heartbeat_age_s=25))
    assert value(found, "trinity_worker_heartbeat_age_seconds", worker="pool-0") == age


@pytest.mark.parametrize(("stopping", "draining"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_node_that_stops_drains_like_one_that_an_operator_drains(stopping: bool, draining: bool) -> None:
    told = NodeStatus(NodeInfo("n", 1, "", "", (), ()), stopping, (), draining=draining)
    found: dict[str, Family] = {family.name: family for family in node_families(NodeConfig(), [], told)}
    assert value(found, "trinity_node_draining") == (stopping or draining)


def test_slos_are_exported_with_their_limits() -> None:
    config = NodeConfig(slo=SloSection(ttft_s=0.4, objective=0.95))
    found = read(status(0, "backoff"), config)
    assert value(found, "trinity_worker_up", worker="pool-0") == 0
    assert value(found, "trinity_slo_limit_seconds", slo="ttft") == 0.4
    assert value(found, "trinity_slo_objective_ratio") == 0.95


def test_an_engines_usage_includes_what_it_has_started_and_an_ended_process_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        alone, together = usage_of(os.getpid()), usage_of(os.getpid(), descendants=True)
        assert together.resident_bytes > alone.resident_bytes
        assert together.fds > alone.fds
        child.communicate()
        assert usage_of(child.pid) == Usage()
    assert usage_of(0) == Usage()
