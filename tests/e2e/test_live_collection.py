"""A live collection in a node: written to, searched, sealed and merged while its processes are killed."""

from pathlib import Path

from benchmarks.live_kills import KILLS, kill


def test_no_acknowledged_write_is_lost_and_no_deleted_document_returns_over_kills(tmp_path: Path) -> None:
    told = kill(tmp_path, kills=4)
    assert told.wrong == []
    assert list(told.kills) == list(KILLS[:4])  # the writer in a seal, the supervisor in a merge, the pool, the merge
    assert told.acknowledged >= 120
