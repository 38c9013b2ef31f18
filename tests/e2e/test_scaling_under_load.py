"""Workers are added, restarted, flipped and drained under load: every request is answered."""

from pathlib import Path

import pytest

from runtime.testing.node import Node, trinity
from runtime.testing.waiting import eventually
from tests.e2e.conftest import CONFIG
from tests.e2e.load import load, wait_for_more

START_S = 300.0
TWO_POOLS = """
[node]
name = "pools"
run_dir = "{run_dir}"

[http]
port = 0
drain_notice_s = 0

[pool]
workers = 2
devices = ["cuda:0", "cuda:1"]

[[collections]]
name = "docs"
path = "{collection}"
"""


def said(*words: str) -> str:
    """Run a command and return its output."""
    run = trinity(*words, timeout_s=START_S)
    return run.stdout.strip() if run.returncode == 0 else run.stderr.strip()


def workers(node: Node, *words: str) -> str:
    """Run `trinity workers` and return its output."""
    return said("workers", *words, "--node", str(node.run_dir))


@pytest.mark.timeout(900)
def test_adding_restarting_and_draining_workers_under_load_loses_no_request(
    tmp_path: Path, model: Path, collection: Path
) -> None:
    config, run_dir = tmp_path / "node.toml", tmp_path / "run"
    config.write_text(CONFIG.format(name="changes", run_dir=run_dir, model=model, collection=collection, drain_s=60.0))
    node = Node(config)

    def epochs() -> dict[str, int]:
        return {worker.name: worker.epoch for worker in node.status().workers}

    def restart(name: str) -> None:
        before = epochs()
        told = said("restart", str(run_dir), "--worker", name)
        assert epochs() == before | {name: before[name] + 1}, told

    try:
        with load(node, searchers=0, generators=3) as answers:
            wait_for_more(answers, 3)
            assert "add one first" in workers(node, "flip", "prefill")
            assert workers(node, "add", "prefill") == "prefill-1 is ready"
            wait_for_more(answers, 3)
            assert workers(node, "flip", "prefill", "--name", "prefill-0") == "decode-1 is ready in its place"
            wait_for_more(answers, 3)
            restart("decode-0")
            wait_for_more(answers, 3)
            assert workers(node, "drain", "decode", "--name", "decode-0") == "decode-0 has left"
            wait_for_more(answers, 3)
        assert set(answers) == {200}
        assert set(epochs()) == {"pool-0", "frontend-0", "prefill-1", "decode-1"}
        assert node.metric("trinity_requests_total", outcome="failed") == 0
    finally:
        node.stop()


@pytest.mark.timeout(600)
def test_draining_and_restoring_a_gpu_under_load_loses_no_search(tmp_path: Path, collection: Path) -> None:
    config, run_dir = tmp_path / "node.toml", tmp_path / "run"
    config.write_text(TWO_POOLS.format(run_dir=run_dir, collection=collection))
    node = Node(config, "--simulate-gpus", "2")
    try:
        with load(node, searchers=4, generators=0) as answers:
            for verb, told in (("drain", "pool-1 has left"), ("add", "pool-1 is ready")):
                wait_for_more(answers, 20)
                assert workers(node, verb, "--gpu", "cuda:1") == told
            eventually(lambda: node.metric("trinity_pool_queries_total", worker="pool-1") > 5, 60, "its share of them")
        assert set(answers) == {200}
        assert "give either a role" in workers(node, "drain", "pool", "--gpu", "cuda:0")
    finally:
        assert node.stop() == 0
