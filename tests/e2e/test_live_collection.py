"""A live collection in a node: written to and searched over HTTP while its writer and its pool are killed."""

from pathlib import Path

from benchmarks.live_node import kill


def test_no_acknowledged_write_is_lost_and_no_deleted_document_returns_over_kills(tmp_path: Path) -> None:
    told = kill(tmp_path, kills=3)
    assert told.wrong == []
    assert (told.kills, told.acknowledged >= 120) == (3, True)
