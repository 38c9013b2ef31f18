"""Tests of altered segments of a collection: it becomes unavailable, and the others are served."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import CollectionError, Unavailable
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from tests.collections.small_collections import DIM, documents, new_writer, open_writer
from tests.pool.client_helpers import attached
from tests.pool.conftest import MakeClient, MakePool
from tests.pool.rebuilds import DIM as DOCS_DIM
from tests.pool.rebuilds import build
from tests.queries import passages_of

QUERY = np.zeros(DIM, np.float32)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CollectionWriter]:
    writer = new_writer(tmp_path / "notes")
    writer.upsert(documents(range(40)))
    writer.flush()
    yield writer
    writer.close()


@pytest.fixture
def make_plan(tmp_path: Path) -> Any:
    build(tmp_path / "docs", 1)

    def made(verify: str = "background") -> NodePlan:
        notes = {"name": "notes", "path": str(tmp_path / "notes"), "required": False, "verify": verify}
        return plan_of(tmp_path / "docs", notes)

    return made


def altered(directory: Path, name: str) -> bytes:
    """Change the last byte of the newest segment's file. Return the original content."""
    path = max((directory / "segments").iterdir(), key=lambda one: int(one.name)) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return whole


def taken_out(client: SearchClient, name: str) -> None:
    until(lambda: list(client.unavailable) == ["notes"], lambda: client.poll())
    with pytest.raises(Unavailable, match=rf"{name} is damaged: "):
        client.search(QUERY, 3, collection="notes")
    assert len(client.search(np.zeros(DOCS_DIM, np.float32), 3, collection="docs").ids) == 3


def test_a_newly_sealed_segment_is_verified_and_served_again_once_repaired(
    writer: CollectionWriter, make_plan: Any, make_pool: MakePool, make_client: MakeClient
) -> None:
    plan = make_plan()
    pool = make_pool(plan).start()
    client = attached(make_client(plan))
    until(lambda: pool.table.note == "")
    assert len(client.search(QUERY, 3, collection="notes").ids) == 3
    writer.upsert(documents(range(40, 80)))
    with pool.held():
        writer.flush()
        whole = altered(writer.directory, "index/codes.npy")
    taken_out(client, "codes.npy")
    newest = max((writer.directory / "segments").iterdir(), key=lambda one: int(one.name))
    (newest / "index" / "codes.npy").write_bytes(whole)
    pool.table.set_knob("reload", 1.0)
    until(lambda: not client.unavailable, lambda: client.poll())
    assert len(client.search(QUERY, 50, collection="notes").ids) == 50


def test_a_restored_earlier_state_replaces_the_served_one(
    writer: CollectionWriter, make_plan: Any, make_pool: MakePool, make_client: MakeClient
) -> None:
    plan = make_plan()
    make_pool(plan).start()
    client, registry = attached(make_client(plan)), CollectionRegistry(plan)
    shutil.copytree(writer.directory, writer.directory.with_name("backup"))
    writer.upsert(documents(range(40, 50)))

    def answers() -> int:
        client.poll()
        registry.follow("notes", client.identities("notes"))
        try:
            return len(passages_of(registry, "notes", client.search(QUERY, 60, collection="notes")))
        except Unavailable:
            return 0

    until(lambda: answers() == 50)
    shutil.rmtree(writer.directory)
    shutil.copytree(writer.directory.with_name("backup"), writer.directory)
    until(lambda: answers() == 40)
    with open_writer(writer.directory) as replacement:
        replacement.upsert(documents(range(90, 93)))
        until(lambda: answers() == 43)


def test_a_reader_verifies_its_open_segments_and_not_merged_ones(writer: CollectionWriter) -> None:
    with CollectionReader(writer.directory) as reader:
        writer.upsert(documents(range(40, 80)))
        writer.flush()
        writer.compact()
        reader.verify_segments()
        reader.poll()
        assert reader.unverified
        altered(writer.directory, "index/codes.npy")
        with pytest.raises(CollectionError, match=r"codes\.npy is damaged"):
            reader.verify_segments()
    assert not reader.unverified


def test_merging_an_altered_segment_fails(writer: CollectionWriter) -> None:
    writer.upsert(documents(range(40, 80)))
    writer.flush()
    altered(writer.directory, "index/codes.npy")
    with pytest.raises(CollectionError, match=r"codes\.npy is damaged"):
        writer.compact()
    assert len(writer.state.segments) == 2
