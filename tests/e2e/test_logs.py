"""A node's logs: requests can be followed through every process by id, and a full disk affects only logs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.node.logs.reader import read_logs
from runtime.testing.node import Node
from runtime.testing.waiting import eventually
from tests.e2e.conftest import StartNode
from tests.e2e.load import GENERATE, SEARCH
from tests.node.test_log_reader import trinity_logs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def node(start_node: StartNode, directory: Path) -> Iterator[Node]:
    (directory / "pool-0.log").symlink_to("/dev/full")
    node = start_node(more=f'[log]\nlevel = "debug"\nformat = "json"\ndirectory = "{directory}"\n')
    yield node
    node.stop()


def test_a_request_is_followed_through_every_process_by_its_id(node: Node, directory: Path) -> None:
    status, answer = node.post("/v1/completions", GENERATE)
    assert status == 200
    wanted = [
        ("prefill-0", "received"),
        ("prefill-0", "for decode-0"),
        ("decode-0", "joined with KV of"),
        ("decode-0", "finished: length, 24 tokens"),
        ("frontend-0", "ended: length"),
    ]

    def said() -> list[tuple[str, str]]:
        return [(line.process, line.event) for line in read_logs(directory) if line.request == answer["id"]]

    def all_said() -> bool:
        return all(any(process == by and part in event for by, event in said()) for process, part in wanted)

    eventually(all_said, 60, "the lines to be written")
    assert len(said()) == len(wanted), said()
    shown = trinity_logs(str(node.run_dir), "--request", answer["id"])
    assert shown.count(f" [{answer['id']}]: ") == len(shown.splitlines()) == len(wanted)
    assert trinity_logs(str(node.run_dir), "--request", "cmpl-0") == ""


def test_a_full_disk_only_loses_log_lines_which_are_counted(node: Node) -> None:
    assert node.post("/v1/retrieval", SEARCH)[0] == 200
    eventually(lambda: node.metric("trinity_log_lines_lost_total", worker="pool-0") >= 1, 60, "lost lines")
    assert node.metric("trinity_log_lines_lost_total", worker="decode-0") == 0
    assert {worker.restarts for worker in node.status().workers} == {0}
