"""The client under the framework integrations."""

import pytest

from runtime.errors import InvalidDocument, InvalidRequest, Unauthorized, Unavailable
from runtime.integrations.client import CollectionClient, Hybrid
from tests.integrations.conftest import KEY, RARE


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_documents_are_stored_found_and_deleted_with_and_without_v1_in_the_url(url: str, end: str) -> None:
    client = CollectionClient(url + end, "notes", KEY)
    assert client.upsert([{"id": "a", "text": "cats purr", "title": "Cats", "attributes": {"n": 1}}]) == 1
    (found,) = client.search("cats purr", 3)
    assert (found.id, found.text, found.metadata) == ("a", "cats purr", {"title": "Cats", "n": 1})
    assert client.delete(["a", "b"]) == 1
    assert client.search("cats purr", 3) == []
    client.close()


def test_documents_beyond_the_request_limit_are_sent_in_several_requests(url: str) -> None:
    client = CollectionClient(url, "notes", KEY)
    vector = [1.0] + [0.0] * 63
    assert client.upsert([{"id": str(n), "text": "x" * 200_000, "vector": vector} for n in range(12)]) == 12
    assert client.upsert([{"id": f"s{n}", "vector": vector} for n in range(4097)]) == 4097
    assert client.delete([f"s{n}" for n in range(4097)]) == 4097
    assert len(client.search("x", 64)) == 12
    client.close()


def test_errors_of_the_node_are_raised_as_its_typed_errors(url: str) -> None:
    client = CollectionClient(url, "notes", KEY)
    with pytest.raises(InvalidDocument, match="contains the id 'a' twice"):
        client.upsert([{"id": "a"}, {"id": "a"}])
    client.close()
    stranger = CollectionClient(url, "notes")
    with pytest.raises(Unauthorized):
        stranger.search("a", 1)
    stranger.close()


def test_an_unreachable_node_is_unavailable() -> None:
    nobody = CollectionClient("http://127.0.0.1:1", "notes")
    with pytest.raises(Unavailable, match=r"http://127.* does not respond"):
        nobody.search("a", 1)
    nobody.close()


@pytest.mark.parametrize("hybrid", [True, 0.9])
def test_hybrid_search_is_used_only_on_request(url: str, hybrid: Hybrid) -> None:
    client = CollectionClient(url, "notes", KEY)
    client.upsert([RARE, {"id": "cats", "text": "cats purr"}, {"id": "birds", "text": "birds sing"}])
    assert "rare" not in [one.id for one in client.search("E1042", 2)]
    found = client.search("E1042", 2, hybrid=hybrid)
    assert "rare" in [one.id for one in found]
    assert min(one.score for one in found) == pytest.approx(-1, abs=1e-3), "a score is the vectors'"
    for wrong in (1.5, -1.0, float("nan")):
        with pytest.raises(InvalidRequest, match="hybrid is"):
            client.search("E1042", 2, hybrid=wrong)
    client.close()


def test_a_nodes_reranker_orders_the_passages_unless_it_is_not_wanted(ranked_url: str, url: str) -> None:
    client = CollectionClient(ranked_url, "notes", KEY)
    for rerank, first in ((None, "long"), (True, "long"), (False, "near")):
        assert client.search("cats purr", 2, rerank=rerank)[0].id == first
        assert client.search("cats purr", 2, hybrid=True, rerank=rerank)[0].id == first
    assert client.search("cats purr", 1)[0].score == len("birds sing in the morning"), "a score is the reranker's"
    client.close()
    without = CollectionClient(url, "notes", KEY)
    assert without.search("cats purr", 1) == without.search("cats purr", 1, rerank=False) == []
    with pytest.raises(InvalidRequest, match="no reranker"):
        without.search("cats purr", 1, rerank=True)
    without.close()
