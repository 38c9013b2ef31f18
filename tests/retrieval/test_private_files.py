"""Collections are private to their owner from their first byte on, and `trinity doctor` reports those that are not."""

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.checks.permissions import findings, is_readable_by_others
from runtime.node.config import parse_config
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter

VECTORS = np.random.default_rng(5).standard_normal((80, 4), np.float32)


def open_to_others(directory: Path) -> list[Path]:
    """Return the files and directories that anybody but the owner may use."""
    return [path for path in (directory, *directory.rglob("*")) if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_a_live_collection_is_private_while_it_is_written_and_merged(tmp_path: Path) -> None:
    directory = tmp_path / "notes"
    bulk_load.create(directory, 4)
    assert open_to_others(directory) == []
    with CollectionWriter(directory, background=False) as writer:
        for begin in (0, 40):
            rows = range(begin, begin + 40)
            writer.upsert([UpsertDocument(f"d{row}", "text", vector=VECTORS[row]) for row in rows])
            writer.flush()
        writer.delete(["d3"])
        assert open_to_others(directory) == []
        writer.compact()
        assert open_to_others(directory) == []


def test_a_build_is_private_and_a_rebuild_keeps_the_permissions_that_its_owner_gave(tmp_path: Path) -> None:
    directory = tmp_path / "docs"
    bulk_load.build(VECTORS, directory, degree=8)
    assert open_to_others(directory) == []
    for path in directory.rglob("*"):
        path.chmod(0o750 if path.is_dir() else 0o640)
    directory.chmod(0o750)
    bulk_load.build(VECTORS, directory, degree=8, force=True)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.rglob("*")) if path.is_dir()}
    assert modes == {0o750}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()} == {0o640}


@pytest.fixture
def reachable(tmp_path: Path) -> Iterator[Path]:
    """A directory that others can reach, as pytest's are private."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, *tmp_path.parents)}
    private = {path: mode for path, mode in modes.items() if not mode & 0o001}
    for path, mode in private.items():
        path.chmod(mode | 0o001)
    yield tmp_path
    for path, mode in private.items():
        path.chmod(mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_doctor_reports_keys_and_collections_that_others_can_read(reachable: Path, mode: int) -> None:
    keys, directory = reachable / "keys", reachable / "docs"
    keys.write_text("secret\n")
    keys.chmod(mode)
    directory.mkdir()
    directory.chmod(mode | (mode & 0o444) >> 2)
    config = parse_config(
        {"http": {"api_keys_file": str(keys)}, "collections": [{"name": "docs", "path": str(directory)}]}
    )
    found = {finding.subject: finding for finding in findings(config)}
    for subject, path in (("keys", keys), ("files of docs", directory)):
        assert (found[subject].level == "warning") == (mode == 0o644)
        assert str(path) in found[subject].text
    assert "secret" not in str(found)
    reachable.chmod(0o700)
    assert not is_readable_by_others(keys)  # nobody else reaches it
