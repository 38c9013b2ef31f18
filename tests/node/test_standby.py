"""Standby workers replace dead workers; their own failures affect no other worker."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.node.config import parse_config
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.supervisor.admin import (
    NodeStatus,
    WorkerStatus,
    admin_request,
    scale_workers,
    stop_node,
)
from tests.node.conftest import StartTiny
from tests.node.tiny_node import TinyNode, gone, serve_eight_gpus, worker

MODEL = """
[model]
name = "/nowhere"

[prefill]
workers = 2

[decode]
spares = 1
"""
GPUS = """
[model]
name = "/nowhere"

[prefill]
devices = ["cuda:0"]

[decode]
workers = 2
devices = ["cuda:1", "cuda:2"]
spares = 2
"""


@pytest.fixture
def start(start_tiny: StartTiny) -> StartTiny:
    """Start nodes, by default with a model."""

    def start(orders: dict[str, list[str]] | None = None, more: str = MODEL, **options: Any) -> TinyNode:
        return start_tiny(orders, more=more, **options)

    return start


def spare(status: NodeStatus, name: str = "decode-spare-0") -> WorkerStatus:
    return next(found for found in status.spares if found.name == name)


def standing_by(node: TinyNode) -> NodeStatus:
    """Return whether every worker and every standby worker is ready."""
    return node.eventually(
        lambda status: status.ready and all(found.phase == "standby" for found in status.spares), "the spares"
    )


def killed(node: TinyNode, name: str) -> NodeStatus:
    """Kill a worker and return the status when it is ready again."""
    epoch = worker(node.ready(), name).epoch
    os.kill(worker(node.ready(), name).pid, signal.SIGKILL)
    return node.eventually(lambda status: status.ready and worker(status, name).epoch > epoch, f"{name} again")


@pytest.mark.parametrize("life", ["serve", "real serve"])
def test_a_standby_worker_replaces_a_dead_one_and_a_new_standby_starts(start: StartTiny, life: str) -> None:
    node = start({"decode-spare-0": [life], "decode-0": ["serve", life, "serve"]})
    before = standing_by(node)
    assert {found.name for found in before.workers} == {"pool-0", "prefill-0", "prefill-1", "decode-0", "frontend-0"}
    after = killed(node, "decode-0")
    assert worker(after, "decode-0").pid == spare(before).pid
    assert (worker(after, "decode-0").epoch, worker(after, "decode-0").restarts) == (2, 1)
    again = standing_by(node)
    assert spare(again).pid not in (0, spare(before).pid)
    assert spare(again).restarts == 0
    assert worker(killed(node, "decode-0"), "decode-0").pid == spare(again).pid
    assert "decode-spare-0 replaces decode-0" in node.log.read_text()
    logged = node.home / "run/logs/decode-0.log"
    assert life == "serve" or "ready" in logged.read_text()  # under the name that it has now


def test_standby_workers_do_not_count_as_workers(start: StartTiny) -> None:
    node = start({"decode-spare-0": ["never ready"]})
    status = node.eventually(lambda status: spare(status).phase == "starting", "the spare")
    assert status.ready
    text = admin_request(node.info.control, "metrics").decode()
    assert 'trinity_standby_up{model_name="nowhere",node="tiny",worker="decode-spare-0"} 0.0' in text
    assert 'trinity_worker_up{model_name="nowhere",node="tiny",worker="decode-spare-0"}' not in text
    assert 'trinity_worker_resident_memory_bytes{model_name="nowhere",node="tiny",worker="decode-spare-0"}' in text


@pytest.mark.parametrize(("life", "end"), [("serve", signal.SIGKILL), ("real serve", signal.SIGTERM)])
def test_a_standby_worker_that_dies_is_restarted(start: StartTiny, life: str, end: signal.Signals) -> None:
    node = start({"decode-spare-0": [life]})
    before = standing_by(node)
    os.kill(spare(before).pid, end)
    after = node.eventually(lambda s: spare(s).phase == "standby" and spare(s).epoch == 2, "another spare")
    assert [found.pid for found in after.workers] == [found.pid for found in before.workers]
    assert spare(after).restarts == 1


@pytest.mark.parametrize("life", ["crash", "real refuse"])
def test_a_standby_worker_that_cannot_run_is_retried_and_does_not_end_the_node(start: StartTiny, life: str) -> None:
    node = start({"decode-spare-0": [life]})
    status = node.eventually(lambda status: spare(status).failed_starts >= 4, "a spare that cannot run")
    assert spare(status).note.startswith("cannot run (exit code ")
    assert status.ready
    node.order({})
    assert spare(standing_by(node)).failed_starts == 0


def test_a_standby_worker_replaces_one_while_none_can_be_forked(start: StartTiny) -> None:
    node = start()
    before = standing_by(node)
    imports = Path(f"{node.orders}.imports")
    imports.touch()
    template = node.template(before)
    assert template is not None
    os.kill(template, signal.SIGKILL)
    assert worker(killed(node, "decode-0"), "decode-0").pid == spare(before).pid
    imports.unlink()
    assert spare(standing_by(node)).pid != spare(before).pid


def test_a_standby_worker_that_dies_during_takeover_is_restarted_like_any_worker(start: StartTiny) -> None:
    node = start({"decode-0": ["serve", "crash", "serve"]})
    before = standing_by(node)
    after = killed(node, "decode-0")
    assert (worker(after, "decode-0").epoch, worker(after, "decode-0").restarts) == (3, 2)
    assert worker(after, "decode-0").pid != spare(before).pid
    assert spare(standing_by(node)).epoch == 2


def test_an_added_or_flipped_worker_uses_a_standby(start: StartTiny) -> None:
    node = start()
    before = standing_by(node)
    assert scale_workers(node.info, "add", "decode", timeout_s=60) == ("decode-1",)
    assert worker(node.ready(), "decode-1").pid == spare(before).pid
    before = standing_by(node)
    assert scale_workers(node.info, "flip", "prefill-1", timeout_s=60) == ("decode-2",)
    assert worker(node.ready(), "decode-2").pid == spare(before).pid


def test_a_removed_worker_is_not_replaced_by_a_standby(start: StartTiny) -> None:
    node = start({"decode-1": ["busy"]})
    standing_by(node)
    scale_workers(node.info, "add", "decode", timeout_s=60)
    before = standing_by(node)
    admin_request(node.info.control, "drain decode-1")
    node.eventually(lambda status: worker(status, "decode-1").phase == "draining", "it to drain")
    os.kill(worker(before, "decode-1").pid, signal.SIGKILL)
    after = node.eventually(lambda status: len(status.workers) == 5, "it to be gone")
    assert spare(after).pid == spare(before).pid


def test_a_standby_worker_replaces_only_on_its_gpu_and_is_removed_with_a_drained_gpu(start: StartTiny) -> None:
    node = start(more=GPUS, process=serve_eight_gpus)
    before = standing_by(node)
    assert [found.device for found in before.spares] == ["cuda:1", "cuda:2"]
    after = killed(node, "decode-1")
    assert worker(after, "decode-1").pid == spare(before, "decode-spare-1").pid
    standing_by(node)
    scale_workers(node.info, "drain", "cuda:2", timeout_s=60)
    left = node.eventually(lambda status: spare(status, "decode-spare-1").pid == 0, "it to have left the GPU")
    assert spare(left, "decode-spare-1").phase == "stopped"
    assert spare(left).pid == spare(before).pid
    scale_workers(node.info, "add", "cuda:2", timeout_s=60)
    standing_by(node)


@pytest.mark.parametrize("life", ["serve", "real serve", "never ready"])
def test_standby_workers_end_with_the_node(start: StartTiny, life: str) -> None:
    node = start({"decode-spare-0": [life]})
    status = node.eventually(lambda s: s.ready and spare(s).phase in ("starting", "standby"), "a spare")
    stop_node(node.info, timeout_s=60)
    assert node.ended() == 0
    assert gone(spare(status).pid)
    assert "decode-spare-0" not in node.stopped()  # it held nothing that it could have finished


def test_standby_workers_have_the_placement_of_their_workers() -> None:
    raw = {"model": {"name": "m"}, "prefill": {"workers": 2, "devices": ["cuda:1", "cuda:3"], "spares": 3}}
    plan = lay_out(parse_config(raw | {"decode": {"devices": ["cuda:0"]}}), Machine.with_simulated_gpus(4))
    assert [(place.name, place.gpu) for place in plan.spares] == [
        ("prefill-spare-0", "SIM-1"), ("prefill-spare-1", "SIM-3"), ("prefill-spare-2", "SIM-1"),
    ]  # fmt: skip
    assert lay_out(parse_config({"model": {"name": "m"}})).spares == ()
    with pytest.raises(ConfigError, match=r"decode\.spares = 9"):
        parse_config({"decode": {"spares": 9}})
