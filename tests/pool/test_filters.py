"""Tests of filters in the pool: each query returns only rows that pass its own filter."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.index.data import bitmap
from ipc import RingClient, SearchSpec
from runtime.errors import InvalidFilter, InvalidRequest, Overloaded
from runtime.node.placement.plan import NodePlan
from runtime.pool.collections.scopes import InUse, Part, Scopes
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.filters import canonical, filter_bytes, parse_filter
from runtime.retrieval.attributes.schema import AttributeType
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import InProcessPool, plan_of
from tests.gpu.datasets import clustered
from tests.pool.client_helpers import Vectors, attached, collect
from tests.pool.conftest import MakeClient, MakePool, MakeServed

ROWS, DIM = 600, 16
TENANTS = ("acme", "blue", "coil")


def attributes(row: int) -> dict[str, Any]:
    return {"tenant": TENANTS[row % 3], "year": 2000 + row % 40, "draft": row % 2 == 0}


def eq(key: str, value: object) -> dict[str, Any]:
    return {"type": "eq", "key": key, "value": value}


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return clustered(np.random.default_rng(3), ROWS, DIM)


def documents(rows: int = ROWS) -> list[Document]:
    return [Document(f"d{row}", "", f"text {row}", attributes(row)) for row in range(rows)]


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory, vectors: Vectors) -> Path:
    path = tmp_path_factory.mktemp("filters") / "docs"
    bulk_load.build(documents(), path, metric="l2", embedder=f"hashing-{DIM}", vectors=vectors)
    return path


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, vectors: Vectors) -> Path:
    path = tmp_path_factory.mktemp("filters") / "split"
    bulk_load.build(documents(), path, metric="l2", embedder=f"hashing-{DIM}", vectors=vectors, shards=2)
    return path


@pytest.fixture
def plan(docs: Path) -> NodePlan:
    return plan_of(docs)


@pytest.fixture
def pool(plan: NodePlan, make_pool: MakePool) -> InProcessPool:
    return make_pool(plan).start()


@pytest.fixture
def client(plan: NodePlan, pool: InProcessPool, make_client: MakeClient) -> SearchClient:
    return attached(make_client(plan))


def nearest(vectors: Vectors, query: Vectors, passing: np.ndarray[Any, Any], k: int) -> list[int]:
    rows = np.flatnonzero(passing)
    order = np.argsort(np.square(vectors[rows] - query).sum(axis=1), kind="stable")
    return [int(row) for row in rows[order[:k]]]


OF_ACME = np.arange(ROWS) % 3 == 0
CASES: list[tuple[Mapping[str, Any], np.ndarray[Any, Any]]] = [
    (eq("tenant", "acme"), OF_ACME),
    ({"type": "and", "filters": [eq("tenant", "acme"), {"type": "lt", "key": "year", "value": 2002}]},
     OF_ACME & (np.arange(ROWS) % 40 < 2)),
    ({"type": "not", "filter": {"type": "in", "key": "tenant", "value": ["acme", "blue"]}}, np.arange(ROWS) % 3 == 2),
    (eq("tenant", "nobody"), np.zeros(ROWS, bool)),
    ({"type": "gte", "key": "year", "value": 1900}, np.ones(ROWS, bool)),
]  # fmt: skip


def test_every_query_of_a_batch_returns_the_nearest_rows_that_pass_its_own_filter(
    client: SearchClient, vectors: Vectors
) -> None:
    queries = vectors[:40] + 0.01
    expected_ids = {}
    for number, query in enumerate(queries):
        wanted, passing = CASES[number % len(CASES)]
        ticket = client.submit(query, 5, top_m=64, filter=wanted)
        expected_ids[ticket] = nearest(vectors, query, passing, 5)
        plain = client.submit(query, 5, top_m=64)
        expected_ids[plain] = nearest(vectors, query, np.ones(ROWS, bool), 5)
    found = collect(client, len(expected_ids))
    for ticket, expected in expected_ids.items():
        assert found[ticket].checked().ids.tolist() == expected


def test_a_batch_shares_a_filter_and_all_shards_contribute(split: Path, serve: MakeServed, vectors: Vectors) -> None:
    client = serve(split, workers=2, shards=2).client
    wanted = parse_filter(CASES[0][0])
    batch = client.search_batch(vectors[:70], 5, top_m=64, filter=wanted)
    for query, ids in zip(vectors[:70], batch.checked().ids, strict=True):
        assert ids.tolist() == nearest(vectors, query, OF_ACME, 5)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (eq("color", "red"), r"no document has the attribute 'color'$"),
        (eq("year", "new"), "'year' is an integer"),
        ({"type": "gt", "key": "draft", "value": True}, "no order"),
        ({"type": "eq", "key": "year"}, "key, type, value"),
        ("tenant = acme", "a filter must be an object"),
        ({"type": "in", "key": "tenant", "value": ["x" * 4000 + str(n) for n in range(5)]}, "limit is 16000"),
    ],
)
def test_an_invalid_filter_is_rejected_before_it_is_sent(
    client: SearchClient, vectors: Vectors, wanted: Any, message: str
) -> None:
    with pytest.raises(InvalidFilter, match=message):
        client.search(vectors[0], 1, filter=wanted)
    with pytest.raises(InvalidFilter, match=message):
        client.search_batch(vectors[:2], 1, filter=wanted)


def test_malformed_filters_of_a_hostile_client_are_rejected_without_side_effects(
    pool: InProcessPool, client: SearchClient, vectors: Vectors
) -> None:
    malformed = [b"no filter", b'["c","color","eq",["red"]]', b"[" * 9000, b'["a",[]]']
    with RingClient(pool.endpoint, "rude", timeout_ms=60_000.0) as rude:
        for content in 2 * malformed:
            rude.submit(vectors[0], SearchSpec("docs", 1, filter=content))
            assert rude.wait(60_000)
            assert [result.status for result in rude.poll()] == ["invalid_request"]
    assert client.search(vectors[7], 1, filter=eq("year", 2007)).ids.tolist() == [7]


def test_client_and_pool_reject_a_query_without_a_required_filter(
    tmp_path: Path, serve: MakeServed, vectors: Vectors
) -> None:
    bulk_load.build(documents(), tmp_path / "docs", metric="l2", vectors=vectors, demanded="tenant")
    served = serve(tmp_path / "docs")
    pool, client = served.pool, served.client
    for wanted in (None, eq("year", 2001), {"type": "ne", "key": "tenant", "value": "acme"}):
        with pytest.raises(InvalidRequest, match="demands a filter that binds 'tenant'"):
            client.search(vectors[0], 1, filter=wanted)
    assert client.search(vectors[0], 1, filter=eq("tenant", "acme")).ids.tolist() == [0]
    with RingClient(pool.endpoint, "rude", timeout_ms=60_000.0) as rude:
        for content in (b"", filter_bytes(eq("year", 2001))):
            rude.submit(vectors[0], SearchSpec("docs", 1, filter=content))
            assert rude.wait(60_000)
            assert [result.status for result in rude.poll()] == ["invalid_request"]


# ---- scopes


class _Columns:
    """The filters of one collection of 640 rows."""

    def __init__(self, **limits: int) -> None:
        schema = {"n": AttributeType.INTEGER}
        self._columns = Columns.from_documents(({"n": number} for number in range(640)), schema)
        self.scopes = Scopes(**limits)

    def add(self, wanted: dict[str, Any], in_use: InUse = lambda _: False) -> tuple[int, list[int]]:
        parsed = parse_filter(wanted)
        passing = self._columns.matching(parsed)
        part = Part(0, bitmap(passing, len(passing)), int(passing.sum()))
        return self.scopes.add(0, canonical(parsed), [part], in_use)


def test_scopes_beyond_the_byte_limit_are_evicted_unless_in_use() -> None:
    made = _Columns(max_bytes=3 * 80)
    numbers = [made.add(eq("n", n))[0] for n in range(3)]
    assert len(set(numbers)) == 3
    table = made.scopes.table
    for number, used_ns in zip(numbers, (5, 1, 9), strict=True):
        table[number].used_ns = used_ns
    used = made.scopes.parts_of(numbers[1]).address
    number, gone = made.add(eq("n", 7), lambda parts: parts == used)
    assert gone == [numbers[0]]  # not the least recently used one: it is in use
    with pytest.raises(Overloaded, match="too many filters"):
        made.add(eq("n", 8), lambda _: True)
    assert made.scopes.number_of(0, filter_bytes(eq("n", 7))) == number
    assert made.scopes.number_of(0, filter_bytes(eq("n", 0))) is None


def test_scopes_beyond_their_number_are_evicted_and_their_numbers_used_again() -> None:
    made = _Columns(max_scopes=2)
    first, second = made.add(eq("n", 1))[0], made.add(eq("n", 2))[0]
    made.scopes.table[first].used_ns = 5
    assert made.add(eq("n", 3)) == (second, [second])
    made.scopes.retire(first)
    assert made.add(eq("n", 4)) == (first, [])


def test_parts_that_no_query_uses_any_more_are_freed_while_a_collection_keeps_changing() -> None:
    made = _Columns()
    parts = []
    for number in range(200):
        scope, _ = made.add(eq("n", number))
        parts.append(weakref.ref(made.scopes.parts_of(scope)))
        made.scopes.invalidate(0)
    assert sum(one() is not None for one in parts) < 100
