"""The default collection: a node's only collection is implied."""

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.request_errors import CHAT, COMPLETION, assert_error

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


def test_a_node_without_collections_returns_an_error() -> None:
    with serving() as cluster, cluster.http() as http:
        answer = http.post("/v1/completions", json=COMPLETION | {"retrieval": {}})
    assert_error(answer, 404, "unknown_collection", "retrieval.collection", "this node has no collections")
