"""A build whose process was killed begins again, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from runtime.errors import CollectionError
from runtime.retrieval.collections.description import SegmentInfo
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.maintenance import MERGE_FAN_IN
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment_build import BuildJob, build
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
    ended = subprocess.run([sys.executable, "-m", "runtime.retrieval.collections.maintenance", str(sealed), job, "1"])
    assert ended.returncode == 1
    assert sorted(sealed.rglob("*")) == there


def _build_until(directory: Path, job: BuildJob, last: str) -> None:
    """Run a build that is killed when the stage `last` begins."""

    def progress(stage: str, part: float) -> None:
        if stage == last:
            os.kill(os.getpid(), signal.SIGKILL)

    build(Disk(), CollectionReader(directory).state, job, progress)


@pytest.mark.parametrize("last", ["rows", "graph", "write"])
def test_a_merge_that_was_killed_is_done_by_the_next_writer(sealed: Path, last: str) -> None:
    def killed(directory: Path, job: BuildJob) -> SegmentInfo | None:
        process = FORKSERVER.Process(target=_build_until, args=(directory, job, last))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        raise CollectionError("it was killed")

    with open_writer(sealed) as writer:
        with pytest.raises(CollectionError, match="it was killed"):
            maintain(writer, killed)
        writer.delete(["70", "71"])
        writer.upsert(documents(range(80, 82)))
        expected = contents(writer)
    with open_writer(sealed) as writer:
        while maintain(writer, writer.maintenance.build_here):
            pass
        assert contents(writer) == expected
        assert [segment.size for segment in writer.state.segments] == [MERGE_FAN_IN * ROWS - 24]
        installed = {str(segment.info.number) for segment in writer.state.segments}
    assert {path.name for path in (sealed / "segments").iterdir()} == installed
