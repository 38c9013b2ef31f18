"""A write is acknowledged when every process that serves the collection has applied it; an upsert waits briefly."""

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import NoRoom, Unavailable
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.collections.reader_barrier import VISIBLE_S, WAIT_S, ReaderBarrier, ReaderPosition
from tests.collections.small_collections import contents, documents, new_writer

_SERVES = """
import sys
from pathlib import Path
from runtime.retrieval.collections.reader_barrier import ReaderPosition
applied = ReaderPosition(Path(sys.argv[1]))
applied.publish(3)
print("serves", flush=True)
sys.stdin.read()
"""


class Time:
    """A clock that `sleep` advances; `sleep` also runs a test's callback."""

    def __init__(self) -> None:
        self.now_s, self.slept = 0.0, 0
        self.meanwhile: Callable[[], object] = lambda: None

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s, self.slept = self.now_s + seconds, self.slept + 1
        self.meanwhile()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def serving(tmp_path: Path, time: Time) -> ReaderBarrier:
    return ReaderBarrier(tmp_path, clock=time.clock, sleep=time.sleep)


def test_without_serving_processes_a_delete_does_not_wait(serving: ReaderBarrier, time: Time) -> None:
    serving.wait(7)
    assert time.slept == 0


def test_a_delete_waits_for_the_slowest_serving_process(tmp_path: Path, serving: ReaderBarrier, time: Time) -> None:
    first, second = ReaderPosition(tmp_path), ReaderPosition(tmp_path)
    first.publish(7)
    told = iter([6, 7])
    time.meanwhile = lambda: second.publish(next(told))
    serving.wait(7)
    assert time.slept == 2
    first.close()
    second.close()
    assert list((tmp_path / "served").iterdir()) == []


def test_a_process_that_ends_is_not_waited_for(tmp_path: Path, serving: ReaderBarrier, time: Time) -> None:
    one = ReaderPosition(tmp_path)
    time.meanwhile = one.close
    serving.wait(1)
    assert time.slept == 1


def test_a_killed_process_is_not_waited_for_and_its_file_is_removed(
    tmp_path: Path, serving: ReaderBarrier, time: Time
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVES, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serves\n"
        serving.wait(3)
        assert len(list((tmp_path / "served").iterdir())) == 1
        process.kill()
        process.wait(60)
    serving.wait(4)
    assert time.slept == 0
    assert list((tmp_path / "served").iterdir()) == []


def test_a_process_that_does_not_apply_deletes_is_named_after_a_timeout(
    tmp_path: Path, serving: ReaderBarrier, time: Time
) -> None:
    one = ReaderPosition(tmp_path)
    with pytest.raises(Unavailable, match=r"stored, but process \d+ that serves .* has not applied it within 10 s"):
        serving.wait(1)
    assert time.now_s == pytest.approx(WAIT_S, abs=0.1)
    one.close()


def test_an_upsert_waits_only_briefly_and_once_for_a_process_that_does_not_apply_it(
    tmp_path: Path, serving: ReaderBarrier, time: Time
) -> None:
    stalled, other = ReaderPosition(tmp_path), ReaderPosition(tmp_path)
    other.publish(9)
    assert not serving.wait_briefly(1)
    assert time.now_s == pytest.approx(VISIBLE_S, abs=0.01)
    slept = time.slept
    assert not serving.wait_briefly(2)
    assert time.slept == slept  # it has not moved
    time.meanwhile = lambda: other.publish(10)
    assert not serving.wait_briefly(10)
    assert time.slept == slept + 1  # for the other one
    stalled.publish(10)  # it moves again
    assert serving.wait_briefly(10)
    stalled.publish(11)
    time.meanwhile = lambda: other.publish(11)
    assert serving.wait_briefly(11)
    stalled.close()
    other.close()


def test_on_a_full_disk_a_process_registers_and_says_later_what_it_has_applied(
    tmp_path: Path, serving: ReaderBarrier
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        one = ReaderPosition(tmp_path)
        with pytest.raises(NoRoom, match=r"served/\d+-\w+ cannot be written"):
            one.publish(7)
        assert not serving.wait_briefly(7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one.publish(7)
    assert serving.wait_briefly(7)
    one.close()


def test_a_process_that_cannot_register_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(NoRoom):
        ReaderPosition(tmp_path)
    assert list((tmp_path / "served").iterdir()) == []


def test_foreign_files_are_ignored(tmp_path: Path, serving: ReaderBarrier, time: Time) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "1-a").write_bytes(b"")
    (folder / "2-b").mkdir()
    (folder / "3-c").symlink_to("/dev/zero")
    serving.wait(1)
    assert time.slept == 0


def test_upserts_wait_only_on_request_and_deletes_always(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        served = ReaderPosition(tmp_path / "a")
        writer.upsert(documents(range(3), tenant="acme"))
        served.publish(3)  # two records more than there are: deletes come back
        assert writer.delete(["1"]) == 1
        assert writer.delete_where(parse_filter({"type": "eq", "key": "tenant", "value": "acme"})) == 2
        writer.upsert(documents(range(5, 6)))
        assert not writer.wait_visible()
        served.publish(4)
        assert writer.wait_visible()
        assert list(contents(writer)) == ["5"]
        served.close()
