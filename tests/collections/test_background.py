"""Segments are built by a background process while the writer continues."""

import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from runtime.errors import CollectionError, Overloaded
from runtime.retrieval.collections.description import SegmentInfo
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.maintenance import (
    MAX_DELETED_SHARE,
    MAX_SEGMENTS_PER_SHARD,
    MERGE_FAN_IN,
    RETRY_S,
    pick_merge,
)
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment_build import BuildJob, build
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.testing.background import Background
from runtime.testing.waiting import until
from tests.collections.small_collections import contents, document, documents, maintain, new_writer, open_writer
from tests.thread_limit import permit_threads


@pytest.mark.parametrize("permitted", [0, 1])
def test_a_writer_for_which_no_thread_can_be_started_is_refused_and_leaves_no_lock(
    permitted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_writer(tmp_path / "a").close()
    before = set(threading.enumerate())
    with monkeypatch.context() as limited:
        permit_threads(limited, permitted)
        with pytest.raises(Overloaded, match="can't start new thread"):
            CollectionWriter(tmp_path / "a")
    assert set(threading.enumerate()) <= before
    CollectionWriter(tmp_path / "a").close()


def test_rows_written_during_a_merge_are_sealed_without_waiting_for_it(tmp_path: Path) -> None:
    moments = [("rows", 1.0), ("write", 0.0), ("write", 1.0)]  # before, while and after there is a directory of it
    with new_writer(tmp_path / "a") as writer:
        for number in range(MERGE_FAN_IN):
            writer.upsert(documents(range(8 * number, 8 * number + 8)))
            writer.flush()

        def seal(stage: str, part: float) -> None:
            if (stage, part) in moments:
                number = moments.index((stage, part))
                writer.upsert([document(f"new {number}", number), document("31", number)])
                writer.delete([str(number)])
                writer.flush()

        assert writer.maintenance.merge_if_due(lambda directory, job: build(Disk(), writer.state, job, seal))
        expected = contents(writer)
        assert expected["31"] == "text 2"
        assert set(expected) == {f"new {number}" for number in range(3)} | {str(number) for number in range(3, 32)}
        assert sorted(segment.size for segment in writer.state.segments) == [2, 2, 2, 8 * MERGE_FAN_IN]
        assert sorted(path.name for path in (tmp_path / "a" / "segments").iterdir()) == ["4", "5", "6", "7"]
    with open_writer(tmp_path / "a") as writer:
        assert contents(writer) == expected


def test_threads_write_seal_and_merge_concurrently(tmp_path: Path) -> None:
    with (
        new_writer(tmp_path / "a", seal_rows=16, background=True) as writer,
        CollectionReader(tmp_path / "a") as reader,
    ):

        def write(first: int) -> None:
            for begin in range(first, first + 90, 5):
                writer.upsert(documents(range(begin, begin + 5)))
                writer.delete([str(begin)])
                if begin % 3 == 0:
                    writer.flush()

        with Background([partial(write, 0), partial(write, 1000)]):
            until(lambda: writer.state.count == 144)
        until(lambda: writer.state.growing.size < 16 and not pick_merge(writer.state.segments, 16))
        expected = contents(writer)
        reader.poll()
        assert contents(reader) == expected
        assert len(expected) == 144
        assert writer.statistics().merged > 0
    with open_writer(tmp_path / "a") as writer:
        assert contents(writer) == expected


def test_a_flush_at_the_segment_limit_merges_first(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:  # no background process merges
        for number in range(MAX_SEGMENTS_PER_SHARD + 8):
            writer.upsert([document(str(number), number)])
            writer.flush()
            assert writer.state.growing.size == 0
            assert len(writer.state.segments) <= MAX_SEGMENTS_PER_SHARD
        assert len(contents(writer)) == MAX_SEGMENTS_PER_SHARD + 8


def test_sealing_at_the_segment_limit_waits_for_a_merge(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a", seal_rows=4) as writer:
        for number in range(MAX_SEGMENTS_PER_SHARD):
            writer.upsert([document(str(number), number)])
            writer.flush()
        writer.upsert(documents(range(1000, 1008)))
        assert not writer.maintenance.seal_if_due(writer.maintenance.build_here)
        assert writer.maintenance.merge_if_due(writer.maintenance.build_here)
        assert writer.maintenance.seal_if_due(writer.maintenance.build_here)
        assert len(contents(writer)) == MAX_SEGMENTS_PER_SHARD + 8


def test_what_a_failed_seal_has_built_is_removed_at_once(tmp_path: Path) -> None:
    def build_first(directory: Path, job: BuildJob) -> SegmentInfo | None:
        if job.shard == 0:
            return writer.maintenance.build_here(directory, job)
        (directory / "segments" / str(job.number)).mkdir()  # its process is killed
        raise CollectionError("exited with status -9")

    with new_writer(tmp_path / "a", seal_rows=4, shards=2) as writer:
        writer.upsert(documents(range(8)))
        for _ in range(3):
            with pytest.raises(CollectionError, match="status -9"):
                writer.maintenance.seal_if_due(build_first)
            assert not any((tmp_path / "a" / "segments").iterdir())
        assert writer.maintenance.seal_if_due(writer.maintenance.build_here)
        assert len(contents(writer)) == 8


def test_a_compaction_rewrites_one_shard_at_a_time_as_far_as_it_is_due(tmp_path: Path) -> None:
    segments, counts = tmp_path / "a" / "segments", list[int]()
    with new_writer(tmp_path / "a", shards=3) as writer:
        for names in (range(30), range(20, 40)):
            writer.upsert(documents(names))
            writer.flush()
        writer.compact(lambda *_: counts.append(len(list(segments.iterdir()))))
        assert max(counts) == 7, "there need be no room for new files of all shards beside the old ones"
        before = set(writer.state.segments)
        writer.upsert([document("more", 1)])
        writer.compact()
        assert len(before & set(writer.state.segments)) == 2
        assert len(writer.state.segments) == 3
        assert set(contents(writer)) == {"more", *(str(number) for number in range(40))}


def test_a_build_for_which_no_process_can_be_started_is_retried_with_back_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses, start = list[float](), subprocess.Popen
    no_process = Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable"))

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        writer.upsert(documents(range(8, 9)))  # does not retry the build by itself
        assert no_process.call_count == len(pauses)
        if len(pauses) == 3:
            monkeypatch.setattr(subprocess, "Popen", start)

    with new_writer(tmp_path / "a", seal_rows=8) as writer:
        writer.upsert(documents(range(8)))
        monkeypatch.setattr(subprocess, "Popen", no_process)
        writer.maintenance.start(pause)
        until(lambda: writer.state.segments)
        assert len(contents(writer)) == 9
    assert pauses == [RETRY_S] * 3
    reason = "no process can be started to build it: Resource temporarily unavailable"
    assert caplog.text.count(f"a segment could not be built: {reason}") == 3


def test_the_error_of_a_process_that_builds_is_reported_and_the_build_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with new_writer(tmp_path / "a", seal_rows=8) as writer:
        writer.upsert(documents(range(8)))
        about = tmp_path / "a" / "collection.json"
        about.rename(tmp_path / "away")
        writer.maintenance.start(lambda seconds: (tmp_path / "away").rename(about))
        until(lambda: writer.state.segments)
    assert "a segment could not be built: " in caplog.text
    assert "is not a collection" in caplog.text


def test_repeated_flushes_of_updates_keep_segments_few(tmp_path: Path) -> None:
    chance = random.Random(1)
    with new_writer(tmp_path / "a") as writer:
        for _ in range(60):
            writer.upsert([document(str(number), number) for number in chance.sample(range(40), 6)])
            writer.flush()
            maintain(writer, writer.maintenance.build_here)  # as often as is sealed, and no oftener
            assert len(writer.state.segments) <= 2 * MERGE_FAN_IN
        while maintain(writer, writer.maintenance.build_here):
            pass
        assert sum(segment.size for segment in writer.state.segments) <= writer.state.count / (1 - MAX_DELETED_SHARE)


def test_a_build_does_not_start_for_a_dead_writer(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(8)))
        writer.flush()
    there, job = sorted(tmp_path.rglob("*")), msgspec.json.encode(BuildJob(99, 0, [0])).decode()
    command = [sys.executable, "-m", "runtime.retrieval.collections.maintenance", str(tmp_path / "a"), job, "1"]
    assert subprocess.run(command).returncode == 1
    assert sorted(tmp_path.rglob("*")) == there
