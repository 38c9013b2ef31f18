"""Live collections in a pool: what their writers have written is found by queries that come from then on.

Of each, sealed segments and the growing rows are indexes of the engine: segments with their graphs, the growing rows
without one, compared one by one. The collection's scope names them, with bitmaps of the rows that are not deleted.
Between two extends a collection is brought up to date: bits of deleted rows are cleared where they are, rows that came
are given theirs; when segments were sealed or merged, which a thread has opened by then, there is another list of
parts, and what no query searches any more leaves the engine.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from gpu import Engine, GpuError, GraphIndex
from gpu.index.data import IndexData, bitmap
from runtime.errors import CollectionError
from runtime.pool.collections.scopes import LIVE, Filtered, InUse, Part, Parts, Scopes, part_of
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.live.growing_segment import GrowingSegment
from runtime.retrieval.live.reader import LiveReader
from runtime.retrieval.live.storage.delete_barrier import ReaderPosition
from runtime.retrieval.live.storage.manifest import Description, SegmentInfo
from runtime.retrieval.live.storage.segment import Segment

POLL_NS = 20_000_000
"""How often it is looked whether something was written: as late it can be found, and as long a delete takes."""
PART_NS = 1_000_000
"""The same while a new segment is copied to a device: a megabyte each time."""
_NEVER_NS = 1 << 62
_SEEDS = 128  # as many as searches of a large index begin at

Forget = Callable[[Iterable[int]], None]


def index_of(growing: GrowingSegment) -> GraphIndex:
    """The growing rows as an index without edges, with room for those to come."""
    rows = growing.rows
    room = len(rows.codes)
    ids = np.arange(growing.first, growing.first + room, dtype=np.int64)
    return GraphIndex(IndexData(rows, np.zeros((room, 0), np.uint32), np.zeros(0, np.uint32), ids))


def like_segments(about: Description) -> GraphIndex:
    """An index of the kind that a collection's segments are: what engines with fixed sizes have to have room for."""
    vectors = np.random.default_rng(0).standard_normal((_SEEDS, about.dim)).astype(np.float32)
    return GraphIndex.build(vectors, metric=about.metric, degree=about.degree, dtype=about.dtype)  # type: ignore[arg-type]


class _Own:
    """An index of a live collection in the engine, and the bits of its rows that are there."""

    def __init__(self, key: str, number: int, rows: int, source: object) -> None:
        self.key, self.number, self.source = key, number, source
        self.bits: npt.NDArray[np.uint64] = bitmap(np.zeros(rows, bool), rows)
        self.there = np.zeros(rows, bool)
        self.count = 0
        self.deletions = -1

    def tell(self, alive: Bits) -> None:
        """The first rows of the index are those that are there."""
        self.there[: len(alive)] = alive
        self.bits[:] = bitmap(self.there, len(self.there))
        self.count = int(np.count_nonzero(alive))

    def part(self) -> Part:
        return Part(self.number, None if self.count == len(self.there) else self.bits, self.count)


class LiveIndexes:
    """One live collection in the engine, under names that begin with `key`. One thread.

    Raises `GpuError` for what the engine has no room for.
    """

    def __init__(self, key: str, reader: LiveReader, demanded: str, engine: Engine, scopes: Scopes) -> None:
        self._key, self.reader, self._engine, self._scopes = key, reader, engine, scopes
        self._number_of = engine.backend().number
        self._segments: dict[int, _Own] = {}
        self._fresh: dict[SegmentInfo, _Own | None] = {}  # of segments to come; None: the engine has a part of it
        self._refused: GpuError | None = None
        reader.segments_ready = self._take_in
        self._growing: _Own | None = None
        self._grown = 0
        self._leaving: dict[str, int] = {}
        self._stale = False
        self._applied: ReaderPosition | None = None
        parts = self._parts()
        self._scope = scopes.reserve(parts)
        self._current = parts
        self.number = LIVE + self._scope
        """The desk's number of the collection."""
        self.served_as = -2 - self.number if demanded else self.number
        scopes.serve(self.served_as, Filtered(lambda: self.schema, self._parts_passing, demanded))

    @property
    def schema(self) -> Schema:
        return self.reader.state.schema

    def step(self, in_use: Callable[[], InUse], forget: Forget) -> None:
        """Take in what was written. Raises `CollectionError`, `GpuError`; what was served goes on being served."""
        if self._applied is None:  # before the log is read: a writer that sees nobody waits for nobody
            self._applied = ReaderPosition(self.reader.directory)
        stale, self._stale = self._stale, True  # also where something was taken in before an error
        self._stale = self.reader.poll() or stale
        if self._stale:  # also what the engine had no room for the last time
            parts = self._parts()
            if [part.number for part in parts.parts] == [part.number for part in self._current.parts]:
                self._current.array[:] = parts.array  # in place: queries that wait have its address
                self._current.parts = parts.parts
            else:
                self._scopes.replace(self._scope, parts)
                self._current = parts
            forget(self._scopes.changed(self.served_as))
            self._stale = False
        self._applied.publish(self.reader.state.sequence)
        if self._leaving:
            self._unload(self._scopes.indexes(in_use()))
        if self._refused is not None:
            raise self._refused

    @property
    def loading(self) -> bool:
        """Whether the engine has a part of a new segment."""
        return None in self._fresh.values()

    def _take_in(self, segments: Sequence[Segment]) -> bool:
        """Have the engine load new segments, a part at a time. Whether it has them all."""
        self._refused = None
        for info in set(self._fresh) - {segment.info for segment in segments}:  # merged away before they were there
            del self._fresh[info]
            self._engine.unload(self._name(info))
        for segment in segments:
            name = self._name(segment.info)
            if self._fresh.get(segment.info) is None:
                try:
                    whole = self._engine.load_part(name, segment.index)
                except GpuError as error:
                    self._refused = error
                    return False
                self._fresh[segment.info] = self._own(name, segment.index, segment) if whole else None
                if not whole:
                    return False
        return True

    def _name(self, info: SegmentInfo) -> str:
        return f"{self._key}/{info.number}"

    @property
    def indexes(self) -> dict[str, GraphIndex]:
        """Its segments' indexes, by the engine's names."""
        segments = self._segments.values()
        return {own.key: own.source.index for own in segments if isinstance(own.source, Segment)}

    def close(self, forget: Forget) -> None:
        """The collection is served no more, and no session offers it."""
        self.leave()
        forget(self._scopes.withdraw(self.served_as))
        self._scopes.release(self._scope)
        for own in (*self._segments.values(), *([self._growing] if self._growing else [])):
            self._leaving[own.key] = own.number
        for info in self._fresh:
            self._engine.unload(self._name(info))
        self._segments, self._growing, self._fresh = {}, None, {}
        self.reader.close()

    def leave(self) -> None:
        """No writer waits for this process any more."""
        if self._applied is not None:
            self._applied.close()

    def gone(self, in_use: InUse) -> bool:
        """After `close`: whether all of its indexes have left the engine."""
        self._unload(self._scopes.indexes(in_use))
        return not self._leaving

    def _unload(self, searched: set[int]) -> None:
        for key, number in tuple(self._leaving.items()):
            if number not in searched and self._engine.unload(key):
                del self._leaving[key]

    # ---- parts

    def _parts(self) -> Parts:
        """Every index that has rows which are there; the growing one if none has."""
        state = self.reader.state
        for segment in state.segments:
            number = segment.info.number
            if number not in self._segments:
                self._segments[number] = self._fresh.pop(segment.info, None) or self._load(
                    self._name(segment.info), segment.index, segment
                )
        there = [segment.info.number for segment in state.segments]
        for number in set(self._segments) - set(there):
            own = self._segments.pop(number)
            self._leaving[own.key] = own.number
        self._segments = {number: self._segments[number] for number in there}
        for segment in state.segments:
            own = self._segments[segment.info.number]
            if own.deletions != segment.deletions:
                own.deletions = segment.deletions
                own.tell(segment.alive)
        self._own_growing(state.growing).tell(state.growing.alive)
        found = [own.part() for own in self._all() if own.count]
        return Parts(found or [self._all()[-1].part()])

    def _own_growing(self, growing: GrowingSegment) -> _Own:
        codes = growing.rows.codes
        own = self._growing
        if own is None or own.source is not codes:
            if own is not None:
                self._leaving[own.key] = own.number
            self._grown += 1
            own = self._growing = self._load(f"{self._key}/growing-{self._grown}", index_of(growing), codes)
        return own

    def _load(self, key: str, index: GraphIndex, source: object) -> _Own:
        self._engine.load(key, index)
        return self._own(key, index, source)

    def _own(self, key: str, index: GraphIndex, source: object) -> _Own:
        return _Own(key, self._number_of(key), index.size, source)

    def _all(self) -> list[_Own]:
        assert self._growing is not None
        return [*self._segments.values(), self._growing]

    def _parts_passing(self, wanted: Filter) -> Sequence[Part]:
        state = self.reader.state
        found = [
            part_of(self._segments[segment.info.number].number, segment.alive & segment.passing(wanted))
            for segment in state.segments
        ]
        own = self._own_growing(state.growing)
        passing = np.zeros(len(own.there), bool)
        passing[: state.growing.count] = state.growing.alive & state.growing.passing(wanted)
        found = [part for part in (*found, part_of(own.number, passing)) if part.passing]
        return found or [part_of(own.number, np.zeros(len(own.there), bool))]


class LiveCollections:
    """All live collections of a pool, by the engine's name of each."""

    def __init__(self, engine: Engine, scopes: Scopes, log: logging.Logger) -> None:
        self._engine, self._scopes, self._log = engine, scopes, log
        self._served: dict[str, LiveIndexes] = {}
        self._leaving: dict[str, LiveIndexes] = {}
        self._troubles: dict[str, str] = {}
        self._due_ns = 0

    @property
    def due_ns(self) -> int:
        """When `step` has something to do, at the latest."""
        return self._due_ns if self._served else _NEVER_NS

    def begin(self, key: str, reader: LiveReader, demanded: str) -> None:
        """Serve one. Raises `GpuError`."""
        self._served[key] = LiveIndexes(key, reader, demanded, self._engine, self._scopes)
        self._due_ns = 0  # before a query comes

    def end(self, key: str, in_use: InUse, forget: Forget) -> bool:
        """No session offers it any more. Whether it has left the engine: ask again until it has."""
        if key in self._served:
            self._leaving[key] = self._served.pop(key)
            self._leaving[key].close(forget)
        if self._leaving[key].gone(in_use):
            del self._leaving[key]
            return True
        return False

    def number_of(self, key: str) -> int | None:
        """The desk's number of one that is served."""
        found = self._served.get(key)
        return None if found is None else found.number

    @property
    def indexes(self) -> dict[str, GraphIndex]:
        """The segments' indexes, by the engine's names."""
        return {key: index for one in self._served.values() for key, index in one.indexes.items()}

    def schema(self, key: str) -> Schema:
        """What filters may name by now, of one that is served."""
        return self._served[key].schema

    def step(self, now_ns: int, in_use: Callable[[], InUse], forget: Forget) -> None:
        """Bring them up to date, as often as is due."""
        if now_ns < self._due_ns or not self._served:
            return
        for key, one in self._served.items():
            try:
                one.step(in_use, forget)
                trouble = ""
            except (CollectionError, GpuError) as error:
                trouble = str(error)
            if trouble != self._troubles.get(key, ""):
                self._log.error("collection %s: what was written last is not served: %s", key, trouble or "it is now")
            self._troubles[key] = trouble
        loading = any(one.loading for one in self._served.values())
        self._due_ns = now_ns + (PART_NS if loading else POLL_NS)

    def close(self) -> None:
        """The process ends."""
        for one in self._served.values():
            one.leave()
