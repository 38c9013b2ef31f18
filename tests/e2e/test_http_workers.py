"""Several processes on one port: each answers searches, one owns everything else, and any of them may die."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from runtime.node.metrics.worker_metrics import FrontendMetrics
from runtime.node.supervisor.admin import restart_node
from runtime.retrieval.collections.bulk_load import create
from runtime.testing.node import Node
from runtime.testing.waiting import eventually

CONFIG = """
[node]
name = "workers"
run_dir = "run"

[http]
port = 0
workers = 3
drain_notice_s = 0
api_keys_file = "keys"

[[collections]]
name = "notes"
path = "notes"
"""
PROCESSES = ("frontend-0", "http-0", "http-1")
SEARCH = {"query": "lunch", "k": 1}
Json = dict[str, Any]


class Client:
    """A connection that one of the node's processes has accepted."""

    def __init__(self, node: Node, key: str = "secret") -> None:
        parts = urlsplit(node.info.url)
        self.connection = HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def send(self, method: str, path: str, body: object = None) -> HTTPResponse:
        self.connection.request(method, path, None if body is None else json.dumps(body), self.headers)
        return self.connection.getresponse()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Json]:
        response = self.send(method, path, body)
        return response.status, json.loads(response.read())

    def search(self) -> Json:
        status, found = self.ask("POST", "/v1/retrieval", SEARCH)
        assert status == 200, found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def process_of(search: Json) -> str:
    """Return the process that has answered a search: HTTP workers' ids end with their name."""
    _, _, worker = str(search["id"]).partition("-http-")
    return f"http-{worker}" if worker else "frontend-0"


def connected(node: Node, name: str) -> Client:
    """Return a connection that was accepted by the process `name`: whichever is idle accepts the next one."""
    refused = []
    try:
        while process_of((client := Client(node)).search()) != name:
            refused.append(client)
        return client
    finally:
        for other in refused:
            other.connection.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("workers")
    create(home / "notes", 64, embedder="hashing-64")
    (home / "keys").write_text("secret\nother\n")
    (home / "keys").chmod(0o600)
    (home / "node.toml").write_text(CONFIG)
    node = Node(home / "node.toml")
    yield node
    node.stop()


@pytest.fixture
def clients(node: Node) -> Iterator[dict[str, Client]]:
    """A connection to every process."""
    node.wait_ready()
    found = {name: connected(node, name) for name in PROCESSES}
    yield found
    for client in found.values():
        client.connection.close()


def test_every_process_finds_what_was_written_through_any_when_the_write_is_visible(
    clients: dict[str, Client],
) -> None:
    for number, writer in enumerate(clients.values()):
        document = {"id": "menu", "text": f"lunch {number}"}

        def visible(writer: Client = writer, document: Json = document) -> bool:
            status, answer = writer.ask("PUT", "/v1/collections/notes/documents", {"documents": [document]})
            assert (status, answer.get("count", 1)) == (200, 1), answer
            return bool(answer["visible"])

        eventually(visible, 60, "processes that apply a write in time: not where the machine is too busy to run them")
        for name, client in clients.items():
            found = client.search()
            assert process_of(found) == name
            assert [passage["text"] for passage in found["passages"]] == [f"lunch {number}"]


def test_every_process_embeds_as_the_others_do(clients: dict[str, Client]) -> None:
    body = {"model": "hashing-64", "input": ["one", "two"]}
    answers = [client.ask("POST", "/v1/embeddings", body) for client in clients.values()]
    assert answers[0][0] == 200
    assert answers[0] == answers[1] == answers[2]


def test_a_trace_is_found_by_every_process(clients: dict[str, Client]) -> None:
    for process, client in clients.items():
        client.headers["X-Request-Id"] = f"asked-by-{process}"
        name = client.search()["id"]
        for other in clients.values():
            for wanted in (name, f"asked-by-{process}"):
                status, trace = other.ask("GET", f"/v1/traces/{wanted}")
                assert (status, trace["id"], trace["state"]) == (200, name, "found")
    assert client.ask("GET", "/v1/traces/ret-9")[1]["error"]["code"] == "request_not_found"


def test_every_process_refuses_a_wrong_key_and_what_it_does_not_know(node: Node, clients: dict[str, Client]) -> None:
    for client in clients.values():
        assert client.ask("GET", "/v1/nothing")[1]["error"]["code"] == "not_found"
        client.headers["Authorization"] = "Bearer wrong"
        for path in ("/v1/retrieval", "/v1/collections/notes/documents"):
            assert client.ask("POST", path, SEARCH)[0] == 401


def test_one_page_of_metrics_has_the_requests_of_all_processes(node: Node, clients: dict[str, Client]) -> None:
    def counts(name: str) -> dict[str, float]:
        return {worker: node.metric(name, worker=worker, **label) for worker in PROCESSES}

    label = {"status": "2xx"}
    responses = str(FrontendMetrics.HTTP_RESPONSES["2xx"])
    before = counts(responses)
    for times, client in enumerate(clients.values(), 1):
        for _ in range(times):
            client.search()

    def counted() -> list[float]:
        after = counts(responses)
        return [after[name] - before[name] for name in PROCESSES[1:]]

    eventually(lambda: counted() == [2, 3], 60, "the responses, which are counted when they have been sent")
    label = {}
    forwarded = counts(str(FrontendMetrics.FORWARDED))
    for client in clients.values():
        assert client.ask("GET", "/v1/models")[0] == 200
    passed = counts(str(FrontendMetrics.FORWARDED))
    assert min(passed[name] - forwarded[name] for name in PROCESSES[1:]) >= 1
    assert passed["frontend-0"] == 0


def closing(node: Node) -> list[bool]:
    """Return for every process whether its responses close their connections."""
    found: dict[str, bool] = {}
    while len(found) < len(PROCESSES):
        with Client(node) as client:
            response = client.send("POST", "/v1/retrieval", SEARCH)
            found[process_of(json.loads(response.read()))] = response.headers["connection"] == "close"
    return [found[name] for name in PROCESSES]


def test_a_drain_through_any_process_drains_all(node: Node, clients: dict[str, Client]) -> None:
    def health() -> tuple[int, str]:
        with Client(node) as watcher:
            status, found = watcher.ask("GET", "/health")
            return status, found["status"]

    for operator in clients.values():
        assert operator.ask("POST", "/drain") == (200, {"draining": True, "in_flight": 0})
        eventually(lambda: closing(node) == [True] * 3, 60, "all to drain")
        assert health() == (503, "draining")
        assert operator.ask("DELETE", "/drain")[1]["draining"] is False
        eventually(lambda: closing(node) == [False] * 3, 60, "none to drain")
        assert health() == (200, "ready")


def test_a_killed_http_worker_takes_its_connections_along_and_nothing_else(
    node: Node, clients: dict[str, Client]
) -> None:
    node.kill("http-0")
    for name in ("frontend-0", "http-1"):
        clients[name].search()
        assert clients[name].ask("GET", "/health")[0] == 200
    with pytest.raises(ConnectionError):
        clients["http-0"].search()
    node.wait_ready()
    with connected(node, "http-0") as client:
        client.search()


def begin_write(client: Client, size: int) -> None:
    """Send the head of a write, and return when the frontend waits for its body."""
    client.connection.putrequest("PUT", "/v1/collections/notes/documents")
    for name, value in {**client.headers, "Content-Length": str(size), "Expect": "100-continue"}.items():
        client.connection.putheader(name, value)
    client.connection.endheaders()
    wanted = b""
    while not wanted.endswith(b"\r\n\r\n"):
        wanted += client.connection.sock.recv(1024)
    assert wanted == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_a_killed_frontend_ends_what_was_passed_to_it_and_searches_go_on(
    node: Node, clients: dict[str, Client]
) -> None:
    worker = clients["http-0"]
    begin_write(worker, 9)
    os.kill(node.pid("frontend-0"), signal.SIGKILL)
    response = worker.connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "worker_lost")
    assert process_of(clients["http-1"].search()) == "http-1"  # whether a frontend runs or not
    assert clients["http-1"].ask("GET", "/health")[0] == 200  # it waits for the next frontend
    node.wait_ready()


def test_a_frontend_that_restarts_loses_no_request(node: Node, clients: dict[str, Client]) -> None:
    ended, failed = threading.Event(), []

    def load() -> None:
        with connected(node, "http-1") as client:
            while not ended.is_set():
                if (status := client.ask("GET", "/v1/models")[0]) != 200:
                    failed.append(status)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        restart_node(node.info, "frontend-0", 60)
        restart_node(node.info, "http-0", 60)
    finally:
        ended.set()
        thread.join(60)
    assert failed == []


def test_a_stop_finishes_what_an_http_worker_has_passed_on(node: Node, clients: dict[str, Client]) -> None:
    worker, body = clients["http-0"], json.dumps({"documents": [{"id": "last", "text": "supper"}]})
    begin_write(worker, len(body))
    node.process.send_signal(signal.SIGTERM)

    def refused() -> bool:
        with Client(node) as client:
            try:
                client.connection.connect()
            except ConnectionRefusedError:
                return True
        return False

    eventually(refused, 60, "the port to close")
    worker.connection.send(body.encode())
    response = worker.connection.getresponse()
    assert (response.status, response.headers["connection"]) == (200, "close")
    assert node.stop() == 0
    assert not list(Path(node.run_dir).parent.glob("run/*.sock"))
