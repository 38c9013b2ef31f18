"""A node whose stages have pool workers of their own, beside prefill and independent for decode, and one with four
workers of two shards under an external engine. Also when their answers probe: the node's defaults, a request's
values, and the trigger of an installed package."""

import os
import signal
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.retrieval.collections import bulk_load
from runtime.testing.node import Node
from runtime.testing.waiting import eventually
from tests.e2e.conftest import GATEWAY, StartNode, documents
from tests.e2e.load import WAIT_S

BESIDE = """
[pool]
placement = "with-prefill+own"
"""
SHARDED = """shards = 2
[pool]
workers = 4
"""
PROBING = """
[probes]
every_tokens = 8
mode = "prefetch"
"""
TRIGGER = Path(__file__).parents[2] / "docs" / "examples" / "trigger"
Asked = Counter[tuple[str, str]]


@pytest.fixture(scope="module")
def placed(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Node:
    """pool-0 is beside prefill-0, pool-1 on its own for decode. The example's trigger is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "margin-0.1.dist-info").mkdir()
    (site / "margin-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: margin\nVersion: 0.1\n")
    groups = tomllib.loads((TRIGGER / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{name} = {value}\n" for name, value in groups["trinity.triggers"].items()]
    (site / "margin-0.1.dist-info" / "entry_points.txt").write_text("".join(["[trinity.triggers]\n", *lines]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(TRIGGER)]), prepend=os.pathsep)
        return start_node(more=BESIDE)


@pytest.fixture(scope="module")
def gateway(placed: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node without a model in front of `placed`, with a collection in two shards."""
    home = tmp_path_factory.mktemp("gateway")
    bulk_load.build(documents(), home / "docs", embedder="hashing-128", shards=2)
    config = home / "node.toml"
    config.write_text(GATEWAY.format(url=placed.info.url, collection=home / "docs") + SHARDED + PROBING)
    node = Node(config)
    yield node
    assert node.stop() == 0


def queries(node: Node) -> Asked:
    """Return the queries that each pool worker has received, by worker and stage."""
    pools = [worker.name for worker in node.status().workers if worker.name.startswith("pool")]
    return Counter(
        {
            (pool, stage): int(node.metric(str(PoolMetrics.QUERIES), worker=pool, stage=stage))
            for pool in pools
            for stage in ("prefill", "decode")
        }
    )


def asked(node: Node, **probes: Any) -> Asked:
    """Send a completion with passages and probes, by default every 8 tokens; return the queries that it caused."""
    before = queries(node)
    status, answer = node.post(
        "/v1/completions",
        {"model": "tiny", "prompt": "what is a with statement?", "max_tokens": 20, "ignore_eos": True}
        | {"retrieval": {"collection": "docs", "k": 2} | (probes or {"every_tokens": 8})},
    )
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 20
    return queries(node) - before


def stages(node: Node, **probes: Any) -> set[str]:
    """Return the stages of the queries that a completion causes."""
    return {stage for _, stage in asked(node, **probes)}


def asks(node: Node, *expected: tuple[str, str]) -> Callable[[], bool]:
    """Return a condition: a request's queries reach exactly these pool workers for these stages."""
    return lambda: set(asked(node)) == set(expected)


def test_the_stages_queries_go_to_their_own_pool_workers(placed: Node) -> None:
    eventually(asks(placed, ("pool-0", "prefill"), ("pool-1", "decode")), WAIT_S, "each stage to use its own")


def test_an_installed_trigger_decides_in_the_workers_when_an_answer_probes(placed: Node) -> None:
    margin = {"every_tokens": 4, "probe_trigger": "margin"}
    assert stages(placed, **margin, probe_threshold=1e6) == {"prefill", "decode"}
    assert stages(placed, **margin, probe_threshold=1e-9) == {"prefill"}, "no two tokens are so close"


def test_answers_probe_as_the_node_says_unless_a_request_says_otherwise(gateway: Node) -> None:
    assert stages(gateway, every_tokens=0) == {"prefill"}
    assert stages(gateway, probe_mode="wait", probe_trigger="drift") == {"prefill", "decode"}
    # Last, and perhaps again: a prefetch may outlast its answer, and reach a pool when the queries have been counted.
    eventually(lambda: stages(gateway, probe_tokens=64) == {"prefill", "decode"}, WAIT_S, "a query of decode")


@contextmanager
def stopped(node: Node, worker: str) -> Iterator[None]:
    """A worker's process is late: it does not run meanwhile."""
    pid = node.pid(worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stage_whose_pool_worker_is_late_spills_over_and_comes_back(placed: Node) -> None:
    with stopped(placed, "pool-1"):
        eventually(lambda: ("pool-0", "decode") in asked(placed), WAIT_S, "probes to be answered by prefill's")
    eventually(asks(placed, ("pool-0", "prefill"), ("pool-1", "decode")), WAIT_S, "each stage to use its own again")


def test_a_stage_whose_pool_worker_is_down_spills_over_and_comes_back(placed: Node) -> None:
    placed.kill("pool-0")
    assert placed.post("/v1/retrieval", {"query": "with", "collection": "docs", "k": 1})[0] == 200
    placed.wait_ready()
    eventually(asks(placed, ("pool-0", "prefill"), ("pool-1", "decode")), WAIT_S, "each stage to use its own again")


def test_under_an_external_engine_the_other_worker_of_a_shard_answers_for_one_that_is_late(gateway: Node) -> None:
    def asks_every_worker() -> bool:
        return {pool for pool, _ in asked(gateway)} == {f"pool-{n}" for n in range(4)}

    eventually(asks_every_worker, WAIT_S, "queries to go to all in turn")
    with stopped(gateway, "pool-3"):
        for stage in ("prefill", "decode"):
            eventually(lambda stage=stage: ("pool-1", stage) in asked(gateway), WAIT_S, "the other worker to answer")  # type: ignore[misc]
    eventually(asks_every_worker, WAIT_S, "it to be asked again")
