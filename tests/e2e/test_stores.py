"""Vector stores of a node whose processes are killed while files are uploaded, indexed and deleted."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import openai
import psutil
import pytest

from runtime.testing.node import Node
from runtime.testing.waiting import eventually

CONFIG = """
[node]
name = "stores"
run_dir = "run"

[http]
port = 0
drain_notice_s = 0

[stores]
path = "stores"
embedder = "hashing-64"
"""
FILES = 40


class Running(NamedTuple):
    """A node, started again on the same files by `restart`."""

    config: Path
    nodes: list[Node]
    clients: list[openai.OpenAI]

    def client(self) -> openai.OpenAI:
        url = f"{self.nodes[-1].info.url}/v1"
        self.clients.append(openai.OpenAI(base_url=url, api_key="none", max_retries=8, timeout=60))
        return self.clients[-1]

    def kill(self, victim: str) -> None:
        """Kill -9 a process, and wait until the node is ready again; the supervisor's node is started again."""
        node = self.nodes[-1]
        if victim != "supervisor":
            os.kill(node.pid(victim), signal.SIGKILL)
            node.wait_ready()
            return
        pids = node.pids().values()
        node.process.kill()
        node.process.wait()
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
        self.nodes.append(Node(self.config))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    config = tmp_path / "node.toml"
    config.write_text(CONFIG)
    running = Running(config, [Node(config)], [])
    yield running
    for client in running.clients:
        client.close()
    running.nodes[-1].stop()


def text_of(number: int) -> bytes:
    """A text whose first word is nowhere else."""
    return (f"unique{number} " + "words that all of the files have in common. " * 40).encode()


def test_what_was_acknowledged_survives_kills_in_every_phase(running: Running) -> None:
    client = running.client()
    store = client.vector_stores.create(name="kept").id
    victims = iter(("frontend-0", "pool-0", "supervisor", "frontend-0"))
    files: dict[int, str] = {}
    for number in range(FILES):
        files[number] = client.files.create(file=(f"{number}.txt", text_of(number)), purpose="assistants").id
        client.vector_stores.files.create(store, file_id=files[number], attributes={"number": number})
        if number % 10 == 9:  # the last files are not indexed yet
            running.kill(next(victims))
            client = running.client()
    eventually(lambda: client.vector_stores.retrieve(store).status == "completed", 120, "all files to be indexed")
    assert client.vector_stores.retrieve(store).file_counts.completed == FILES
    for number in (0, 9, 10, 29, FILES - 1):
        found = client.vector_stores.search(
            store, query=f"unique{number}", filters={"type": "eq", "key": "number", "value": number}
        )
        assert {one.file_id for one in found} == {files[number]}
    for number in range(0, FILES, 2):
        client.vector_stores.files.delete(files[number], vector_store_id=store)
    running.kill("supervisor")
    client = running.client()
    assert client.vector_stores.retrieve(store).file_counts.total == FILES // 2
    found = client.vector_stores.search(
        store, query="words", max_num_results=50, filters={"type": "lt", "key": "number", "value": 10}
    )
    assert {one.filename for one in found} == {f"{number}.txt" for number in (1, 3, 5, 7, 9)}
    assert [one.id for one in client.vector_stores.list()] == [store]  # and not the node's own collection
