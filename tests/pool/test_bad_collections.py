"""Tests that a moved, truncated, altered or unreadable collection does not affect the others of its pool."""

import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc import SearchSpec
from runtime.errors import EXIT_BUSY, CollectionError, Unavailable
from runtime.node.config import CollectionSection
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool.collections.shard import Shard, open_shard
from runtime.pool.process import Timing
from runtime.retrieval.collections.reader import CollectionReader
from runtime.testing.pool import InProcessPool, plan_of
from runtime.testing.waiting import until
from tests.pool.client_helpers import attached
from tests.pool.conftest import BUSY, MakeClient, MakePool
from tests.pool.rebuilds import DIM, build
from tests.thread_limit import permit_threads

QUERY = np.zeros(DIM, np.float32)


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def truncated(path: Path) -> None:
    codes = path / "segments/0/index" / "codes.npy"
    os.truncate(codes, codes.stat().st_size // 2)


def altered(path: Path) -> None:
    """Write an edge to a row that does not exist, without changing any size."""
    graph = np.load(path / "segments/0/index" / "graph.npy", mmap_mode="r+")
    graph[7, 2] = (1 << 31) - 1
    graph.flush()


def redescribed(path: Path) -> None:
    meta = path / "segments/0/index" / "meta.json"
    meta.write_text(meta.read_text().replace('"scale": 1.0', '"scale": 0.0'))


def unreadable(path: Path) -> None:
    """Make a file unreadable, as by permissions or a disk error, even for root."""
    (path / "segments/0/index" / "codes.npy").unlink()
    (path / "segments/0/index" / "codes.npy").mkdir()


def without_documents(path: Path) -> None:
    (path / "segments/0/documents.sqlite").unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    damage.__name__: damage for damage in (moved, truncated, altered, redescribed, unreadable, without_documents)
}


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    build(tmp_path / "docs", 1)
    build(tmp_path / "code", 2)
    return tmp_path / "docs", tmp_path / "code"


def plan_with(both: tuple[Path, Path], **options: Any) -> Any:
    return plan_of(both[0], {"name": "code", "path": str(both[1]), "required": False, **options})


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_bad_collection_is_unavailable_with_a_reason_and_the_other_is_served(
    damage: Callable[[Path], None], both: tuple[Path, Path], make_pool: MakePool, make_client: MakeClient
) -> None:
    plan = plan_with(both)
    damage(both[1])
    pool = make_pool(plan).start()
    client = attached(make_client(plan))
    assert len(client.search(QUERY, 3, collection="docs").ids) == 3
    with pytest.raises(Unavailable, match=r"collection 'code' is unavailable: .*code"):
        client.search(QUERY, 3, collection="code")
    assert list(client.unavailable) == ["code"]
    assert pool.metric(PoolMetrics.UNAVAILABLE) == 1
    assert "collection code: unavailable: " in pool.table.note  # and the other's checksum progress


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_bad_required_collection_fails_the_start(damage: Callable[[Path], None], both: tuple[Path, Path]) -> None:
    plan = plan_with(both)
    damage(both[0])
    with pytest.raises(CollectionError, match="docs"):
        InProcessPool(plan)


def test_once_the_node_was_ready_a_bad_required_collection_does_not_stop_a_worker(
    both: tuple[Path, Path], make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_with(both)
    moved(both[0])
    pool = pool_of(plan, node_ready=True)
    client = attached(make_client(pool.worker.plan))
    assert len(client.search(QUERY, 3, collection="code").ids) == 3
    with pytest.raises(Unavailable, match="no collection at"):
        client.search(QUERY, 3, collection="docs")
    pool.close()


def pool_of(plan: Any, **options: Any) -> InProcessPool:
    """Return a pool worker with a plan from its supervisor."""

    return InProcessPool(plan, **options).start()


def spoil_a_vector(path: Path) -> None:
    """Alter a vector so that only a checksum detects it."""
    codes = np.load(path / "segments/0/index" / "codes.npy", mmap_mode="r+")
    codes[3, 0] += 1
    codes.flush()


@pytest.mark.parametrize(("verify", "served"), [("start", False), ("never", True)])
def test_checksums_are_verified_before_the_start_or_never_as_configured(
    verify: str, served: bool, both: tuple[Path, Path], make_pool: MakePool
) -> None:
    spoil_a_vector(both[1])
    pool = make_pool(plan_with(both, verify=verify))
    catalogue = pool.pool.catalogue
    assert [served.name for served in catalogue.offer.served] == ["docs", "code"][: 1 + served]
    if served:
        catalogue.poll(0)  # begins with the other one
        until(lambda: not catalogue.note or len(catalogue.served) < 2, lambda: catalogue.poll(0))
        assert (len(catalogue.served), catalogue.checked_share) == (2, 1.0)
    else:
        assert "codes.npy is damaged: its checksum" in pool.table.note


def test_checksums_are_verified_once_the_system_permits_another_thread(
    both: tuple[Path, Path], make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = make_pool(plan_with(both)).pool.catalogue
    with monkeypatch.context() as limited:
        permit_threads(limited)
        assert catalogue.poll(0) == []
    assert (len(catalogue.served), catalogue.checked_share) == (2, 0.0)
    until(lambda: catalogue.checked_share == 1.0, lambda: catalogue.poll(0))


def test_a_query_in_flight_on_a_removed_collection_is_answered(
    both: tuple[Path, Path], make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end = threading.Event(), threading.Event()

    def held_and_altered(throttle: object) -> None:
        begun.set()
        assert end.wait(60)
        raise CollectionError("altered")

    def opener(section: CollectionSection, worker: int) -> Shard:
        shard = open_shard(section, worker)
        if section.name == "code":
            monkeypatch.setattr(shard.reader, "verify_segments", held_and_altered)
        return shard

    pool = make_pool(plan_with(both), opener=opener)
    with pool.attach() as client:
        until(begun.is_set, pool.step)
        request_id = client.submit(QUERY, SearchSpec("code", 3, "decode"))
        pool.step()
        end.set()
        until(lambda: all(thread.name != "checksums" for thread in threading.enumerate()))
        assert pool.pool.busy
        pool.step()
        assert pool.metric(PoolMetrics.UNAVAILABLE) == 1
        assert pool.pool.busy, "the query is in flight when its collection is removed"
        found: list[Any] = []

        def step() -> None:
            pool.step()
            found.extend(client.poll())

        until(lambda: bool(found), step)
    assert [(result.request_id, result.status) for result in found] == [(request_id, "ok")]


def test_after_a_bus_error_checksums_are_verified_before_serving(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_a_vector(both[1])
    plan = plan_with(both, verify="never")
    pool = pool_of(plan, node_ready=True, last_exit=-signal.SIGBUS)
    assert [one.name for one in pool.pool.catalogue.offer.unserved] == ["code"]
    pool.close()


def test_a_restored_collection_is_served_again(
    both: tuple[Path, Path], make_pool: MakePool, make_client: MakeClient
) -> None:
    plan = plan_with(both)
    shutil.copytree(both[1], both[1].with_name("kept"))
    truncated(both[1])
    pool = make_pool(plan, timing=replace(BUSY, check_ns=0)).start()
    client = attached(make_client(plan))
    with pytest.raises(Unavailable):
        client.search(QUERY, 3, collection="code")
    shutil.rmtree(both[1])
    both[1].with_name("kept").rename(both[1])
    until(lambda: not client.unavailable and bool(client.identities("code")), lambda: client.poll())
    assert len(client.search(QUERY, 3, collection="code").ids) == 3
    assert pool.metric(PoolMetrics.UNAVAILABLE) == 0


def test_a_pool_without_any_collection_reports_the_reason_and_waits(tmp_path: Path, make_client: MakeClient) -> None:
    build(tmp_path / "docs", 1)
    plan = plan_of(tmp_path / "docs")
    moved(tmp_path / "docs")
    pool = pool_of(plan, timing=Timing(check_ns=0), node_ready=True)
    client = attached(make_client(plan))
    with pytest.raises(Unavailable, match="no collection at"):
        client.search(QUERY, 3, collection="docs")
    (tmp_path / "elsewhere").rename(tmp_path / "docs")
    until(lambda: bool(client.identities("docs")), lambda: client.poll())
    assert len(client.search(QUERY, 3, collection="docs").ids) == 3
    pool.close()


@contextmanager
def no_room_for(file_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files: the kernel rejects larger writes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 100, 3000, 8000], ids=lambda room: f"{room}-bytes")
def test_a_rebuild_on_a_full_disk_leaves_the_served_build_unchanged(
    room: int, both: tuple[Path, Path], make_pool: MakePool, make_client: MakeClient
) -> None:
    plan = plan_with(both)
    make_pool(plan).start()
    client = attached(make_client(plan))
    before = client.identities("docs")
    with no_room_for(room), pytest.raises(CollectionError, match=r"docs cannot be built: .*(full|large|I/O)") as full:
        build(both[0], 3)
    assert full.value.exit_code == EXIT_BUSY
    assert sorted(path.name for path in both[0].parent.iterdir()) == ["code", "docs"]
    CollectionReader.verify(both[0])
    assert client.search(QUERY, 3, collection="docs").identity == before[0]
    build(both[0], 3)  # there is space again


def test_a_query_goes_to_a_replica_that_serves_its_collection(
    both: tuple[Path, Path], make_pool: MakePool, make_client: MakeClient
) -> None:
    plan = plan_of(both[0], {"name": "code", "path": str(both[1]), "required": False}, workers=2)
    make_pool(plan, "pool-0").start()
    moved(both[1])
    make_pool(plan, "pool-1").start()
    client = attached(make_client(plan))
    assert client.unavailable == {}
    assert all(len(client.search(QUERY, 3, collection="code").ids) == 3 for _ in range(6))


def test_a_nan_distance_is_an_error_and_a_reload_removes_the_altered_collection(
    both: tuple[Path, Path], make_pool: MakePool, make_client: MakeClient
) -> None:
    """The files are altered in place, while mapped, after every checksum was compared."""
    pool = make_pool(plan_with(both, verify="never")).start()
    client = attached(make_client(pool.worker.plan))
    assert len(client.search(QUERY, 3, collection="code").ids) == 3
    codes = np.load(both[1] / "segments/0/index" / "codes.npy", mmap_mode="r+")
    codes[:] = np.nan
    codes.flush()
    with pytest.raises(Unavailable, match="collection 'code' is damaged"):
        client.search(QUERY, 3, collection="code")
    assert len(client.search(QUERY, 3, collection="docs").ids) == 3
