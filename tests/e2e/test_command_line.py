"""Commands as processes of their own: with a node, and with its parent."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from runtime.node.run_dir import find_node
from runtime.testing.node import Node, trinity
from runtime.testing.waiting import eventually
from tests.e2e.conftest import CONFIG
from tests.e2e.load import START_S
from tests.node.tiny_node import TinyNode


@pytest.fixture
def config(tmp_path: Path, model: Path, collection: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text(
        CONFIG.format(name="cli", run_dir=tmp_path / "run", model=model, collection=collection, drain_s=20.0)
    )
    return path


@pytest.fixture
def without_model(config: Path) -> Path:
    """The same node without a model, which starts sooner."""
    text = config.read_text()
    config.write_text(text.partition("[model]")[0] + "[[collections]]" + text.partition("[[collections]]")[2])
    return config


def test_status_shows_every_worker(node: Node) -> None:
    run = trinity("status", node.run_dir)
    assert run.returncode == 0
    for worker in ("frontend-0", "prefill-0", "decode-0", "pool-0"):
        assert worker in run.stdout


def test_a_start_that_is_given_up_leaves_no_run_directory(
    without_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(node: Node) -> None:
        node.wait((tmp_path / "run" / "node.json").exists, START_S, "the node to begin")
        raise KeyboardInterrupt

    monkeypatch.setattr(Node, "wait_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Node(without_model)
    assert not (tmp_path / "run").exists()


def test_stop_returns_when_the_node_is_gone(tmp_path: Path) -> None:
    node = TinyNode(tmp_path)
    node.ready()
    run = trinity("stop", tmp_path / "run")
    assert run.returncode == 0
    assert node.ended() == 0
    assert not (tmp_path / "run").exists()


def test_a_node_started_with_its_parent_drains_when_that_is_killed(without_model: Path, tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "launchers.main", "serve", "--config", str(without_model), "--with-parent"]
    code = f"import os, subprocess, time; subprocess.Popen([*{serve!r}, str(os.getpid())]); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as parent:
        try:
            eventually((tmp_path / "run" / "node.json").exists, START_S, "the node to start")
            supervisor = find_node(tmp_path / "run").pid
        finally:
            parent.kill()
    eventually(lambda: not psutil.pid_exists(supervisor), 60, "the node to stop")
    assert not (tmp_path / "run").exists()


def test_a_node_whose_parent_has_already_ended_does_not_start(config: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    serve = [sys.executable, "-m", "launchers.main", "serve", "--config", str(config), "--with-parent", str(gone.pid)]
    assert subprocess.run(serve, timeout=60).returncode == 1
    assert not (tmp_path / "run").exists()
