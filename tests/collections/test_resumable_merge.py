"""A merge whose process was killed resumes from its partial results."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from runtime.errors import CollectionError
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.maintenance import MERGE_FAN_IN, BuildSegment
from runtime.retrieval.collections.manifest import SegmentInfo
from runtime.retrieval.collections.recovery import replay
from runtime.retrieval.collections.resumable_merge import merging_path
from runtime.retrieval.collections.segment_build import BuildJob, build
from runtime.retrieval.collections.segment_files import segment_path
from runtime.retrieval.collections.writer import CollectionWriter
from tests.collections.small_collections import contents, documents, maintain, new_writer, open_writer
from tests.process_context import FORKSERVER

ROWS = 60


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A collection with enough segments for a merge."""
    with new_writer(tmp_path / "a") as writer:
        for part in range(MERGE_FAN_IN):
            writer.upsert(documents(range(ROWS * part, ROWS * (part + 1))))
            writer.flush()
        writer.delete([str(3 * number) for number in range(20)])
    return tmp_path / "a"


def test_a_build_does_not_start_for_a_dead_writer(sealed: Path) -> None:
    there = sorted(sealed.rglob("*"))
    job = msgspec.json.encode(BuildJob(99, 0, 0, list(range(MERGE_FAN_IN)))).decode()
    ended = subprocess.run([sys.executable, "-m", "runtime.retrieval.collections.segment_build", str(sealed), job, "1"])
    assert ended.returncode == 1
    assert sorted(sealed.rglob("*")) == there


def _build_until(directory: Path, job: BuildJob, last: str) -> None:
    """Run a build that is killed when the stage `last` begins."""

    def progress(stage: str, part: float) -> None:
        if stage == last:
            os.kill(os.getpid(), signal.SIGKILL)

    build(Disk(), replay(directory).state, job, progress)


def killed(last: str) -> BuildSegment:
    def run(directory: Path, job: BuildJob) -> SegmentInfo | None:
        process = FORKSERVER.Process(target=_build_until, args=(directory, job, last))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        raise CollectionError("it was killed")

    return run


def kill(writer: CollectionWriter, last: str) -> None:
    with pytest.raises(CollectionError, match="it was killed"):
        maintain(writer, killed(last))


Made = dict[str, tuple[int, int]]


def made(directory: Path) -> Made:
    """Return an unfinished merge's files and their modification times."""
    found = {path.name: path.stat() for path in merging_path(directory).glob("*.npy")}
    return {name: (told.st_ino, told.st_mtime_ns) for name, told in found.items()}


def merged(writer: CollectionWriter, look: Callable[[], None] = lambda: None) -> bytes:
    """Merge, call `look` before the segment is installed, and return the graph."""

    def run(directory: Path, job: BuildJob) -> SegmentInfo | None:
        info = build(Disk(), writer.state, job)
        look()
        return info

    assert maintain(writer, run)
    (segment,) = writer.state.segments
    return (segment_path(writer.directory, segment.info) / "index" / "graph.npy").read_bytes()


@pytest.mark.parametrize(
    ("last", "kept"), [("graph", ["neighbors-0", "rows"]), ("encoding", ["graph", "neighbors-0", "rows"])]
)
def test_a_merge_resumes_after_a_kill_and_builds_the_same_segment(
    sealed: Path, tmp_path: Path, last: str, kept: list[str]
) -> None:
    twin = Path(shutil.copytree(sealed, tmp_path / "twin"))
    with open_writer(sealed) as writer:
        kill(writer, last)
    before = made(sealed)
    assert sorted(before) == [f"{name}.npy" for name in kept]
    with open_writer(sealed) as writer, open_writer(twin) as other:
        found = merged(writer, lambda: _same(before, made(sealed)))
        assert found == merged(other)
        assert contents(writer) == contents(other)
        assert not merging_path(sealed).exists()
        assert not merging_path(twin).exists()


def _same(before: Made, after: Made) -> None:
    assert before.items() <= after.items(), "finished files were rebuilt"


def test_writes_before_the_resumption_apply_to_the_merged_segment(sealed: Path) -> None:
    with open_writer(sealed) as writer:
        kill(writer, "encoding")
        writer.delete(["70", "71"])
        writer.upsert(documents(range(80, 82)))
        writer.flush()  # which seals beside, and removes nothing of the merge
        expected = contents(writer)
    before = made(sealed)
    with open_writer(sealed) as writer:
        while maintain(writer, writer.build_here):
            pass
        assert contents(writer) == expected
        assert writer.state.rows_of(["70", "71"]) == {}
        assert [segment.size for segment in writer.state.segments] == [2, MERGE_FAN_IN * ROWS - 20]
    assert before
    assert not merging_path(sealed).exists()


def test_incomplete_files_are_rebuilt(sealed: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(sealed, tmp_path / "twin"))
    with open_writer(sealed) as writer:
        kill(writer, "encoding")
    for name in ("neighbors-0.npy", "graph.npy"):
        path = merging_path(sealed) / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    (merging_path(sealed) / "rows.npy").write_bytes(b"")
    before = made(sealed)
    with open_writer(sealed) as writer, open_writer(twin) as other:
        found = merged(writer, lambda: _all_made_again(before, made(sealed)))
        assert found == merged(other)


def _all_made_again(before: Made, after: Made) -> None:
    assert set(after) == set(before)
    assert not any(after[name] == before[name] for name in before)


def test_a_different_merge_replaces_an_unfinished_one(sealed: Path) -> None:
    with open_writer(sealed) as writer:
        kill(writer, "graph")
        writer.upsert(documents(range(1000, 1010)))
        expected = contents(writer)
        writer.compact()
        assert len(writer.state.segments) == 1
        assert contents(writer) == expected
    assert not merging_path(sealed).exists()


def test_an_unreadable_job_is_ignored(sealed: Path) -> None:
    with open_writer(sealed) as writer:
        kill(writer, "graph")
        (merging_path(sealed) / "job.json").write_bytes(b"{")
    with open_writer(sealed) as writer:
        assert not merging_path(sealed).exists()
        assert merged(writer)
