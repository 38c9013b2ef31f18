"""The complete 8-GPU layout on a machine without GPUs: every process runs on a simulated GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import EXIT_CONFIG
from runtime.testing.node import Node, trinity
from runtime.testing.waiting import eventually

pytestmark = pytest.mark.timeout(600)

NODE8 = Path(__file__).parents[2] / "launchers" / "node8.toml"
SIMULATED = ("--simulate-gpus", "8")
START_S = 400.0  # six processes that import torch, on as many cores as there are


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path, collection: Path) -> Path:
    """node8.toml as a site would change it: its own model, collection, port."""
    home = tmp_path_factory.mktemp("node8")
    text = NODE8.read_text()
    for was, now in (
        ("smollm2-135m-instruct", str(model)),
        ('"my-docs"', f'"{collection}"'),
        ("port = 8080", "port = 0\ndrain_notice_s = 0"),
        ('name = "node8"', f'name = "node8"\nrun_dir = "{home / "run"}"'),
    ):
        assert was in text
        text = text.replace(was, now)
    path = home / "node8.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def node8(config: Path) -> Iterator[Node]:
    node = Node(config, *SIMULATED)
    yield node
    node.stop()


def test_a_dry_run_shows_every_process_with_its_gpu_and_starts_nothing(config: Path) -> None:
    run = trinity("serve", "--config", config, "--dry-run", *SIMULATED)
    assert run.returncode == 0, run.stderr
    rows = [line for line in run.stdout.splitlines() if "SIM-" in line]
    assert [line.split()[1] for line in rows] == [
        *("pool-0", "pool-1"), *("prefill-0", "prefill-1", "prefill-2"), *("decode-0", "decode-1", "decode-2"),
    ]  # fmt: skip
    assert all("unknown" in line and "MiB" in line for line in rows)
    assert not (config.parent / "run").exists()


def test_without_the_gpus_the_same_configuration_is_one_clear_error(config: Path) -> None:
    run = trinity("serve", "--config", config, "--dry-run")
    assert run.returncode == EXIT_CONFIG
    assert len(run.stderr.strip().splitlines()) == 1
    assert "cuda:" in run.stderr


def test_all_nine_processes_run_and_answer(node8: Node) -> None:
    workers = {worker.name: worker for worker in node8.status().workers}
    assert len(workers) == 9
    assert sorted(w.device for w in workers.values() if w.device != "cpu") == [f"cuda:{n}" for n in range(8)]
    body = {
        "model": "tiny", "prompt": "what is a with statement?", "max_tokens": 20, "ignore_eos": True,
        "retrieval": {"collection": "docs", "k": 2, "every_tokens": 8},
    }  # fmt: skip
    for _ in range(6):
        status, answer = node8.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 20
    assert node8.metric("trinity_worker_info", device="cuda:7", role="pool") == 1


def test_a_lost_gpu_process_restarts_on_its_gpu(node8: Node) -> None:
    node8.kill("pool-1")
    eventually(lambda: node8.status().ready, START_S, "the pool worker to be back")
    assert node8.metric("trinity_worker_restarts_total", worker="pool-1") == 1
    assert node8.metric("trinity_worker_info", device="cuda:7", worker="pool-1") == 1
