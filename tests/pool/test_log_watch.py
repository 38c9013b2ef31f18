"""Writes to a log are reported to its readers, without polling."""

import select
from pathlib import Path

import numpy as np

from runtime.pool.collections.log_watch import LogWatch
from runtime.retrieval.collections import bulk_load
from tests.collections.bulk_loads import flatten
from tests.collections.small_collections import DIM, documents, new_writer, open_writer


def readable(watch: LogWatch) -> bool:
    fd = watch.fileno()
    assert fd is not None
    return bool(select.select([fd], [], [], 0)[0])


def test_a_write_is_reported_once_also_after_the_log_was_sealed(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer, new_writer(tmp_path / "b") as other:
        watch = LogWatch()
        watch.add(tmp_path / "a")
        watch.add(tmp_path / "b")
        assert not readable(watch)
        assert not watch.poll()
        for number, one in enumerate((writer, other, writer)):
            one.upsert(documents(range(number, number + 2)))
            assert readable(watch)
            assert watch.poll()
            assert not readable(watch)
            assert not watch.poll()
            one.flush()
            watch.poll()
        watch.close()
        watch.close()


def test_the_log_that_a_first_write_begins_is_watched(tmp_path: Path) -> None:
    bulk_load.build(np.eye(DIM, dtype=np.float32), tmp_path / "old", degree=4)
    watch = LogWatch()
    watch.add(flatten(tmp_path / "old"))
    with open_writer(tmp_path / "old") as writer:
        assert watch.poll(), "it has a manifest"
        assert not watch.poll()
        writer.upsert(documents(range(2)))
        assert watch.poll()
    watch.close()


def test_nothing_is_reported_of_a_directory_without_a_log(tmp_path: Path) -> None:
    watch = LogWatch()
    watch.add(tmp_path / "missing")
    assert not watch.poll()
    watch.close()
    assert watch.fileno() is None
    watch.add(tmp_path)
    assert not watch.poll()
