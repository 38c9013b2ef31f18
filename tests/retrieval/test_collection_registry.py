"""The registry of a node's collections as seen by its clients."""

import itertools
import shutil
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import CollectionError, TrinityError, Unavailable
from runtime.node.config import SloSection, parse_config
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import RetrievingMetrics
from runtime.node.placement.layout import lay_out
from runtime.node.stores_config import STORES
from runtime.retrieval.build_follower import BuildFollower
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import read_description
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.search.query import SearchResult
from runtime.retrieval.stores.collection import ensure
from runtime.testing.waiting import until
from tests.queries import passages_of
from tests.thread_limit import permit_threads


def test_reopening_the_registry_shows_rebuilt_collections(tmp_path: Path) -> None:
    def build(words: str) -> None:
        documents = [Document(str(n), f"title {n}", f"{words} {n}") for n in range(40)]
        bulk_load.build(documents, tmp_path / "docs", embedder="hashing-64", force=True)

    build("old")
    plan = lay_out(parse_config({"collections": [{"name": "docs", "path": str(tmp_path / "docs")}]}))
    registry = CollectionRegistry(plan)
    embedder = registry.embedder("docs")
    build("new")
    registry.refresh()
    assert registry.embedder("docs") is embedder  # which takes long to load
    identity = read_description(tmp_path / "docs").identity
    result = SearchResult(1, np.array([7]), np.array([0.5], np.float32), identity=identity)
    assert [passage.text for passage in passages_of(registry, "docs", result)] == ["new 7"]


def test_the_stores_collection_is_opened_once_a_pool_has_created_it_and_missing_before_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectionRegistry(lay_out(parse_config({"stores": {"path": str(tmp_path / "stores")}})))
    assert (registry.unavailable, caplog.messages) == ({}, [])
    with pytest.raises(Unavailable, match="are not open yet"):
        registry.current(STORES)
    ensure(tmp_path / "stores" / "collection", "hashing-64")
    served = [read_description(tmp_path / "stores" / "collection").identity]

    def opened() -> bool:
        registry.follow(STORES, served)
        return registry.dims[STORES] == 64

    until(opened)
    assert [embedder.name for embedder in registry.embedders().values()] == ["hashing-64"]
    assert caplog.messages == []


class Docs:
    """A collection of one node, a whole copy of it, and a library that the pools' offers are told to."""

    def __init__(self, home: Path) -> None:
        self.path, self.kept, self.now_ns = home / "docs", home / "kept", 0
        documents = [Document(str(n), f"title {n}", f"text {n} " + "x" * 500) for n in range(400)]
        bulk_load.build(documents, self.path, embedder="hashing-64")
        shutil.copytree(self.path, self.kept)
        self.identity = read_description(self.path).identity

    def registry(self) -> CollectionRegistry:
        section = {"name": "docs", "path": str(self.path)}
        plan = lay_out(parse_config({"collections": [section]}))
        return CollectionRegistry(plan, clock=self._clock)

    def _clock(self) -> int:
        self.now_ns += 10**8
        return self.now_ns

    def tear(self) -> None:
        """Destroy pages of the file."""
        with (self.path / "segments/0/documents.sqlite").open("r+b") as opened:
            opened.seek(8192)
            opened.write(b"\xff" * (self.path / "segments/0/documents.sqlite").stat().st_size)

    def put_back(self) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self.kept, self.path)

    def text(self, registry: CollectionRegistry, row: int = 7) -> str:
        """Return the text of a row as the pools' clients read it; "" if the build is not accepted."""
        if not registry.accept("docs")(self.identity):
            return ""
        result = SearchResult(1, np.array([row]), np.array([0.5], np.float32), identity=self.identity)
        return passages_of(registry, "docs", result)[0].text.partition(" x")[0]


@pytest.fixture
def docs(tmp_path: Path) -> Docs:
    return Docs(tmp_path)


def test_a_new_build_is_opened_on_a_thread_for_an_event_loop(docs: Docs, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, released = docs.registry(), threading.Event()
    bulk_load.build([Document(str(n), "", f"new {n}") for n in range(40)], docs.path, embedder="hashing-64", force=True)
    docs.identity = read_description(docs.path).identity

    def held(*told: Any) -> CollectionDocuments:
        assert released.wait(60)
        return CollectionDocuments(*told)

    monkeypatch.setattr("runtime.retrieval.collection_builds.CollectionDocuments", held)
    registry.follow("docs", [docs.identity])  # does not wait for it
    opening = registry.opening("docs")
    assert opening is not None
    assert docs.text(registry) == ""
    assert not registry.is_current("docs", [docs.identity])
    assert not registry.is_unusable("docs", [docs.identity])
    released.set()
    opening.join()
    registry.follow("docs", [docs.identity])
    assert registry.opening("docs") is None
    assert docs.text(registry) == "new 7"
    assert registry.is_current("docs", [docs.identity])


def test_a_build_is_opened_once_the_system_permits_another_thread(docs: Docs, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = docs.registry()
    bulk_load.build([Document(str(n), "", f"new {n}") for n in range(40)], docs.path, embedder="hashing-64", force=True)
    docs.identity = read_description(docs.path).identity
    with monkeypatch.context() as limited:
        permit_threads(limited)
        registry.follow("docs", [docs.identity])
        assert "documents: can't start new thread" in registry.unavailable["docs"]
    until(lambda: not registry.unavailable, lambda: registry.follow("docs", [docs.identity]))
    assert docs.text(registry) == "new 7"


def test_documents_that_cannot_be_read_any_more_are_told_and_used_again_when_they_are_put_back(docs: Docs) -> None:
    registry = docs.registry()
    registry.follow("docs", [docs.identity])
    assert docs.text(registry) == "text 7"
    docs.tear()
    errors: list[TrinityError] = []

    def ask() -> None:
        try:
            docs.text(registry, 200)
        except TrinityError as error:
            errors.append(error)

    ask()
    assert isinstance(errors[0], Unavailable)
    registry.follow("docs", [docs.identity])
    assert "documents.sqlite is damaged" in registry.unavailable["docs"]
    docs.put_back()
    until(lambda: docs.text(registry, 200) == "text 200", lambda: registry.follow("docs", [docs.identity]))
    registry.follow("docs", [docs.identity])
    assert registry.unavailable == {}


def test_documents_that_several_searches_could_not_read_are_closed_once_and_not_after_they_were_put_back(
    docs: Docs,
) -> None:
    registry = docs.registry()
    registry.follow("docs", [docs.identity])
    build = registry.build_of("docs", docs.identity)
    docs.tear()
    with pytest.raises(CollectionError, match=r"documents.sqlite is damaged") as raised:
        build.get([200])
    for _ in range(2):
        assert "documents.sqlite is damaged" in registry.unreadable("docs", build, raised.value).message
    docs.put_back()
    until(lambda: docs.text(registry, 200) == "text 200", lambda: registry.follow("docs", [docs.identity]))
    registry.unreadable("docs", build, raised.value)
    assert docs.text(registry, 200) == "text 200"


def test_a_result_whose_build_was_closed_meanwhile_is_unavailable(docs: Docs) -> None:
    build = docs.registry().build_of("docs", docs.identity)
    build.close()
    build.close()
    with pytest.raises(CollectionError, match=r"docs was closed$"):
        build.get([7])


def test_documents_that_could_not_be_read_are_opened_again_after_five_seconds_or_when_the_pools_serve_them_anew(
    docs: Docs,
) -> None:
    registry, served = docs.registry(), [docs.identity]
    registry.follow("docs", served)
    docs.tear()
    with pytest.raises(Unavailable):
        docs.text(registry, 200)
    registry.follow("docs", served)
    assert registry.opening("docs") is None
    docs.now_ns += 5 * 10**9
    for whole in (False, True):
        if whole:
            docs.put_back()
        registry.follow("docs", served)
        opening = registry.opening("docs")
        assert opening is not None
        opening.join()
        registry.follow("docs", [])
    registry.follow("docs", served)
    assert docs.text(registry, 200) == "text 200"


def test_a_worker_tells_that_a_reload_is_over_when_it_has_the_documents(tmp_path: Path) -> None:
    docs = Docs(tmp_path)
    registry, offered = docs.registry(), [docs.identity]
    with closing(WorkerTable.create("prefill", "prefill-0", SloSection())) as table:
        follower = BuildFollower(registry, lambda _: offered, table)
        table.set_knob("reload", 3.0)
        bulk_load.build([Document("0", "", "another build")], docs.path, embedder="hashing-64", force=True)
        follower.step(10**9)
        assert table.value(RetrievingMetrics.RELOAD) == 0  # the pools have not moved on, as far as it is known here
        offered[:] = [read_description(docs.path).identity]
        times_ns = itertools.count(10**9 + 20_000_000, 20_000_000)
        until(lambda: table.value(RetrievingMetrics.RELOAD) == 3, lambda: follower.step(next(times_ns)))


def test_a_worker_whose_documents_of_a_reload_are_damaged_says_so_at_once(tmp_path: Path) -> None:
    docs = Docs(tmp_path)
    registry, offered, now_ns = docs.registry(), [docs.identity], itertools.count(10**9, 10**9)
    with closing(WorkerTable.create("prefill", "prefill-0", SloSection())) as table:
        follower = BuildFollower(registry, lambda _: offered, table)

        def reload(number: float) -> None:
            offered[:] = [read_description(docs.path).identity]
            table.set_knob("reload", number)

        bulk_load.build([Document("0", "", "another build")], docs.path, embedder="hashing-64", force=True)
        reload(1.0)
        whole = (docs.path / "segments/0/documents.sqlite").read_bytes()
        (docs.path / "segments/0/documents.sqlite").write_bytes(b"no database")
        until(lambda: table.value(RetrievingMetrics.RELOAD) == 1, lambda: follower.step(next(now_ns)))
        assert table.value(RetrievingMetrics.RELOAD_REFUSED) == 1
        assert "documents.sqlite is damaged" in table.note
        (docs.path / "segments/0/documents.sqlite").write_bytes(whole)
        docs.now_ns += 10**9  # when it is opened again
        reload(2.0)
        until(lambda: table.value(RetrievingMetrics.RELOAD) == 2, lambda: follower.step(next(now_ns)))
        assert (table.value(RetrievingMetrics.RELOAD_REFUSED), table.note) == (0, "")


def test_a_reload_of_one_collection_does_not_wait_for_another_that_was_rebuilt_too(tmp_path: Path) -> None:
    sections, served = [], {}
    for name in ("docs", "code"):
        bulk_load.build([Document("0", "", "a build")], tmp_path / name, embedder="hashing-64")
        sections.append({"name": name, "path": str(tmp_path / name)})
        served[name] = [read_description(tmp_path / name).identity]
    registry = CollectionRegistry(lay_out(parse_config({"collections": sections})))
    bulk_load.build([Document("0", "", "another")], tmp_path / "code", embedder="hashing-64", force=True)
    with closing(WorkerTable.create("prefill", "prefill-0", SloSection())) as table:
        follower = BuildFollower(registry, lambda name: served[name], table)
        for number, collection in ((1, 0.0), (2, 1.0), (3, -1.0)):
            table.set_knob("reload_of", collection)
            table.set_knob("reload", float(number))
            follower.step(number * 10**9)
            assert table.value(RetrievingMetrics.RELOAD) == 1  # the others ask for what is not served yet
        served["code"] = [read_description(tmp_path / "code").identity]
        now_ns = itertools.count(4 * 10**9, 10**9)
        until(lambda: table.value(RetrievingMetrics.RELOAD) == 3, lambda: follower.step(next(now_ns)))
