"""Clients that request the largest responses and read nothing: the frontend's memory stays within the stated bound, and
others are served."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator

import httpx
import psutil
import pytest

from runtime.serving.http.response_memory import MAX_UNSENT_BYTES
from runtime.testing.waiting import eventually
from runtime.testing.writable_node import DIM, DOCUMENTS, WritableNode

DOCUMENT_BYTES = 900_000
CLIENTS = 60
ALLOWED_BYTES = MAX_UNSENT_BYTES + (64 << 20)  # beside it, what the transports and the allocator keep


@pytest.fixture(scope="module")
def writable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WritableNode]:
    with WritableNode(tmp_path_factory.mktemp("unread")) as writable:
        with httpx.Client(base_url=writable.url, timeout=60, trust_env=False) as http:
            for number in range(40):  # more than a response may have
                vector = [1.0] * (DIM - 1) + [1.0 + number / 128]
                document = {"id": str(number), "text": "x" * DOCUMENT_BYTES, "vector": vector}
                http.put(DOCUMENTS, json={"documents": [document]}).raise_for_status()
            http.put(DOCUMENTS, json={"documents": [{"id": "short", "text": "y", "vector": [-1.0] * DIM}]})
        yield writable


def search(url: str, k: int, sign: float = 1.0) -> httpx.Response:
    return httpx.post(f"{url}/v1/retrieval", json={"vector": [sign] * DIM, "k": k}, timeout=60, trust_env=False)


def ask(writable: WritableNode, k: int) -> socket.socket:
    """Send a search and read nothing."""
    url = httpx.URL(writable.url)
    connection = socket.create_connection((url.host, url.port), timeout=60)
    body = json.dumps({"vector": [1.0] * DIM, "k": k}).encode()
    head = "POST /v1/retrieval HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("k", [128, 32])
def test_the_memory_of_silent_clients_is_bounded_and_others_are_served(writable: WritableNode, k: int) -> None:
    eventually(lambda: search(writable.url, 32).status_code == 200, 60, "the documents to be served")
    frontend = psutil.Process(writable.node.pid("frontend-0"))
    before, most = frontend.memory_info().rss, 0
    with contextlib.ExitStack() as silent:
        for number in range(CLIENTS):
            silent.enter_context(ask(writable, k))
            most = max(most, frontend.memory_info().rss)
            if number % 10 == 0:
                found = search(writable.url, 1, -1.0)
                assert [passage["id"] for passage in found.json()["passages"]] == ["short"]
                assert httpx.get(f"{writable.url}/health", timeout=60, trust_env=False).status_code == 200

        def large_response() -> bool:
            """It finds room once silent clients are slow enough to be disconnected."""
            nonlocal most
            most = max(most, frontend.memory_info().rss)
            return search(writable.url, 32).status_code == 200

        eventually(large_response, 60, "room for a large response")
    print(f"k = {k}: the frontend grew by {(most - before) >> 20} MiB")
    assert most - before < ALLOWED_BYTES
    assert frontend.is_running()


def test_more_than_a_response_may_have_is_refused_with_its_size_and_the_limit(writable: WritableNode) -> None:
    refused = search(writable.url, 128)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_too_large")
    assert re.search(r"the 41 passages have 3[46],\d+,\d+ bytes or more, the limit is 33,554,432", refused.text)
    assert "the limit is 33,554,432" in refused.json()["error"]["message"]
