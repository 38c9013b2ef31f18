"""API keys bound to a tenant: searches and writes reach only that tenant's documents."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.retrieval.attributes.filters import AttributeBinding, decode_filter, parse_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.access import Access
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster, FakeSearch
from tests.frontend.test_documents import DIM, Embeds, held

ACME, BLUE, ALL = "key-of-acme", "key-of-blue", "key-of-all"
NAMES = ("notes", "manuals", "others")


def eq(value: str, key: str = "tenant") -> dict[str, Any]:
    return {"type": "eq", "key": key, "value": value}


OWN, YEAR = eq("acme"), eq("2024", "year")
OR_BLUE = {"type": "or", "filters": [YEAR, eq("blue")]}
NOT_OWN = {"type": "ne", "key": "tenant", "value": "acme"}


ABOUT = CollectionSummary(True, 900, 12_345, 1_700_000_000, DIM, "l2", "hashing")


def directory_in(path: Path) -> Path:
    for name in NAMES:
        create(path / name, DIM, metric="l2", degree=8)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return directory_in(tmp_path)


@contextmanager
def serving(directory: Path) -> Iterator[Cluster]:
    writes = WriterService({name: directory / name for name in NAMES}, Embeds().embed, lambda _: HashingEmbedder(DIM))
    access = {
        ACME: Access({"notes": AttributeBinding("tenant", "acme"), "manuals": None}),
        BLUE: Access({"notes": AttributeBinding("tenant", "blue")}),
    }
    settings = Settings("tiny", dict.fromkeys(NAMES, DIM), api_keys=(ALL, ACME, BLUE), access=access)
    with Cluster(settings=settings, writes=writes, search=FakeSearch(about=ABOUT)) as cluster:
        yield cluster
    writes.close()


@pytest.fixture
def cluster(directory: Path) -> Iterator[Cluster]:
    with serving(directory) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One that nothing is written to."""
    with serving(directory_in(tmp_path_factory.mktemp("searched"))) as cluster:
        yield cluster


def test_a_tenant_cannot_go_before_others_but_after_them(searched: Cluster) -> None:
    wanted = {"model": "tiny", "messages": [{"role": "user", "content": "say=1"}]}
    for key, priority, head_start_s in ((ACME, -5, 0.0), (ACME, 5, -5.0), (ALL, -5, 5.0)):
        with asking(searched, key) as http:
            assert http.post("/v1/chat/completions", json=wanted | {"priority": priority}).status_code == 200
        assert searched.players["prefill-0"].prefills[-1].generation.head_start_s == head_start_s


def asking(cluster: Cluster, key: str = ACME) -> httpx.Client:
    http = cluster.http()
    http.headers["authorization"] = f"Bearer {key}"
    return http


# Every route that searches: its path, its body for a collection, and what its filter is called in it.
def _chat(path: str, **prompt: Any) -> Any:
    def body(collection: str, wanted: object) -> dict[str, Any]:
        return {"model": "tiny", **prompt, "retrieval": {"collection": collection, "filter": wanted}}

    return path, body


SEARCHES: dict[str, Any] = {
    "chat": _chat("/v1/chat/completions", messages=[{"role": "user", "content": "say=1"}]),
    "completion": _chat("/v1/completions", prompt="say=1"),
    "retrieval": ("/v1/retrieval", lambda name, wanted: {"collection": name, "query": "q", "filter": wanted}),
    "vector store": ("/v1/vector_stores/{}/search", lambda name, wanted: {"query": "q", "filters": wanted}),
}


def search(
    cluster: Cluster, kind: str, key: str, collection: str, wanted: object = None
) -> tuple[httpx.Response, bytes]:
    """Return the answer and the filter that a pool would have received, b"" if it received none."""
    path, body = SEARCHES[kind]
    prefills, calls = cluster.players["prefill-0"].prefills, cluster.search.calls
    before = len(prefills), len(calls)
    with asking(cluster, key) as http:
        answer = http.post(path.format(collection), json=body(collection, wanted))
    if len(prefills) > before[0]:
        retrieval = prefills[-1].generation.retrieval
        return answer, retrieval.filter if retrieval else b""
    return answer, calls[-1].spec.filter if len(calls) > before[1] else b""


@pytest.mark.parametrize("kind", ["chat", "completion", "retrieval"])
def test_searches_and_chats_have_the_flow_of_their_key(searched: Cluster, kind: str) -> None:
    flows = []
    for key in (ACME, BLUE, ACME):
        answer, _ = search(searched, kind, key, "notes")
        assert answer.status_code == 200
        if kind == "retrieval":
            flows.append(searched.search.calls[-1].spec.flow)
        else:
            retrieval = searched.players["prefill-0"].prefills[-1].generation.retrieval
            flows.append(retrieval.flow if retrieval else 0)
    assert flows[0] == flows[2] > 0
    assert flows[1] not in (0, flows[0])


@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, OWN),
        (OWN, OWN),
        (YEAR, {"type": "and", "filters": [OWN, YEAR]}),
        (OR_BLUE, {"type": "and", "filters": [OWN, OR_BLUE]}),
        (NOT_OWN, {"type": "and", "filters": [OWN, NOT_OWN]}),
    ],
)
def test_every_search_is_restricted_to_the_keys_documents(searched: Cluster, kind: str, asked: Any, given: Any) -> None:
    answer, wanted = search(searched, kind, ACME, "notes", asked)
    assert answer.status_code == 200, answer.text
    assert decode_filter(wanted) == parse_filter(given)


@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize(
    "asked",
    [
        eq("blue"),
        {"type": "in", "key": "tenant", "value": ["blue", "red"]},
        {"type": "and", "filters": [YEAR, eq("blue")]},
        {"type": "or", "filters": [eq("red"), eq("blue")]},
    ],
)
def test_a_filter_for_another_tenant_is_refused(searched: Cluster, kind: str, asked: Any) -> None:
    answer, wanted = search(searched, kind, ACME, "notes", asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert wanted == b""


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_key_cannot_reach_other_collections(searched: Cluster, kind: str) -> None:
    answer, wanted = search(searched, kind, ACME, "others")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert wanted == b""


def test_writes_are_restricted_to_the_keys_documents(cluster: Cluster, directory: Path) -> None:
    documents, notes = "/v1/collections/notes/documents", directory / "notes"

    def put(http: httpx.Client, *given: dict[str, Any]) -> httpx.Response:
        return http.put(documents, json={"documents": given})

    with asking(cluster) as acme, asking(cluster, BLUE) as blue:
        assert put(acme, {"id": "a", "text": "acme's"}).json()["count"] == 1
        assert put(acme, {"id": "b", "text": "acme's", "attributes": {"tenant": "acme"}}).json()["count"] == 1
        for other in ("blue", ["acme", "blue"]):
            refused = put(acme, {"id": "c", "attributes": {"tenant": other}}, {"id": "d"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        taken = put(blue, {"id": "x"}, {"id": "a", "text": "taken over"})
        assert (taken.status_code, taken.json()["error"]["code"]) == (403, "forbidden")
        assert held(notes) == {"a": "acme's", "b": "acme's"}
        assert blue.request("DELETE", documents, json={"ids": ["a", "b"]}).json()["count"] == 0
        year = {"type": "ne", "key": "tenant", "value": "red"}
        assert blue.request("DELETE", documents, json={"filter": year}).json()["count"] == 0
        assert blue.request("DELETE", documents, json={"filter": eq("acme")}).status_code == 403
        assert put(acme, {"id": "a", "text": "new"}).json()["count"] == 1
        assert acme.request("DELETE", documents, json={"ids": ["b", "nobody"]}).json()["count"] == 1
        assert held(notes) == {"a": "new"}
        assert put(acme, {"id": "m", "text": "free"}).status_code == 200
        assert acme.put("/v1/collections/manuals/documents", json={"documents": [{"id": "m"}]}).json()["count"] == 1
        assert acme.put("/v1/collections/others/documents", json={"documents": [{"id": "m"}]}).status_code == 403


@pytest.mark.parametrize("sealed", [False, True])
def test_documents_shared_with_another_tenant_are_changed_by_neither(
    cluster: Cluster, directory: Path, sealed: bool
) -> None:
    documents = "/v1/collections/notes/documents"
    shared = {"id": "shared", "text": "both's", "attributes": {"tenant": ["acme", "blue"], "year": 2024}}
    own = {"id": "own", "text": "acme's", "attributes": {"tenant": ["acme"], "year": 2024}}
    year = {"type": "eq", "key": "year", "value": 2024}
    with asking(cluster, ALL) as all_, asking(cluster) as acme:
        assert all_.put(documents, json={"documents": [shared, own]}).json()["count"] == 2
        if sealed:
            assert all_.post("/v1/collections/notes/flush").status_code == 200
        replaced = acme.put(documents, json={"documents": [{"id": "shared", "attributes": {"tenant": ["acme"]}}]})
        assert (replaced.status_code, replaced.json()["error"]["code"]) == (403, "forbidden")
        assert acme.request("DELETE", documents, json={"ids": ["shared"]}).json()["count"] == 0
        for wanted in (OWN, {"type": "and", "filters": [year, OWN]}, eq("nobody", "tenant") | {"type": "ne"}, year):
            deleted = acme.request("DELETE", documents, json={"filter": wanted})
            assert deleted.json()["count"] == (wanted is OWN)
            assert held(directory / "notes") == {"shared": "both's"}
        assert all_.request("DELETE", documents, json={"filter": year}).json()["count"] == 1


@pytest.mark.parametrize("first", [["acme"], "acme"])
def test_no_tenant_keeps_others_from_storing_documents(cluster: Cluster, first: object) -> None:
    documents = "/v1/collections/notes/documents"
    with asking(cluster) as acme, asking(cluster, BLUE) as blue, asking(cluster, ALL) as all_:

        def put(http: httpx.Client, **attributes: Any) -> httpx.Response:
            return http.put(documents, json={"documents": [{"id": "+".join(attributes), "attributes": attributes}]})

        assert put(acme, tenant=first).status_code == 200
        refused = put(acme, **{f"a{number}": 1 for number in range(63)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_document")
        assert put(acme, ours=1).status_code == 400
        assert put(all_, ours="text", year=1).status_code == 200
        assert put(blue, ours="mine").status_code == 200


def test_a_refused_filter_names_no_attribute_of_others(cluster: Cluster) -> None:
    documents = "/v1/collections/notes/documents"
    with asking(cluster, ALL) as all_, asking(cluster, BLUE) as blue:
        assert all_.put(documents, json={"documents": [{"id": "a", "attributes": {"secret": 1}}]}).status_code == 200
        assert blue.put(documents, json={"documents": [{"id": "b"}]}).status_code == 200
        refused = blue.request("DELETE", documents, json={"filter": eq("x", "unknown")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_filter")
    assert "secret" not in refused.text


def test_statistics_of_all_documents_need_an_unrestricted_key(cluster: Cluster) -> None:
    with asking(cluster) as acme, asking(cluster, ALL) as all_:
        for http, status in ((acme, 403), (all_, 200)):
            assert http.get("/v1/collections/notes").status_code == status
            assert http.post("/v1/collections/notes/flush").status_code == status
        assert acme.get("/v1/collections/manuals").status_code == 200
        assert acme.get("/v1/vector_stores/others").status_code == 403
        stores = acme.get("/v1/vector_stores").json()["data"]
        assert {store["id"]: store["usage_bytes"] for store in stores} == {"notes": 0, "manuals": 12_345}
        assert acme.get("/v1/vector_stores/notes").json()["file_counts"]["total"] == 0
        assert len(all_.get("/v1/vector_stores").json()["data"]) == 3
        for method in ("POST", "GET", "DELETE"):
            assert acme.request(method, "/drain").json()["error"]["code"] == "forbidden"
        assert cluster.drain_requests == []


def test_a_tenant_sees_the_traces_of_its_own_requests_only(searched: Cluster) -> None:
    found: dict[str, str] = {}
    with asking(searched, ALL) as all_of_it, asking(searched) as acme, asking(searched, BLUE) as blue:
        for http, key in ((acme, ACME), (blue, BLUE)):
            mine = {"x-request-id": "mine"}
            search = {"collection": "notes", "query": "x"}
            found[key] = http.post("/v1/retrieval", json=search, headers=mine).json()["id"]
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "say=1"}]}
            found[f"chat of {key}"] = http.post("/v1/chat/completions", json=chat).json()["id"]
        for id in (found[ACME], found[f"chat of {ACME}"]):
            assert [http.get(f"/v1/traces/{id}").status_code for http in (all_of_it, acme, blue)] == [200, 200, 404]
        named = [http.get("/v1/traces/mine").json()["id"] for http in (all_of_it, acme, blue)]
        assert named == [found[BLUE], found[ACME], found[BLUE]]
