"""A rolling restart under load: every request that was sent is answered."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.testing.node import Node
from tests.e2e.conftest import CONFIG
from tests.e2e.load import load, wait_for_more

START_S = 300.0


@pytest.mark.timeout(600)
def test_prefill_and_decode_workers_restart_under_load_and_no_request_is_lost(
    tmp_path: Path, model: Path, collection: Path
) -> None:
    config = tmp_path / "node.toml"
    text = CONFIG.format(name="rolls", run_dir=tmp_path / "run", model=model, collection=collection, drain_s=60.0)
    config.write_text(text.replace("[prefill]", "[prefill]\nworkers = 2").replace("[decode]", "[decode]\nworkers = 2"))
    node = Node(config)
    try:
        with load(node, searchers=0, generators=3) as answers:
            wait_for_more(answers, 5)
            for worker in ("decode-0", "prefill-1"):
                restart = [sys.executable, "-m", "launchers.main", "restart", str(tmp_path / "run"), "--worker", worker]
                run = subprocess.run(restart, capture_output=True, text=True, timeout=START_S, check=False)
                assert run.returncode == 0, run.stderr
                wait_for_more(answers, 5)
        assert set(answers) == {200}
        epochs = {worker.name: worker.epoch for worker in node.status().workers}
        assert (epochs["decode-0"], epochs["decode-1"]) == (2, 1)
        assert (epochs["prefill-0"], epochs["prefill-1"]) == (1, 2)
        assert node.metric("trinity_requests_total", outcome="failed") == 0
    finally:
        node.stop()
