"""Reranking in whole nodes: by prefill with the node's own model, and by a gateway over another node's /v1/rerank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.testing.node import Node
from tests.e2e.conftest import GATEWAY, StartNode
from tests.e2e.test_examples import FOLDER, run_example
from tests.retrieval.tiny_model import write_tiny_cross_encoder

CHAT: Any = {"model": "tiny", "max_tokens": 4, "temperature": 0}
QUESTION = "How does a with statement call __exit__?"


@pytest.fixture(scope="module")
def ranked(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Node:
    model = write_tiny_cross_encoder(tmp_path_factory.mktemp("models") / "tiny-ranker", max_tokens=512)
    return start_node(more=f'\n[rerank]\nmodel = "{model}"\n')


@pytest.fixture(scope="module")
def gateway(ranked: Node, collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    config = tmp_path_factory.mktemp("gateway") / "node.toml"
    rerank = f'\n[rerank]\nmodel = "tiny-ranker"\nurl = "{ranked.info.url}/v1"\n'
    config.write_text(GATEWAY.format(url=ranked.info.url, collection=collection) + rerank)
    found = Node(config)
    yield found
    found.stop()


def passages(node: Node, rerank: Any) -> Any:
    body = CHAT | {"messages": [{"role": "user", "content": QUESTION}]}
    status, answer = node.post(
        "/v1/chat/completions", body | {"retrieval": {"collection": "docs", "k": 3, "rerank": rerank}}
    )
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("where", ["ranked", "gateway"])
def test_a_chat_has_the_most_relevant_of_more_passages(where: str, request: pytest.FixtureRequest) -> None:
    node: Node = request.getfixturevalue(where)
    counted = {"outcome": "reranked"}
    before = node.metric("trinity_reranks_total", **counted)
    _, search = node.post("/v1/retrieval", {"collection": "docs", "query": QUESTION, "k": 12})
    texts = [f"{one['title']}\n{one['text']}" if one["title"] else one["text"] for one in search["passages"]]
    _, order = node.post("/v1/rerank", {"query": QUESTION, "documents": texts, "top_n": 3})
    answer = passages(node, {"timeout_s": 30})
    found = answer["retrieval"]["passages"]
    best = [search["passages"][one["index"]]["id"] for one in order["results"]]
    assert [one["id"] for one in found] == best[: len(found)]
    assert found
    assert found[0]["relevance_score"] == pytest.approx(order["results"][0]["relevance_score"], abs=1e-6)
    assert answer["retrieval"]["reranked"] is True
    assert answer["timings"]["rerank"] > 0
    assert node.metric("trinity_reranks_total", **counted) >= before + 2
    late = passages(node, {"timeout_s": 1e-6})
    assert (late["retrieval"]["reranked"], late["retrieval"]["rerank_error"]) == (False, "deadline_exceeded")
    assert [one["id"] for one in late["retrieval"]["passages"]] == [one["id"] for one in search["passages"]][:3]


def test_the_example_orders_the_lines_of_a_file(ranked: Node, tmp_path: Path) -> None:
    scores = [float(line.split()[0]) for line in run_example(FOLDER / "rerank.py", ranked, tmp_path)]
    assert scores == sorted(scores, reverse=True)
