"""Every HTTP answer has a request id, however early the request was refused: beside those of the transcripts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster

KEY = {"Authorization": "Bearer secret"}
JSON = {"Content-Type": "application/json"}
OWN = re.compile(r"(chatcmpl|cmpl|ret|req)-[0-9a-f]+-[0-9]+")
SEARCH = '{"query": "with", "k": 1, "collection": "docs"}'
COMPLETION = '{"model": "tiny", "prompt": "say=2", "max_tokens": 4}'


@pytest.fixture(scope="module")
def cluster(through: Path | None) -> Iterator[Cluster]:
    settings = Settings(model="tiny", collections={"docs": 4}, api_keys=("secret",), max_body_bytes=1000)
    with Cluster(settings=settings, private=through) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("method", "path", "request_", "status", "prefix"),
    [
        ("POST", "/v1/retrieval", {"content": SEARCH}, 200, "ret"),
        ("POST", "/v1/retrieval", {"content": SEARCH, "headers": {"Authorization": ""}}, 401, "ret"),
        ("POST", "/v1/retrieval", {"content": " " * 2000}, 413, "ret"),
        ("POST", "/v1/retrieval", {"content": SEARCH, "headers": KEY | {"Content-Type": "text/plain"}}, 415, "ret"),
        ("GET", "/v1/retrieval", {}, 405, "ret"),
        ("GET", "/metrics", {}, 200, "req"),
    ],
)
def test_every_answer_has_an_id_of_its_own(
    http: httpx.Client, method: str, path: str, request_: dict[str, Any], status: int, prefix: str
) -> None:
    seen = set()
    for _ in range(2):
        answer = http.request(method, path, **{"headers": KEY | JSON} | request_)
        assert answer.status_code == status, answer.text
        (found,) = answer.headers.get_list("x-request-id")
        assert OWN.fullmatch(found), found
        assert found.startswith(f"{prefix}-")
        seen.add(found)
    assert len(seen) == 2


@pytest.mark.parametrize("stream", ["true", "false"])
def test_the_clients_id_is_returned_and_the_body_has_our_own(http: httpx.Client, stream: str) -> None:
    body = f'{COMPLETION[:-1]}, "stream": {stream}}}'
    answer = http.post("/v1/completions", content=body, headers=KEY | JSON | {"X-Request-ID": "mine:1"})
    assert answer.headers["x-request-id"] == "mine:1"
    assert '"id":"cmpl-' in answer.text.replace(" ", "")
    assert http.get("/v1/traces/mine:1", headers=KEY).json()["id"].startswith("cmpl-")
    refused = http.get("/v1/models", headers={"X-Request-ID": "mine:2"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine:2")


@pytest.mark.parametrize("sent", ["", "x" * 129, "a b", "a\tb", "\xfc"])
def test_an_invalid_id_is_replaced(http: httpx.Client, sent: str) -> None:
    headers = [(b"x-request-id", sent.encode("latin-1"))]
    assert OWN.fullmatch(http.get("/health", headers=headers).headers["x-request-id"])
