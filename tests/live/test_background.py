"""Segments are built by a process beside the writer, which goes on writing."""

import random
from collections.abc import Callable
from pathlib import Path

from runtime.errors import Overloaded
from runtime.retrieval.live.build import Job, parts_of
from runtime.retrieval.live.maintenance import MERGED, MOST_DELETED, Process
from runtime.retrieval.live.writer import LiveWriter
from runtime.testing.waiting import until
from tests.live.small import contents, document, documents, new_writer, open_writer


def test_a_process_beside_the_writer_seals_and_merges(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a", seal_rows=8, background=True) as writer:
        built = _until(writer, lambda: len(writer.state.segments) > 0)
        assert built
        expected = contents(writer)
    with open_writer(tmp_path / "a") as writer:
        assert contents(writer) == expected


def test_segments_of_flushes_are_merged_too(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a", background=True) as writer:
        for number in range(4):
            writer.upsert(documents(range(8 * number, 8 * number + 8)))
            writer.flush()
        until(lambda: writer.statistics().merged == 1)
        assert len(writer.state.segments) == 1


def _until(writer: LiveWriter, there: Callable[[], bool]) -> bool:
    for number in range(200):
        try:
            writer.upsert(documents(range(8 * number, 8 * number + 8)))
        except Overloaded:
            with writer.building:  # held while a build runs
                pass
        if there():
            return True
    with writer.building:
        return there()


def test_segments_stay_few_however_often_updates_of_the_same_documents_are_flushed(tmp_path: Path) -> None:
    chance = random.Random(1)
    with new_writer(tmp_path / "a") as writer:
        for _ in range(60):
            writer.upsert([document(str(number), number) for number in chance.sample(range(40), 6)])
            writer.flush()
            writer.maintain(writer.build_here)  # as often as is sealed, and no oftener
            assert len(writer.state.segments) <= 2 * MERGED
        while writer.maintain(writer.build_here):
            pass
        assert sum(segment.size for segment in writer.state.segments) <= writer.state.count / (1 - MOST_DELETED)


def test_how_far_a_merge_is_goes_from_its_rows_over_its_graph_to_what_is_written(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    with new_writer(tmp_path / "a") as writer:
        for number in range(2):
            writer.upsert(documents(range(8 * number, 8 * number + 8)))
            writer.flush()
        writer.compact(lambda stage, part: told.append((stage, part)))
    parts = [parts_of(stage, part) for stage, part in told]
    assert parts == sorted(parts)
    assert parts[0] == (0, 0, 0)
    assert {(0.5, 0, 0), (1, 1, 0.5)} <= set(parts)
    assert parts[-1] == (1, 1, 1)


def test_the_process_beside_the_writer_tells_how_far_it_is(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(8)))
        writer.flush()
        writer.upsert(documents(range(8, 16)))
        writer.flush()
        numbers = [segment.facts.number for segment in writer.state.segments]
        process = Process(tmp_path / "a", Job(99, writer.state.sequence, 16, numbers))
        assert process.progress == (0, 0, 0)
        assert process.wait() is not None
        assert process.progress == (1, 1, 1)
