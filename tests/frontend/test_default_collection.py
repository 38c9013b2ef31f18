"""The default collection: a node's only collection is implied; with several, the error lists them."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say=1"}]}
COMPLETION = {"model": "tiny", "prompt": "say=1"}
GENERATE: list[tuple[str, dict[str, Any]]] = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


def serving(*names: str) -> Cluster:
    return Cluster(settings=Settings(model="tiny", collections=dict.fromkeys(names, 4)))


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with serving("docs") as cluster:
        yield cluster


@pytest.mark.parametrize(("path", "body"), GENERATE, ids=["chat", "completion"])
@pytest.mark.parametrize("retrieval", [{}, {"k": 2}, {"collection": None}, {"collection": "docs"}], ids=str)
def test_a_chat_uses_the_only_collection(
    one: Cluster, path: str, body: dict[str, Any], retrieval: dict[str, Any]
) -> None:
    with one.http() as http:
        answer = http.post(path, json=body | {"retrieval": retrieval})
    assert answer.status_code == 200, answer.text
    assert answer.json()["retrieval"]["collection"] == "docs"
    asked = one.players["prefill-0"].prefills[-1].generation.retrieval
    assert asked is not None
    assert asked.collection == "docs"


def test_with_several_collections_the_error_lists_them() -> None:
    search = ("/v1/retrieval", {"query": "with"}, "collection")
    bodies = [*((path, {**body, "retrieval": {}}, "retrieval.collection") for path, body in GENERATE), search]
    with serving("docs", "news") as cluster, cluster.http() as http:
        for path, body, param in bodies:
            error = refused(http.post(path, json=body), 400)
            assert error["param"] == param
            assert error["message"] == f"{param} is missing; loaded: docs, news"


def test_a_node_without_collections_returns_an_error() -> None:
    with serving() as cluster, cluster.http() as http:
        error = refused(http.post("/v1/completions", json=COMPLETION | {"retrieval": {}}), 404)
    assert error["message"] == "this node has no collections"


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error
