"""Drain state kept by the supervisor, and load metrics in /metrics for routers."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.errors import Unavailable
from runtime.node.config import Role, SloSection
from runtime.node.metrics.exporter import render, vllm_families
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, PrefillMetrics
from runtime.node.supervisor.admin import admin_request
from tests.node.tiny_node import TinyNode, worker


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TinyNode]:
    made = TinyNode(tmp_path)
    yield made
    made.close()


def metrics(node: TinyNode) -> str:
    return admin_request(node.info.control, "metrics").decode()


def test_a_drain_survives_a_frontend_restart(node: TinyNode) -> None:
    frontend = worker(node.ready(), "frontend-0")
    assert 'trinity_node_draining{model_name="",node="tiny"} 0.0' in metrics(node)
    admin_request(node.info.control, "draining on")
    os.kill(frontend.pid, signal.SIGKILL)
    status = node.eventually(lambda status: status.ready and worker(status, "frontend-0").epoch == 2, "a new frontend")
    assert status.draining
    assert not status.stopping
    assert "vllm:num_requests_waiting" in metrics(node)
    assert 'trinity_node_draining{model_name="",node="tiny"} 1.0' in metrics(node)
    with pytest.raises(Unavailable):  # neither on nor off: dropped, as other unknown requests
        admin_request(node.info.control, "draining of", timeout_s=0.3)
    assert node.ready().draining
    admin_request(node.info.control, "draining off")
    assert not node.ready().draining


@pytest.fixture
def tables() -> Iterator[dict[str, WorkerTable]]:
    roles: dict[str, Role] = {
        "frontend-0": "frontend", "pool-0": "pool",
        "prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode",
    }  # fmt: skip
    made = {name: WorkerTable.create(role, name, SloSection()) for name, role in roles.items()}
    yield made
    for table in made.values():
        table.close()


def shown(tables: dict[str, WorkerTable]) -> dict[str, float]:
    text = render(vllm_families(tables.values()), {"model_name": "m", "node": "n"})
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels == {"model_name": "m", "node": "n", "engine": "0"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_the_load_of_all_workers_is_exported_under_vllms_names_as_one_engine(
    tables: dict[str, WorkerTable],
) -> None:
    tables["prefill-0"].set(PrefillMetrics.WAITING, 3)
    tables["prefill-0"].set(PrefillMetrics.RUNNING, 2)
    for name, running, used in (("decode-0", 5, 0.25), ("decode-1", 7, 0.75)):
        tables[name].set(DecodeMetrics.WAITING, 1)
        tables[name].set(DecodeMetrics.RUNNING, running)
        tables[name].set(DecodeMetrics.KV_USED, used)
    assert shown(tables) == {
        "vllm:num_requests_waiting": 5,
        "vllm:num_requests_running": 14,
        "vllm:kv_cache_usage_perc": 0.75,  # where it is highest: there a request would not fit first
    }


def test_a_gateway_node_exports_its_requests_as_running(tables: dict[str, WorkerTable]) -> None:
    frontend = {"frontend-0": tables["frontend-0"]}
    frontend["frontend-0"].set(FrontendMetrics.IN_FLIGHT, 9)
    assert shown(frontend) == {"vllm:num_requests_waiting": 0, "vllm:num_requests_running": 9}
