"""After a power cut every acknowledged write is present and every deleted document is absent."""

import os
import random
from pathlib import Path

import pytest

from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.writer import CollectionWriter
from tests.collections.lossy_disk import LossyDisk
from tests.collections.small_collections import DIM, contents, document, maintain, open_writer


def _do_something(writer: CollectionWriter, chance: random.Random, expected: dict[str, str], step: int) -> None:
    names = [str(number) for number in chance.sample(range(25), chance.randint(1, 5))]
    match chance.choice(["upsert", "upsert", "upsert", "delete", "maintain", "flush", "compact"]):
        case "upsert":
            given = [document(name, 1000 * step + int(name)) for name in names]
            writer.upsert(given)
            expected |= {one.id: one.text for one in given}
        case "delete":
            writer.delete(names)
            for name in names:
                expected.pop(name, None)
        case "maintain":
            maintain(writer, writer.maintenance.build_here)
        case "flush":
            writer.flush()
        case "compact":
            writer.compact()


@pytest.mark.parametrize("seed", range(6))
def test_acknowledged_writes_survive_a_power_cut_within_any_operation(tmp_path: Path, seed: int) -> None:
    class Cut(Exception):
        pass

    class Failing(LossyDisk):
        left = 10**9

        def sync(self, fd: int) -> None:
            self._tick()
            super().sync(fd)

        def sync_directory(self, directory: Path) -> None:
            self._tick()
            super().sync_directory(directory)

        def _tick(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise Cut

    chance = random.Random(100 + seed)
    root = tmp_path / "collection"
    disk = Failing(root)
    create(root, DIM, metric="l2", degree=8, disk=disk)
    expected: dict[str, str] = {}
    for life in range(10):
        writer = open_writer(root, seal_rows=6, disk=disk)
        disk.left = chance.randint(0, 40)
        acknowledged, attempted = dict(expected), dict(expected)
        try:
            for step in range(60):
                attempted = dict(acknowledged)
                _do_something(_Recorded(writer, attempted), chance, acknowledged, 1000 * life + step)  # type: ignore[arg-type]
        except Cut:
            pass
        disk.left = 10**9
        writer.commits.close()
        writer.state.close()
        after = tmp_path / f"after-{life}"
        disk.write_after_power_cut(after, chance)
        with open_writer(after) as found:
            held = contents(found)
        assert CollectionReader.verify(after) == ""
        assert held in (acknowledged, attempted), "the contents match the state neither with nor without the last write"
        os.close(writer.lock_fd)
        disk.close()
        root = after
        disk = Failing(root)
        for path in [root, *root.rglob("*")]:
            if path.is_dir():
                LossyDisk.sync_directory(disk, path)
            else:
                with path.open("rb") as file:
                    LossyDisk.sync(disk, file.fileno())
        expected = held
    disk.close()


class _Recorded:
    """A writer that records each write before making it: an interrupted write may be present or not."""

    def __init__(self, writer: CollectionWriter, attempted: dict[str, str]) -> None:
        self._writer, self._attempted = writer, attempted
        self.flush, self.compact = writer.flush, writer.compact
        self.maintenance = writer.maintenance

    def upsert(self, given: list) -> None:  # type: ignore[type-arg]
        self._attempted |= {one.id: one.text for one in given}
        self._writer.upsert(given)

    def delete(self, names: list[str]) -> None:
        for name in names:
            self._attempted.pop(name, None)
        self._writer.delete(names)
