"""Workers are added, flipped and drained under load: every request that was sent is answered."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import CONFIG
from tests.e2e.load import load
from tests.e2e.node import RunningNode, eventually

START_S = 300.0


@pytest.mark.timeout(900)
def test_workers_come_and_go_under_load_and_no_request_is_lost(tmp_path: Path, model: Path, collection: Path) -> None:
    config, run_dir = tmp_path / "node.toml", tmp_path / "run"
    config.write_text(CONFIG.format(name="changes", run_dir=run_dir, model=model, collection=collection, drain_s=60.0))
    node = RunningNode(config, run_dir, start_s=START_S)

    def workers(*words: str) -> str:
        command = [sys.executable, "-m", "launchers.main", "workers", *words, "--node", str(run_dir)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        return run.stdout.strip() if run.returncode == 0 else run.stderr.strip()

    try:
        with load(node, searchers=0, generators=3) as answers:
            eventually(lambda: answers[200] > 3, 60, "answers")
            assert "add one first" in workers("flip", "prefill")
            for words, said in (
                (("add", "prefill"), "prefill-1 is ready"),
                (("flip", "prefill", "--name", "prefill-0"), "decode-1 is ready in its place"),
                (("drain", "decode", "--name", "decode-0"), "decode-0 has left"),
            ):
                assert workers(*words) == said
                before = answers[200]
                eventually(lambda before=before: answers[200] > before + 3, 60, "answers afterwards")  # type: ignore[misc]
        assert set(answers) == {200}
        assert {w.name for w in node.status().workers} == {"pool-0", "frontend-0", "prefill-1", "decode-1"}
        assert node.metric("trinity_requests_total", outcome="failed") == 0
    finally:
        node.stop()
