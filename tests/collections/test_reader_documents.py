"""A reader finds the documents of rows that a pool returned, even if it has not polled since."""

import errno
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.errors import CollectionError, InvalidFilter
from runtime.retrieval.attributes.filters import Comparison
from runtime.retrieval.collections.description import SegmentInfo
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.log import Upsert, decode, encode
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.served_documents import (
    KEPT_S,
    LIMIT_BYTES,
    OBJECTS_BYTES,
    CollectionDocuments,
    RecentDocuments,
)
from runtime.retrieval.collections.state import Loaded
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.testing.waiting import until
from tests.collections.small_collections import DIM, contents, document, documents, new_writer
from tests.thread_limit import permit_threads


def test_writes_before_a_log_file_that_cannot_be_opened_are_applied_and_the_others_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, max_bytes: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with new_writer(tmp_path / "a") as writer, CollectionReader(tmp_path / "a") as reader:
        writer.upsert(documents(range(3)))
        writer.commits.rotate()
        writer.upsert(documents(range(2, 6)))
        with monkeypatch.context() as full:
            full.setattr("runtime.retrieval.collections.log.open_regular", refuse)
            assert reader.poll()
            assert set(contents(reader)) == {"0", "1", "2"}
            with pytest.raises(CollectionError, match="Too many open files"):
                reader.poll()
        assert reader.poll()
        assert contents(reader) == contents(writer)


class _HeldReader(CollectionReader):
    """A reader that opens segments on a thread, once `released` is set. `opened`: their numbers."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, background=True)
        self.released, self.opened, self._open_now = threading.Event(), list[int](), self.state.open_segments
        self.state.open_segments = self._held  # type: ignore[method-assign]

    def _held(self, infos: Sequence[SegmentInfo]) -> Loaded:
        assert self.released.wait(60)
        self.opened += [info.number for info in infos]
        return self._open_now(infos)


@contextmanager
def meanwhile(path: Path) -> Iterator[tuple[CollectionWriter, _HeldReader]]:
    """A writer with more documents, while a reader opens the segment of the first ones; it reads all in the end."""
    with new_writer(path) as writer, _HeldReader(path) as reader:
        writer.upsert(documents(range(3)))
        writer.flush()
        reader.poll()
        assert not reader.state.segments
        writer.upsert(documents(range(3, 6)))
        yield writer, reader
        reader.released.set()
        installed = {segment.info for segment in writer.state.segments}
        until(lambda: {segment.info for segment in reader.state.segments} == installed, reader.poll)
        assert contents(reader) == contents(writer)


def test_a_segment_that_is_merged_away_before_it_was_opened_is_no_error(tmp_path: Path) -> None:
    with meanwhile(tmp_path / "a") as (writer, _):
        writer.compact()


def test_a_segment_that_was_opened_is_kept_for_a_manifest_with_more_of_them(tmp_path: Path) -> None:
    with meanwhile(tmp_path / "a") as (writer, reader):
        writer.flush()
        wanted = [segment.info.number for segment in writer.state.segments]
    assert reader.opened == wanted


def test_a_segment_is_opened_once_the_system_permits_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_writer(tmp_path / "a") as writer, CollectionReader(tmp_path / "a", background=True) as reader:
        writer.upsert(documents(range(3)))
        writer.flush()
        with monkeypatch.context() as limited:
            permit_threads(limited)
            reader.poll()
        assert not reader.state.segments
        until(lambda: len(reader.state.segments) == 1, reader.poll)
        assert contents(reader) == contents(writer)


def test_a_large_write_is_applied_in_parts_and_becomes_visible_as_a_whole(tmp_path: Path) -> None:
    with new_writer(tmp_path / "notes") as writer, CollectionReader(tmp_path / "notes") as reader:
        writer.upsert(documents(range(500), kind="old"))
        writer.flush()
        reader.poll()
        writer.upsert([document(str(number), number, kind="new", n=number) for number in range(2000)])
        writer.delete(["1"])
        seen, changed = list[tuple[int, int, int]](), list[bool]()
        while not changed or reader.applying:
            changed.append(reader.poll(budget_ns=1))
            old, new = (len(reader.state.rows_passing(Comparison("kind", "eq", (kind,)))) for kind in ("old", "new"))
            seen.append((reader.state.count, old, new))
        assert len(changed) > 20
        assert set(seen[:-1]) <= {(500, 500, 0), (2000, 0, 2000)}
        assert seen[-1] == (1999, 0, 1999)
        assert changed[-1]
        assert contents(reader) == contents(writer)


def test_a_write_that_is_applied_in_part_is_completed_before_segments_are_replaced(tmp_path: Path) -> None:
    with new_writer(tmp_path / "notes") as writer, CollectionReader(tmp_path / "notes") as reader:
        writer.upsert(documents(range(2000)))
        reader.poll(budget_ns=1)
        assert reader.applying
        writer.upsert(documents(range(1000, 3000)))
        writer.flush()
        while reader.poll(budget_ns=1) or reader.applying:
            pass
        assert contents(reader) == contents(writer)


def test_filters_are_checked_against_the_documents_of_now(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        reading = CollectionDocuments(tmp_path / "a")
        writer.upsert([replace(document, attributes={"fresh": 1}) for document in documents(range(3))])
        reading.check_filter(Comparison("fresh", "eq", (1,)))
        with pytest.raises(InvalidFilter, match="'fresh' is an integer; it cannot be compared with 'text'"):
            reading.check_filter(Comparison("fresh", "eq", ("text",)))
        with pytest.raises(InvalidFilter, match="no document has the attribute 'other'"):
            reading.check_filter(Comparison("other", "eq", (1,)))
        reading.close()


@contextmanager
def overtaken(path: Path, times: int) -> Iterator[CollectionDocuments]:
    """Documents 0 to 2, whose segment, and so often the next ones, is merged away while it is opened."""
    with new_writer(path) as writer, CollectionDocuments(path) as reading:
        writer.upsert([replace(document, attributes={"fresh": 1}) for document in documents(range(3))])
        writer.flush()
        open_now, left = reading.state.open_segments, iter(range(times))

        def overtake(infos: Sequence[SegmentInfo]) -> Loaded:
            if (number := next(left, None)) is not None:
                writer.upsert([document("more", number)])
                writer.flush()
                writer.compact()
            return open_now(infos)

        reading.state.open_segments = overtake  # type: ignore[method-assign]
        yield reading


@pytest.mark.parametrize("times", [1, 4])
def test_acknowledged_writes_are_found_while_the_writer_merges_the_segments_that_are_opened(
    tmp_path: Path, times: int
) -> None:
    with overtaken(tmp_path / "a", times) as reading:
        assert [found and found.id for found in reading.get(range(3))] == ["0", "1", "2"]
    with overtaken(tmp_path / "b", times) as reading:
        reading.check_filter(Comparison("fresh", "eq", (1,)))


def test_a_reader_whose_segments_are_always_merged_away_says_so_and_recovers(tmp_path: Path) -> None:
    with overtaken(tmp_path / "a", 5) as reading:
        with pytest.raises(CollectionError, match="cannot be read"):
            reading.get(range(3))
        assert [found and found.id for found in reading.get(range(3))] == ["0", "1", "2"]


# ---- replaced documents: a pool may find the old row or the new one


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CollectionWriter]:
    with new_writer(tmp_path / "a") as made:
        yield made


@pytest.fixture
def store(writer: CollectionWriter) -> Iterator[CollectionDocuments]:
    made = CollectionDocuments(writer.directory)
    yield made
    made.close()


def put(writer: CollectionWriter, seed: int) -> int:
    """Store a version of the document a; return its row."""
    writer.upsert([document("a", seed)])
    return writer.state.rows_of(["a"])["a"]


def texts(store: CollectionDocuments, *rows: int) -> list[str | None]:
    return [None if found is None else found.text for found in store.get(rows)]


def test_a_replaced_row_has_its_text_until_the_document_is_deleted(
    writer: CollectionWriter, store: CollectionDocuments
) -> None:
    rows = [put(writer, seed) for seed in range(3)]
    for number, row in enumerate(rows):
        assert texts(store, row) == [f"text {number}"]
    writer.delete(["a"])
    assert texts(store, *rows) == [None] * 3
    new = put(writer, 3)  # the deleted versions stay deleted
    assert [texts(store, row) for row in (*rows, new)] == [[None], [None], [None], ["text 3"]]


def test_of_two_versions_in_one_result_the_newer_is_returned(
    writer: CollectionWriter, store: CollectionDocuments
) -> None:
    writer.upsert(documents(range(2)))
    old, middle, new = (put(writer, seed) for seed in range(7, 10))
    assert texts(store, old, 0, new, 1, middle) == [None, "text 0", "text 9", "text 1", None]
    assert texts(store, old, middle) == [None, "text 8"]


@pytest.mark.parametrize(
    "merge_away",
    [
        lambda writer: writer.flush(),  # the old row is left out of the segment
        lambda writer: [writer.upsert(documents(range(9))), writer.flush(), writer.compact()],
    ],
    ids=["sealed", "merged"],
)
@pytest.mark.parametrize("was_sealed", [False, True])
@pytest.mark.parametrize("polls", [False, True])
def test_a_replaced_row_has_its_text_even_if_it_is_merged_away(
    writer: CollectionWriter,
    store: CollectionDocuments,
    merge_away: Callable[[CollectionWriter], object],
    was_sealed: bool,
    polls: bool,
) -> None:
    old = put(writer, 1)
    if was_sealed:
        writer.flush()
    assert texts(store, old) == ["text 1"]
    new = put(writer, 2)
    if polls:  # else it learns of the replacement and of the merge at once
        assert texts(store, new) == ["text 2"]
    merge_away(writer)
    writer.upsert(documents(range(20, 22)))
    assert texts(store, new) == ["text 2"]
    assert texts(store, old) == ["text 1"]
    writer.delete(["a"])
    assert texts(store, old) == texts(store, new) == [None]


def test_the_same_row_stands_for_a_document_in_two_results_of_a_query(
    writer: CollectionWriter, store: CollectionDocuments
) -> None:
    writer.upsert(documents(range(2)))
    old, middle, new = (put(writer, seed) for seed in range(3))
    distances = np.arange(2, dtype=np.float32)

    def aligned(one: list[int], other: list[int]) -> list[list[int]]:
        found = store.align((np.array(one), distances), (np.array(other), distances))
        assert all((part is distances) for _, part in found)
        return [ids.tolist() for ids, _ in found]

    assert aligned([old, 0], [1, new]) == [[new, 0], [1, new]]
    assert aligned([new, 0], [1, old]) == [[new, 0], [1, new]]
    assert aligned([old, -1], [1, middle]) == [[middle, -1], [1, middle]]  # the newest row was not found: not added
    assert aligned([old, 0], [old, 1]) == [[old, 0], [old, 1]]


def test_documents_that_were_merged_away_are_forgotten_after_a_while(writer: CollectionWriter) -> None:
    now, rows = 0.0, list[int]()
    expected: list[str | None] = ["text 0", "text 1", "text 2"]
    with CollectionDocuments(writer.directory, lambda: now) as store:
        for seed, now in enumerate((0.0, KEPT_S / 2, KEPT_S + 1)):
            rows.append(put(writer, seed))
            texts(store, rows[-1])
            put(writer, 9)
            writer.flush()
            expected[0] = None if now > KEPT_S else "text 0"
            assert [texts(store, row) for row in rows] == [[text] for text in expected[: seed + 1]]


def test_logs_of_older_versions_have_fewer_or_more_fields() -> None:
    upsert = Upsert(3, ["a"], [""], ["t"], [{}], bytes(4 * DIM), [1], [3])
    content = encode([upsert])
    assert decode(content, DIM) == [upsert]
    more = content.replace(b"\x99\xa1u", b"\x9a\xa1u") + b"\x80"  # and who introduced which attribute
    assert decode(more, DIM) == [upsert]
    old = content.replace(b"\x99\xa1u", b"\x98\xa1u")[:-2]  # without the rows that replace others
    (found,) = decode(old, DIM)
    assert isinstance(found, Upsert)
    assert (found.replaced, found.successors) == ([1], [])


def test_documents_that_were_read_are_known_until_a_write_is_to_be_applied(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        writer.flush()
        reading = CollectionDocuments(tmp_path / "a")
        rows = [writer.state.rows_of([name])[name] for name in ("3", "7", "9")]
        assert reading.get_known(rows) is None
        found = reading.get(rows)
        known = reading.get_known(rows)
        assert known == (found, sum(len(one.id + one.title + one.text) for one in found if one))
        assert reading.get_known([*rows, 1]) is None
        writer.delete(["7"])
        assert reading.get_known(rows) is None
        reading.get([])
        assert reading.get_known(rows) is None  # one is deleted
        known = reading.get_known(rows[::2])
        assert known is not None
        assert known[0] == found[::2]
        reading.close()


def test_of_two_versions_of_a_document_that_were_each_found_alone_the_newer_one_is_shown(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        rows, reading = [put(writer, 0)], CollectionDocuments(tmp_path / "a")
        reading.get(rows)
        rows.append(put(writer, 1))
        found = [reading.get([row])[0] for row in rows]
        assert [one and one.text for one in found] == ["text 0", "text 1"]
        assert reading.get_known(rows) is None
        assert reading.get(rows) == [None, found[1]]
        reading.close()


def test_one_look_at_the_files_serves_the_searches_that_began_before_it(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(4)))
        writer.flush()
        reading = CollectionDocuments(tmp_path / "a")
        rows = [writer.state.rows_of([name])[name] for name in ("1", "2")]
        reading.get(rows)
        known = reading.get_known(rows, since_ns=5, now_ns=10)
        assert known is not None
        writer.delete(["1"])
        assert reading.get_known(rows, since_ns=10, now_ns=20) == known
        assert reading.get_known(rows, since_ns=11, now_ns=20) is None
        reading.close()


def test_known_documents_are_those_added_last_within_their_memory() -> None:
    limit_bytes = 4 * (OBJECTS_BYTES + 25)
    recent, whole = RecentDocuments(limit_bytes), "y" * (limit_bytes - OBJECTS_BYTES - 1)
    for row in range(8):
        recent.add([(row, Document(str(row), "", "x" * 24))])
    assert list(recent.find(range(8))) == [4, 5, 6, 7]
    recent.add([(9, Document("9", "", whole)), (7, Document("7", "", "z"))])
    assert list(recent.find(range(10))) == [9]
    recent.add([(1, Document("1", "", whole + "y"))])
    assert recent.find(range(10)) == {}


def test_known_documents_take_little_memory_even_if_they_have_no_texts() -> None:
    recent = RecentDocuments()
    tracemalloc.start()
    try:
        for row in range(60_000):
            recent.add([(row, Document(str(row), "", "", row=row))])
        assert tracemalloc.get_traced_memory()[0] <= LIMIT_BYTES
    finally:
        tracemalloc.stop()
