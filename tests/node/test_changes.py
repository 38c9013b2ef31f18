"""Workers come and go while the node runs; no role is ever without one, and nothing of theirs takes the node down."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.errors import InvalidRequest, Unavailable
from runtime.node.config import ControlSection, PoolSection
from runtime.node.control import NodeStatus, ask, change_worker, restart_node
from runtime.node.control_loop import ControlLoop
from runtime.node.metrics import METRICS
from runtime.node.table import WorkerTable
from tests.node.test_supervisor import TinyNode, worker
from tests.node.tiny_node import TINY_WORKER

MODEL = """
[model]
name = "/nowhere"

[prefill]
workers = 2
"""

StartTiny = Callable[..., TinyNode]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartTiny]:
    nodes: list[TinyNode] = []

    def start(orders: dict[str, list[str]] | None = None, more: str = MODEL) -> TinyNode:
        nodes.append(TinyNode(tmp_path, orders or {}, TINY_WORKER, more=more))
        nodes[-1].ready()
        return nodes[-1]

    yield start
    for node in nodes:
        node.process.kill()
        node.process.join(timeout=60)


def change(node: TinyNode, verb: str, what: str) -> str:
    return change_worker(node.info, verb, what, timeout_s=60)  # type: ignore[arg-type]


def names(status: NodeStatus) -> set[str]:
    return {found.name for found in status.workers} - {"pool-0", "frontend-0"}


def test_a_worker_that_is_added_gets_ready_beside_the_others(start: StartTiny) -> None:
    node = start()
    before = node.ready()
    assert change(node, "add", "decode") == "decode-1"
    status = node.ready()
    assert names(status) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert worker(status, "decode-1").restarts == 0
    assert {found.pid for found in before.workers} < {found.pid for found in status.workers}
    assert 'worker="decode-1"' in ask(node.info.control, "metrics").decode()


def test_a_worker_that_is_drained_ends_by_itself_and_leaves_the_node(start: StartTiny) -> None:
    node = start()
    node.ready()
    assert change(node, "drain", "prefill") == "prefill-1"
    assert names(node.ready()) == {"prefill-0", "decode-0"}
    assert node.stopped() == ["prefill-1"]
    assert 'worker="prefill-1"' not in ask(node.info.control, "metrics").decode()
    restart_node(node.info, "", timeout_s=60)  # all that is left can be restarted


def test_a_name_that_is_used_again_is_another_epoch(start: StartTiny) -> None:
    node = start()
    assert change(node, "drain", "prefill-0") == "prefill-0"
    assert change(node, "add", "prefill") == "prefill-0"
    assert worker(node.ready(), "prefill-0").epoch == 2


def test_a_flip_drains_the_old_worker_when_the_new_one_is_ready(start: StartTiny) -> None:
    node = start()
    assert change(node, "flip", "prefill") == "decode-1"
    assert names(node.ready()) == {"prefill-0", "decode-0", "decode-1"}
    log = node.log.read_text()
    assert log.index("decode-1 is added") < log.index("prefill-1 leaves") < log.index("prefill-1 has left")
    assert change(node, "flip", "decode-0") == "prefill-1"
    assert names(node.ready()) == {"prefill-0", "prefill-1", "decode-1"}


def test_until_the_new_worker_is_ready_the_old_one_serves_on(start: StartTiny) -> None:
    node = start({"decode-1": ["never ready"]})
    ask(node.info.control, "flip prefill-1")
    status = node.eventually(lambda status: "decode-1" in names(status), "the new worker")
    assert worker(status, "prefill-1").phase == "ready"
    for verb in ("drain", "flip"):
        with pytest.raises(InvalidRequest, match="prefill-1 is about to leave"):
            change(node, verb, "prefill-1")
        with pytest.raises(InvalidRequest, match="without a ready prefill worker; add one first"):
            change(node, verb, "prefill-0")


@pytest.mark.parametrize("life", ["crash", "real refuse"])
def test_an_added_worker_that_cannot_run_is_given_up_and_the_node_goes_on(start: StartTiny, life: str) -> None:
    node = start({"decode-1": [life]})
    with pytest.raises(Unavailable, match="decode-1 cannot run"):
        change(node, "flip", "prefill")
    status = node.eventually(lambda status: names(status) == {"prefill-0", "prefill-1", "decode-0"}, "it to be gone")
    assert worker(status, "prefill-1").phase == "ready"
    assert "decode-1 cannot run" in node.log.read_text()


def test_a_leaving_worker_that_dies_is_not_started_again(start: StartTiny) -> None:
    node = start({"prefill-1": ["busy"]})
    pid = worker(node.ready(), "prefill-1").pid
    ask(node.info.control, "drain prefill-1")
    node.eventually(lambda status: worker(status, "prefill-1").phase == "draining", "it to drain")
    os.kill(pid, signal.SIGKILL)
    node.eventually(lambda status: names(status) == {"prefill-0", "decode-0"}, "it to be gone")
    assert "starts again" not in node.log.read_text()


@pytest.mark.parametrize("verb", ["drain", "flip"])
def test_the_last_worker_of_a_role_stays(start: StartTiny, verb: str) -> None:
    node = start()
    for what in ("decode", "decode-0"):
        with pytest.raises(InvalidRequest, match="without a ready decode worker; add one first"):
            change(node, verb, what)
    assert names(node.ready()) == {"prefill-0", "prefill-1", "decode-0"}


@pytest.mark.parametrize("what", ["pool", "pool-0", "frontend-0", "decode-7", "", "x" * 60])
def test_only_workers_of_the_model_come_and_go(start: StartTiny, what: str) -> None:
    node = start()
    for verb in ("add", "drain", "flip"):
        with pytest.raises(InvalidRequest, match="only prefill and decode workers of a node with a model"):
            change(node, verb, what)


def test_a_node_without_a_model_has_no_worker_to_add(start: StartTiny) -> None:
    node = start(more="")
    with pytest.raises(InvalidRequest, match="of a node with a model"):
        change(node, "add", "decode")


def test_there_is_a_limit_to_the_workers_of_a_role(start: StartTiny) -> None:
    node = start(more=MODEL.replace("workers = 2", "workers = 8"))
    with pytest.raises(InvalidRequest, match="the node has 8 prefill workers, the limit is 8"):
        change(node, "add", "prefill")


def test_what_a_worker_had_counted_stays_counted_when_it_has_left() -> None:
    tables = {name: WorkerTable.create("decode", name, METRICS["decode"]) for name in ("decode-0", "decode-1")}
    loop = ControlLoop(ControlSection(), PoolSection(), tables)
    for table in tables.values():
        table.add("trinity_decode_row_seconds_total", 5.0)
    before = loop._readings()
    loop.left(tables.pop("decode-1"))
    assert loop._readings() == before
    table = WorkerTable.create("decode", "decode-1", METRICS["decode"])
    loop.joined(table)
    table.add("trinity_decode_row_seconds_total", 2.0)
    assert loop._readings().row_s == before.row_s + 2.0
