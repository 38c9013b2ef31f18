"""A pool that serves a bulk load, of an earlier version too, finds what is written to it, from the first write on."""

from pathlib import Path

import numpy as np
import pytest

from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from tests.collections.bulk_loads import flatten
from tests.pool.client_helpers import attached
from tests.pool.conftest import MakeClient, MakePool, MakeServed
from tests.pool.written_collection import DIM

ROWS = 40


@pytest.fixture(params=[1, 2])
def shards(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=["", "flat"])
def is_flat(request: pytest.FixtureRequest) -> bool:
    """Whether an earlier version made it: the first write converts it."""
    return bool(request.param)


def vector_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)


def bulk(path: Path, shards: int = 1, *, is_flat: bool) -> Path:
    documents = [Document(f"d{n}", "", f"text of d{n}", {"year": n}) for n in range(ROWS)]
    vectors = np.array([vector_of(n) for n in range(ROWS)])
    bulk_load.build(documents, path, metric="l2", degree=8, vectors=vectors, shards=shards)
    return flatten(path) if is_flat else path


def document(name: str, seed: int) -> UpsertDocument:
    return UpsertDocument(name, f"text of {name}", attributes={"year": seed}, vector=vector_of(seed))


def test_a_bulk_load_is_served_as_one_index_until_it_is_written_to(
    tmp_path: Path, make_pool: MakePool, make_client: MakeClient, is_flat: bool
) -> None:
    plan = plan_of(bulk(tmp_path / "docs", is_flat=is_flat))
    pool = make_pool(plan)
    (served,) = pool.pool.catalogue.served
    assert pool.engine.dims == {f"{served.key}/0": DIM}
    with CollectionWriter(tmp_path / "docs", background=False) as writer:
        with pool.attach() as session:
            assert session.in_place == {"docs"}
            writer.upsert([document("new", 100)])
            until(lambda: not served.offered.in_place, pool.step)
            assert session.draining  # its client attaches again, to learn of it
        with pool.attach() as session:
            assert not session.in_place
        pool.start()
        client = attached(make_client(plan))
        writer.delete(["d3"])
        assert 3 not in client.search(vector_of(3), ROWS).ids
    assert len(pool.engine.dims) == 2


def test_the_first_write_is_found_when_it_is_acknowledged_and_deleted_rows_are_not(
    tmp_path: Path, shards: int, is_flat: bool, serve: MakeServed
) -> None:
    served = serve(bulk(tmp_path / "docs", shards, is_flat=is_flat), workers=shards, shards=shards)
    assert served.find(vector_of(3), 1) == ["d3"]
    with CollectionWriter(tmp_path / "docs", background=False) as writer:
        writer.upsert([document("new", 100), document("d5", 105)])
        until(writer.wait_visible)
        assert served.find(vector_of(100), 1) == ["new"]
        assert served.find(vector_of(105), 1) == ["d5"]
        assert served.find(vector_of(5), 1) != ["d5"]
        writer.delete(["d3"])
        assert "d3" not in served.find(vector_of(3), ROWS)
        writer.compact()
        served.until_found(vector_of(100), ["new"])
        assert served.find(vector_of(7), 1) == ["d7"]


def test_a_filter_sees_the_bulk_load_and_what_was_written(tmp_path: Path, is_flat: bool, serve: MakeServed) -> None:
    served = serve(bulk(tmp_path / "docs", is_flat=is_flat))
    of_7 = {"type": "eq", "key": "year", "value": 7}
    assert served.find(vector_of(0), filter=of_7) == ["d7"]
    with CollectionWriter(tmp_path / "docs", background=False) as writer:
        writer.upsert([document("new", 7), document("d7", 8)])
        until(writer.wait_visible)
        assert served.find(vector_of(0), filter=of_7) == ["new"]
