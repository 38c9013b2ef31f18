"""State machine: a collection equals a dictionary with brute-force search under random operations."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runtime.retrieval.attributes.filters import Filter, parse_filter
from runtime.retrieval.collections.description import SegmentInfo
from runtime.retrieval.collections.maintenance import pick_merge
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.search import search
from runtime.retrieval.collections.segment_build import BuildJob
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from tests.collections.small_collections import DIM, contents, document, maintain, new_writer, open_writer, vector_of

_NAMES = some.sampled_from([str(number) for number in range(30)])
_COLOURS = some.sampled_from(["red", "green"])


class Model(RuleBasedStateMachine):
    directories: Callable[[], Path]

    @initialize(shards=some.sampled_from([1, 2]))
    def begin(self, shards: int) -> None:
        self.directory = type(self).directories() / "collection"
        self.writer: CollectionWriter = new_writer(self.directory, seal_rows=8, shards=shards)
        self.reader = CollectionReader(self.directory)
        self.expected: dict[str, UpsertDocument] = {}
        self.seeds = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.reader.close()
            self.writer.close()

    @rule(names=some.lists(_NAMES, unique=True, min_size=1, max_size=6), colour=_COLOURS, size=some.integers(0, 3))
    def upsert(self, names: list[str], colour: str, size: int) -> None:
        given = [document(name, next(self.seeds), colour=colour, size=size) for name in names]
        assert self.writer.upsert(given) == len(names)
        self.expected |= {one.id: one for one in given}

    @rule(names=some.lists(_NAMES, max_size=6))
    def delete(self, names: list[str]) -> None:
        assert self.writer.delete(names) == len(set(names) & set(self.expected))
        for name in names:
            self.expected.pop(name, None)

    @rule(colour=_COLOURS, size=some.integers(0, 3))
    def delete_by_filter(self, colour: str, size: int) -> None:
        if not {"colour", "size"} <= set(self.writer.state.schema):
            return
        gone = [n for n, one in self.expected.items() if one.attributes == {"colour": colour, "size": size}]
        assert self.writer.delete_where(_filter(colour, size)) == len(gone)
        for name in gone:
            del self.expected[name]

    @rule()
    def flush(self) -> None:
        self.writer.flush()

    @rule()
    def compact(self) -> None:
        self.writer.compact()

    @rule()
    def maintain(self) -> None:
        while maintain(self.writer, self.writer.maintenance.build_here):
            pass
        assert not pick_merge(self.writer.state.segments, 8)

    @rule(names=some.lists(_NAMES, unique=True, min_size=1, max_size=6), colour=_COLOURS, size=some.integers(0, 3))
    def seal_while_segments_are_merged(self, names: list[str], colour: str, size: int) -> None:
        def build(directory: Path, job: BuildJob) -> SegmentInfo | None:
            self.delete(names[1:])
            self.upsert(names, colour, size)
            self.writer.flush()
            info = self.writer.maintenance.build_here(directory, job)
            self.delete(names[:1])
            self.writer.flush()
            return info

        self.writer.maintenance.merge_if_due(build)

    @rule()
    def reopen_the_writer(self) -> None:
        self.writer.close()
        self.writer = open_writer(self.directory, seal_rows=8)
        assert self.writer.repaired == ""

    @rule()
    def reopen_the_reader(self) -> None:
        self.reader.close()
        self.reader = CollectionReader(self.directory)

    @rule()
    def poll(self) -> None:
        self.reader.poll()
        assert self.reader.poll() is False

    @rule(seed=some.integers(0, 99), k=some.integers(1, 40), colour=_COLOURS | some.none(), size=some.integers(0, 3))
    def search(self, seed: int, k: int, colour: str | None, size: int) -> None:
        self.reader.poll()
        wanted = None if colour is None else _filter(colour, size)
        if wanted is not None and not {"colour", "size"} <= set(self.writer.state.schema):
            return
        passing = [
            one
            for one in self.expected.values()
            if colour is None or one.attributes == {"colour": colour, "size": size}
        ]
        query = vector_of(seed)
        distances = {one.id: float(np.square(np.asarray(one.vector) - query).sum()) for one in passing}
        nearest = sorted(distances, key=lambda name: distances[name])[:k]
        for side in (self.writer, self.reader):
            rows, found = search(side.state, query[None], k, top_m=512, filter=wanted)
            got = [one for one in side.state.documents(rows[0][rows[0] >= 0].tolist())]
            assert [one.id for one in got if one] == nearest
            assert np.allclose(found[0, : len(nearest)], [distances[name] for name in nearest], rtol=1e-4)
            assert (rows[0, len(nearest) :] == -1).all()

    @invariant()
    def a_sealed_row_is_of_its_segments_shard(self) -> None:
        for segment in self.writer.state.segments if hasattr(self, "writer") else ():
            assert {
                self.writer.state.description.shard_of(one.id) for one in segment.find(segment.rows.tolist()).values()
            } == {segment.info.shard}

    @invariant()
    def both_hold_what_the_dictionary_holds(self) -> None:
        if hasattr(self, "expected"):
            assert contents(self.writer) == {name: one.text for name, one in self.expected.items()}


def _filter(colour: str, size: int) -> Filter:
    parts: list[Any] = [
        {"type": "eq", "key": "colour", "value": colour},
        {"type": "in", "key": "size", "value": [size]},
    ]
    return parse_filter({"type": "and", "filters": parts})


def test_a_live_collection_equals_a_dictionary_with_brute_force_search(tmp_path_factory: Any) -> None:
    class Bound(Model):
        directories = staticmethod(lambda: tmp_path_factory.mktemp("live"))

    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Bound, settings=settings(max_examples=25, stateful_step_count=30))
    assert vector_of(0).shape[0] == DIM
