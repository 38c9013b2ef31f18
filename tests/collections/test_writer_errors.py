"""Errors of a collection's writer: locks, full disks, invalid documents, overload, killed builds."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import (
    CollectionBusy,
    CollectionError,
    InternalError,
    InvalidDocument,
    InvalidFilter,
    InvalidRequest,
    NoRoom,
    Overloaded,
)
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.collections import segment_build, validation
from runtime.retrieval.collections import writer as writer_module
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.description import SegmentInfo, read_description
from runtime.retrieval.collections.disk import LOCK, Disk, acquire_lock
from runtime.retrieval.collections.log import header_of
from runtime.retrieval.collections.part import ignore
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.search import search
from runtime.retrieval.collections.segment_build import BuildJob
from runtime.retrieval.collections.validation import UpsertDocument
from tests.collections.small_collections import (
    DIM,
    contents,
    document,
    documents,
    new_writer,
    open_writer,
    vector_of,
)


def test_a_second_writer_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as first:
        with pytest.raises(CollectionBusy, match=f"process {os.getpid()}"):
            open_writer(tmp_path / "a")
        first.upsert(documents(range(2)))
    with open_writer(tmp_path / "a") as second:
        assert len(contents(second)) == 2


def test_a_killed_writers_lock_is_awaited_while_its_child_holds_it(tmp_path: Path) -> None:
    childs = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(childs, fcntl.LOCK_EX)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.close(childs)

    os.close(acquire_lock(tmp_path, pause))
    assert len(pauses) == 3


class _FullDisk(Disk):
    """A disk with a limited number of free bytes."""

    room = 1 << 40

    def write(self, fd: int, content: bytes) -> None:
        fits = content[: max(self.room, 0)]
        self.room -= len(fits)
        super().write(fd, fits)
        if len(fits) < len(content):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_refuses_a_write_atomically_until_space_is_free(tmp_path: Path) -> None:
    disk = _FullDisk()
    with new_writer(tmp_path / "a", disk=disk) as writer, CollectionReader(tmp_path / "a") as reader:
        writer.upsert(documents(range(3)))
        held = contents(writer)
        for room in range(0, 300, 7):
            disk.room = room
            with pytest.raises(NoRoom, match="nothing was stored"):
                writer.upsert(documents(range(2, 8)))
            reader.poll()
            assert contents(reader) == contents(writer) == held
        disk.room = 100
        for seal in (writer.flush, writer.compact):
            with pytest.raises(NoRoom):
                seal()
            assert contents(writer) == held
        disk.room = 1 << 40
        writer.upsert(documents(range(2, 8)))
        writer.flush()
        reader.poll()
        assert set(contents(reader)) == set(contents(writer)) == {str(number) for number in range(8)}
    with open_writer(tmp_path / "a") as writer:
        assert writer.repaired == ""
        assert len(contents(writer)) == 8


class _StuckDisk(_FullDisk):
    """One that cannot cut a file while it is full, as file systems that copy on write."""

    def truncate(self, fd: int, size: int) -> None:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().truncate(fd, size)


@pytest.mark.parametrize("sealed", [False, True])
def test_part_of_a_record_that_a_full_disk_keeps_is_cut_before_the_next_one(tmp_path: Path, sealed: bool) -> None:
    disk = _StuckDisk()
    with new_writer(tmp_path / "a", disk=disk) as writer, CollectionReader(tmp_path / "a") as reader:
        writer.upsert(documents(range(3)))
        disk.room = 100
        for _ in range(2):
            with pytest.raises(NoRoom, match="nothing was stored"):
                writer.upsert(documents(range(3, 9)))
        with pytest.raises(NoRoom):
            writer.flush()
        disk.room = 1 << 40
        if sealed:
            writer.flush()
        writer.upsert(documents(range(3, 4)))
        reader.poll()
        assert set(contents(reader)) == {"0", "1", "2", "3"}
    with open_writer(tmp_path / "a") as writer:
        assert writer.repaired == ""
        assert set(contents(writer)) == {"0", "1", "2", "3"}


def test_after_a_write_that_was_stored_and_not_applied_others_are_refused_until_the_collection_is_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(operations: object) -> None:
        raise MemoryError

    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(2)))
        with monkeypatch.context() as broken:
            broken.setattr(writer.state, "apply", fail)
            with pytest.raises(InternalError, match="lacks a write that is stored"):
                writer.upsert(documents(range(2, 4)))
        with pytest.raises(CollectionError, match="reopen it"):
            writer.upsert(documents(range(4, 6)))
        with pytest.raises(CollectionError, match="reopen it"):
            writer.flush()
    with open_writer(tmp_path / "a") as writer:
        assert set(contents(writer)) == {"0", "1", "2", "3"}


class _FailingDisk(Disk):
    fails = False

    def sync(self, fd: int) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        super().sync(fd)


def test_after_a_failed_sync_writes_are_refused_until_the_collection_is_reopened(tmp_path: Path) -> None:
    disk = _FailingDisk()
    with new_writer(tmp_path / "a", disk=disk) as writer:
        writer.upsert(documents(range(2)))
        disk.fails = True
        with pytest.raises(CollectionError, match="whether the last write is stored is unknown"):
            writer.upsert(documents(range(2, 4)))
        disk.fails = False
        with pytest.raises(CollectionError, match="reopen it"):
            writer.upsert(documents(range(4, 6)))
    with open_writer(tmp_path / "a") as writer:
        assert set(contents(writer)) in ({"0", "1"}, {"0", "1", "2", "3"})


def test_a_build_that_has_read_a_write_whose_sync_failed_is_not_installed(tmp_path: Path) -> None:
    disk, log = _FailingDisk(), tmp_path / "a" / "log"

    def build(directory: Path, job: BuildJob) -> SegmentInfo | None:
        disk.fails = True
        with pytest.raises(CollectionError, match="is unknown"):
            writer.upsert([document("1", 9)])  # replaces one of the rows that are sealed
        disk.fails = False
        with CollectionReader(directory, prepare=ignore) as reader:  # as the process that builds does
            return segment_build.build(Disk(), reader.state, job)

    with new_writer(tmp_path / "a", disk=disk, seal_rows=2) as writer:
        writer.upsert(documents(range(2)))
        with pytest.raises(CollectionError, match="reopen it"):
            writer.maintenance.seal_if_due(build)
    first, path = max((int(path.stem), path) for path in log.iterdir())
    assert first > 0, "the log was rotated before the build"
    os.truncate(path, len(header_of(read_description(tmp_path / "a").identity, first)))  # the disk has lost the write
    with open_writer(tmp_path / "a") as writer:
        assert contents(writer) == {"0": "text 0", "1": "text 1"}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([document("a", 1), document("a", 2)], "contains the id 'a' twice"),
        ([document("", 1)], "empty id"),
        ([UpsertDocument("a", vector=[1.0] * (DIM + 1))], rf"\[{DIM + 1}\].* have {DIM} dimensions"),
        ([UpsertDocument("a", vector=[[1.0] * DIM])], "shape"),
        (
            [UpsertDocument("ok", vector=[1] * DIM), UpsertDocument("a", vector=[float("nan")] * DIM)],
            "'a' holds nan at position 0",
        ),
        ([UpsertDocument("a", vector=["x"] * DIM)], "is invalid"),
        ([UpsertDocument("a", "no vector")], "no embedder"),
        ([UpsertDocument("a" * 513, vector=vector_of(1))], "513 bytes"),
        ([UpsertDocument("\ud800", vector=vector_of(1))], "surrogate"),
        ([UpsertDocument(7, vector=vector_of(1))], "must be a string"),  # type: ignore[arg-type]
        ([UpsertDocument(10**5000, vector=vector_of(1))], "over 4,300 digits; it must be a string"),  # type: ignore[arg-type]
        ([document("a", 1, year="x")], "'year' is a string.*integer before"),
        ([document("a", 1, **{"a b": 1})], "is not a valid name"),
        ([document(str(number), 1) for number in range(validation.MAX_BATCH + 1)], "limit is 4096"),
    ],
)
def test_invalid_documents_are_refused_with_their_whole_batch(
    tmp_path: Path, batch: list[UpsertDocument], said: str
) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert([document("first", 0, year=1)])
        with pytest.raises(InvalidDocument, match=said):
            writer.upsert([document("good", 5, new=True), *batch])
        assert contents(writer) == {"first": "text 0"}
        assert set(writer.state.schema) == {"year"}


def test_a_batch_over_the_record_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_BATCH_BYTES", 2000)
    with new_writer(tmp_path / "a") as writer:
        for batch in (documents(range(40)), [document("a", 1, words=["x" * 500] * 5)]):
            with pytest.raises(InvalidDocument, match=r"the batch has .* bytes; the limit is 2000"):
                writer.upsert(batch)
        writer.upsert(documents(range(4)))
        assert len(contents(writer)) == 4


def test_an_internal_error_fails_only_its_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_writer(tmp_path / "a") as writer:
        with monkeypatch.context() as broken:
            broken.setattr(writer.state, "rows_of", lambda ids: 1 / 0)
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                writer.upsert(documents(range(2)))
        assert writer.upsert(documents(range(2))) == 2
        assert len(contents(writer)) == 2


def test_search_filters_are_validated_and_a_required_attribute_must_be_bound(tmp_path: Path) -> None:
    create(tmp_path / "a", DIM, metric="l2", demanded="tenant")
    with open_writer(tmp_path / "a") as writer:
        writer.upsert([document(name, seed, tenant=name) for seed, name in enumerate("ab")])
        query = vector_of(0)[None]
        for wanted in (None, parse_filter({"type": "ne", "key": "tenant", "value": "a"})):
            with pytest.raises(InvalidRequest, match="demands a filter that binds 'tenant'"):
                search(writer.state, query, 2, filter=wanted)
        bound = parse_filter({"type": "eq", "key": "tenant", "value": "b"})
        assert search(writer.state, query, 2, filter=bound)[0].tolist() == [[1, -1]]
        with pytest.raises(InvalidFilter, match="no document has the attribute"):
            writer.delete_where(parse_filter({"type": "eq", "key": "colour", "value": "b"}))


def test_upserts_are_refused_while_too_many_rows_wait_to_be_sealed(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a", seal_rows=4) as writer:
        for begin in range(0, 64, 4):
            writer.upsert(documents(range(begin, begin + 4)))
        with pytest.raises(Overloaded, match="64 documents wait"):
            writer.upsert(documents(range(2)))
        writer.flush()
        assert writer.upsert(documents(range(2))) == 2


def test_concurrent_writes_are_all_stored_and_share_records(tmp_path: Path) -> None:
    class Slow(Disk):
        gate = threading.Event()

        def sync(self, fd: int) -> None:
            self.gate.wait(30)
            super().sync(fd)

    disk = Slow()
    disk.gate.set()
    with new_writer(tmp_path / "a", disk=disk) as writer:
        disk.gate.clear()
        threads = [threading.Thread(target=writer.upsert, args=(documents(range(n, n + 3)),)) for n in range(0, 60, 2)]
        for thread in threads:
            thread.start()
        while len(writer.commits.pending) < len(threads):
            pass
        disk.gate.set()
        for thread in threads:
            thread.join(60)
        assert set(contents(writer)) == {str(number) for number in range(61)}
        assert writer.state.sequence <= 2
        before = contents(writer)
    with open_writer(tmp_path / "a") as writer:
        assert contents(writer) == before


def test_a_search_keeps_its_snapshot_and_a_delete_hides_at_once(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer, CollectionReader(tmp_path / "a") as reader:
        writer.upsert(documents(range(40)))
        writer.flush()
        reader.poll()
        old = reader.state.segments[0]
        writer.delete(["7"])
        reader.poll()
        query = vector_of(7)[None]
        assert 7 not in reader.search(query, 40)[0]
        writer.compact()
        assert old.find([5])[5].id == "5"  # removed from the directory, and still open here
        assert np.asarray(old.index.search(query, 3)[0]).shape == (1, 3)
        reader.poll()
        assert reader.state.segments[0] is not old
        assert reader.documents([7, 8])[0] is None
        (sealed,) = reader.state.segments
        assert (sealed.info.number, sealed.size, sealed.count) == (1, 39, 39)


@pytest.mark.parametrize("leave", ["segments/.building-7", "segments/9", "tombstones/5.npy", "log/.x.part"])
def test_files_of_a_killed_build_are_removed(tmp_path: Path, leave: str) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(4)))
    path = tmp_path / "a" / leave
    if leave.startswith("segments"):
        path.mkdir()
        (path / "x").write_bytes(b"x")
    else:
        path.write_bytes(b"x")
    assert CollectionReader.verify(tmp_path / "a") == ""
    with open_writer(tmp_path / "a") as writer:
        assert len(contents(writer)) == 4
    assert not path.exists() or leave.startswith("log")
