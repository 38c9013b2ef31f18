"""Adding, removing and flipping workers at run time; every role keeps a worker and failures do not end the node."""

import itertools
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.errors import InvalidRequest, Unavailable
from runtime.node.config import NodeConfig, SloSection
from runtime.node.control.law import SignalMeter
from runtime.node.control.loop import ControlLoop
from runtime.node.engine_config import ModelSection, Stage, VllmSection, VllmStage
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.node.supervisor.admin import NodeStatus, admin_request, restart_node, scale_workers
from runtime.node.supervisor.scaling import Scaler
from runtime.node.supervisor.supervised_worker import Desired, Phase
from runtime.node.supervisor.supervisor import Supervisor
from runtime.node.worker_config import PoolSection
from tests.node.conftest import StartTiny
from tests.node.tiny_node import TinyNode, serve_eight_gpus, worker

MODEL = """
[model]
name = "/nowhere"

[prefill]
workers = 2
"""
POOLS = """
[pool]
workers = 4
"""
GPUS = """
[model]
name = "/nowhere"

[prefill]
workers = 2
devices = ["cuda:0", "cuda:1"]

[decode]
workers = 2
devices = ["cuda:2", "cuda:3"]

[pool]
workers = 2
devices = ["cuda:3", "cuda:4"]
"""


@pytest.fixture
def start(start_tiny: StartTiny) -> StartTiny:
    """Start nodes, by default with a model, and wait until all workers are ready."""

    def start(orders: dict[str, list[str]] | None = None, more: str = MODEL, **options: Any) -> TinyNode:
        node = start_tiny(orders, more=more, **options)
        node.ready()
        return node

    return start


def change(node: TinyNode, verb: str, what: str) -> str:
    """Return the names of the added or removed workers."""
    return " ".join(scale_workers(node.info, verb, what, timeout_s=60))  # type: ignore[arg-type]


def names(status: NodeStatus) -> set[str]:
    return {found.name for found in status.workers} - {"pool-0", "frontend-0"}


def test_an_added_worker_becomes_ready(start: StartTiny) -> None:
    node = start()
    before = node.ready()
    assert change(node, "add", "decode") == "decode-1"
    status = node.ready()
    assert names(status) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert worker(status, "decode-1").restarts == 0
    assert {found.pid for found in before.workers} < {found.pid for found in status.workers}
    assert 'worker="decode-1"' in admin_request(node.info.control, "metrics").decode()


def test_a_drained_worker_exits_and_is_removed(start: StartTiny) -> None:
    node = start()
    node.ready()
    assert change(node, "drain", "prefill") == "prefill-1"
    assert names(node.ready()) == {"prefill-0", "decode-0"}
    assert node.stopped() == ["prefill-1"]
    assert 'worker="prefill-1"' not in admin_request(node.info.control, "metrics").decode()
    restart_node(node.info, "", timeout_s=60)  # all that is left can be restarted


def test_a_flip_drains_the_old_worker_when_the_new_one_is_ready(start: StartTiny) -> None:
    node = start()
    assert change(node, "flip", "prefill") == "decode-1"
    assert names(node.ready()) == {"prefill-0", "decode-0", "decode-1"}
    log = node.log.read_text()
    assert log.index("decode-1 is added") < log.index("prefill-1 leaves") < log.index("prefill-1 has left")
    assert change(node, "flip", "decode-0") == "prefill-1"
    assert names(node.ready()) == {"prefill-0", "prefill-1", "decode-1"}


def test_the_old_worker_serves_until_the_new_one_is_ready(start: StartTiny) -> None:
    node = start({"decode-1": ["never ready"]})
    admin_request(node.info.control, "flip prefill-1")
    status = node.eventually(lambda status: "decode-1" in names(status), "the new worker")
    assert worker(status, "prefill-1").phase == "ready"
    for verb in ("drain", "flip"):
        with pytest.raises(InvalidRequest, match="prefill-1 is already draining"):
            change(node, verb, "prefill-1")
        with pytest.raises(InvalidRequest, match="without a ready prefill worker; add one first"):
            change(node, verb, "prefill-0")


@pytest.mark.parametrize("life", ["crash", "real refuse"])
def test_an_added_worker_that_cannot_run_is_removed_and_the_node_continues(start: StartTiny, life: str) -> None:
    node = start({"decode-1": [life]})
    with pytest.raises(Unavailable, match="decode-1 cannot run"):
        change(node, "flip", "prefill")
    status = node.eventually(lambda status: names(status) == {"prefill-0", "prefill-1", "decode-0"}, "it to be gone")
    assert worker(status, "prefill-1").phase == "ready"
    assert "decode-1 cannot run" in node.log.read_text()


def test_a_draining_worker_that_dies_is_not_restarted(start: StartTiny) -> None:
    node = start({"prefill-1": ["busy"]})
    pid = worker(node.ready(), "prefill-1").pid
    admin_request(node.info.control, "drain prefill-1")
    node.eventually(lambda status: worker(status, "prefill-1").phase == "draining", "it to drain")
    os.kill(pid, signal.SIGKILL)
    node.eventually(lambda status: names(status) == {"prefill-0", "decode-0"}, "it to be gone")
    assert "it restarts in" not in node.log.read_text()


def test_a_change_of_the_last_or_an_unknown_worker_or_role_is_refused_with_what_can_be_changed(
    start: StartTiny,
) -> None:
    node = start()
    for verb, what in itertools.product(("drain", "flip"), ("decode", "decode-0")):
        with pytest.raises(InvalidRequest, match="without a ready decode worker; add one first"):
            change(node, verb, what)
    for what in ("pool-9", "decode-7", "drafter", "", "x" * 60):
        for verb, there in (
            ("drain", "pool-0, prefill-0, prefill-1, decode-0"),
            ("flip", "prefill-0, prefill-1, decode-0"),
        ):
            with pytest.raises(InvalidRequest, match=f"no worker '{what}'; available: {there}$"):
                change(node, verb, what)
        with pytest.raises(InvalidRequest, match=f"this command does not accept role '{what}'"):
            change(node, "add", what)
    roles = {"add": "prefill, decode, pool", "drain": "prefill, decode, pool", "flip": "decode"}
    for verb, what in itertools.product(roles, ("frontend", "frontend-0")):
        with pytest.raises(InvalidRequest, match=f"does not accept role .*{roles[verb]}$"):
            change(node, verb, what)
    assert names(node.ready()) == {"prefill-0", "prefill-1", "decode-0"}


def test_a_removed_pool_worker_can_be_added_back_up_to_the_plan(start: StartTiny) -> None:
    node = start(more=POOLS)
    assert change(node, "drain", "pool-1") == "pool-1"
    assert {found.name for found in node.ready().workers} == {"pool-0", "pool-2", "pool-3", "frontend-0"}
    assert node.stopped() == ["pool-1"]
    restart_node(node.info, "frontend-0", timeout_s=60)  # told of the plan as it is now
    assert change(node, "add", "pool") == "pool-1"
    status = node.ready()
    assert (worker(status, "pool-1").epoch, worker(status, "pool-1").restarts) == (2, 0)
    with pytest.raises(InvalidRequest, match="all 4 pool workers of the plan are running"):
        change(node, "add", "pool")


def test_a_vllm_instance_can_be_drained_and_added_back_up_to_the_plan() -> None:
    stages: list[Stage] = ["prefill", "decode"]
    places = tuple(WorkerPlan("engine", 0, "cuda:0", (), 1, stage=stage) for stage in stages)
    section = VllmSection(name="m", prefill=VllmStage(), decode=VllmStage())
    node, added = Supervisor(NodePlan(NodeConfig(model=section), "", "t", places)), list[WorkerPlan]()
    for one in node.workers:
        one.phase = Phase.READY
    scaler = Scaler(
        node.workers, node.plan, add=added.append, remove=node.remove_worker, check_memory=lambda placement: None
    )
    with pytest.raises(InvalidRequest, match="all 2 engine workers of the plan are running"):
        scaler.request("add", "engine")
    assert scaler.request("drain", "engine-prefill-0") == ("engine-prefill-0",)
    with pytest.raises(InvalidRequest, match="without a ready engine worker"):
        scaler.request("drain", "engine")
    node.workers[0].phase = Phase.STOPPED
    scaler.step()
    assert [one.name for one in node.workers] == ["engine-decode-0"]
    assert scaler.request("add", "engine") == ("engine-prefill-0",)
    assert added == [places[0]]
    with pytest.raises(InvalidRequest, match="accepted on this node: none"):
        scaler.request("flip", "engine-decode-0")


def two_of_a_role() -> Supervisor:
    """A node that is not run, with two decode workers on a GPU, which are ready."""
    places = tuple(WorkerPlan("decode", n, "cuda:0", (), 1, gpu="GPU-0") for n in range(2))
    made = Supervisor(NodePlan(NodeConfig(model=ModelSection(name="/nowhere")), "", "t", places))
    for one in made.workers:
        one.phase = Phase.READY
    return made


def test_a_flip_that_a_gpu_has_no_memory_for_is_refused_and_starts_nothing() -> None:
    node, added = two_of_a_role(), list[WorkerPlan]()

    def full(placement: WorkerPlan) -> None:
        raise InvalidRequest(f"{placement.name} does not fit into {placement.gpu}")

    scaler = Scaler(node.workers, node.plan, add=added.append, remove=node.workers.remove, check_memory=full)
    with pytest.raises(InvalidRequest, match="prefill-0 does not fit into GPU-0"):
        scaler.request("flip", "decode")
    assert (added, scaler.in_progress) == ([], False)


def test_a_worker_that_the_host_has_no_memory_for_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=3 << 30))
    places = (WorkerPlan("prefill", 0, "cpu", (), 1), WorkerPlan("decode", 0, "cpu", (), 1))
    plan = NodePlan(NodeConfig(model=ModelSection(name="/nowhere")), "", "t", places)
    supervisor = Supervisor(plan, device_bytes={"prefill-0": 4 << 30, "decode-0": 2 << 30})
    with pytest.raises(InvalidRequest, match=r"the host has 3\.0 GiB free, but prefill-0 needs 4\.0 GiB"):
        supervisor.check_memory(places[0])
    supervisor.check_memory(places[1])


def test_a_flip_whose_new_worker_cannot_run_has_failed() -> None:
    node, other = two_of_a_role(), two_of_a_role()
    new = other.workers[0]

    def add(placement: WorkerPlan) -> None:
        new.placement = placement
        node.workers.append(new)

    scaler = Scaler(node.workers, node.plan, add=add, remove=node.workers.remove, check_memory=lambda placement: None)
    assert scaler.request("flip", "decode") == ("prefill-0",)
    new.phase = Phase.STARTING
    assert not scaler.step()
    new.desired, new.phase = Desired.STOP, Phase.STOPPED
    assert scaler.step()
    assert [one.name for one in node.workers] == ["decode-0", "decode-1"]
    assert not scaler.step()


def test_every_shard_keeps_a_pool_worker(start: StartTiny) -> None:
    node = start(more="shards = 2\n" + POOLS)
    assert change(node, "drain", "pool-2") == "pool-2"
    with pytest.raises(InvalidRequest, match="shard 0 of collection 'docs' without a ready pool worker"):
        change(node, "drain", "pool-0")
    assert change(node, "drain", "pool-1") == "pool-1"
    with pytest.raises(InvalidRequest, match="shard 1 of"):
        change(node, "drain", "pool-3")


def test_a_drained_gpus_workers_can_be_added_back(start: StartTiny) -> None:
    node = start(more=GPUS, process=serve_eight_gpus)
    assert change(node, "drain", "cuda:3") == "pool-0 decode-1"
    assert "cuda:3" not in {found.device for found in node.ready().workers}
    with pytest.raises(
        InvalidRequest, match="no worker runs on cuda:3; GPUs with workers: cuda:0, cuda:1, cuda:2, cuda:4"
    ):
        change(node, "drain", "cuda:3")
    assert change(node, "add", "SIM-3") == "pool-0 decode-1"
    status = node.ready()
    assert {found.name for found in status.workers if found.device == "cuda:3"} == {"pool-0", "decode-1"}
    with pytest.raises(InvalidRequest, match="no worker of the plan is missing on cuda:3"):
        change(node, "add", "cuda:3")


def test_a_gpu_with_required_workers_is_not_drained(start: StartTiny) -> None:
    node = start(more=GPUS, process=serve_eight_gpus)
    assert change(node, "drain", "decode-0") == "decode-0"
    with pytest.raises(InvalidRequest, match="without a ready decode worker; add one first"):
        change(node, "drain", "cuda:3")
    assert {found.name for found in node.ready().workers if found.device == "cuda:3"} == {"pool-0", "decode-1"}
    assert change(node, "add", "decode") == "decode-0"  # where it was, not beside decode-1
    assert worker(node.ready(), "decode-0").device == "cuda:2"


def test_a_flipped_worker_keeps_names_of_other_gpus_free(start: StartTiny) -> None:
    node = start(more=GPUS, process=serve_eight_gpus)
    change(node, "drain", "decode-1")
    assert change(node, "flip", "prefill-1") == "decode-2"
    assert worker(node.ready(), "decode-2").device == "cuda:1"
    with pytest.raises(InvalidRequest, match="cannot flip cuda:1"):
        change(node, "flip", "cuda:1")


def test_the_number_of_workers_of_a_role_is_limited(start: StartTiny) -> None:
    node = start(more=MODEL.replace("workers = 2", "workers = 8"))
    with pytest.raises(InvalidRequest, match="the node has 8 prefill workers, the limit is 8"):
        change(node, "add", "prefill")


def test_a_removed_worker_counts_as_no_work_and_a_returning_pool_gets_the_current_knobs() -> None:
    tables = {name: WorkerTable.create("pool", name, SloSection()) for name in ("pool-0", "pool-1")}
    loop, meter = ControlLoop(NodeConfig(pool=PoolSection(reserve=0.4)), tables), SignalMeter()
    for number, table in enumerate(tables.values()):
        for _ in range(1 + 9 * number):
            table.observe(PoolMetrics.WAIT["prefill"], 10.0)
    meter.update(0.0, loop.readings())
    loop.remove_worker(tables.pop("pool-1"))
    assert meter.update(1.0, loop.readings()).prefill_wait_p95_s == 0.0
    tables["pool-0"].observe(PoolMetrics.WAIT["prefill"], 10.0)
    assert meter.update(2.0, loop.readings()).prefill_wait_p95_s > 5.0
    table = WorkerTable.create("pool", "pool-1", SloSection())
    loop.add_worker(table)
    assert table.knob("reserve") == 0.4
