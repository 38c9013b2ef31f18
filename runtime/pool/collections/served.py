"""Collections in a pool: new queries find what the collections' writers have written.

Sealed segments and the growing segment of a collection are separate indexes of the engine: sealed ones with their
graphs, the growing one without edges, searched exhaustively. The collection's scope lists them as parts, with bitmaps
of the rows that are not deleted. A collection is updated between two extends: the scope gets a new list of parts, with
new bitmaps where rows changed. A query finishes on the parts that it began with, so it finds a replaced document once,
in its old version or the new one. Indexes that no query searches any more are unloaded from the engine.

Updates follow the writers at once (`LogWatch`), but take at most a tenth of the pool's time. A large write is applied
in parts, between which queries go on, and becomes visible as a whole. A collection that was never written to has no
growing segment, and its directory is only watched.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from gpu import Engine, GpuError, GraphIndex
from gpu.index.data import IndexData
from runtime.errors import CollectionError
from runtime.pool.collections.log_watch import LogWatch
from runtime.pool.collections.scopes import (
    FilterableCollection,
    Finish,
    InUse,
    Part,
    Parts,
    Scopes,
)
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.description import Description, SegmentInfo
from runtime.retrieval.collections.growing_segment import GrowingSegment
from runtime.retrieval.collections.part import RowSet
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.reader_barrier import ReaderPosition
from runtime.retrieval.collections.segment import Segment

POLL_NS = 20_000_000
"""Interval of polling for writes that were not notified, and longest interval of updates."""
IDLE_POLL_NS = 500_000_000
"""The same, while no collection was written to and the kernel notifies."""
_REST = 9  # times the duration of an update that passes before the next one
_APPLY_NS = 2_000_000  # of a large write at once: the queries go on for as long before the next part
PART_NS = 1_000_000
"""The interval while a new segment is copied to a device, a megabyte each time."""
_NEVER_NS = 1 << 62
_SEEDS = 128  # as many as a search of a large index starts from

Invalidate = Callable[[int, Iterable[int]], None]
"""Drops clients' cached numbers of the scopes of a collection, which has changed."""


def growing_index(growing: GrowingSegment) -> GraphIndex:
    """Return the growing segment as an index without edges, with its room for new rows."""
    rows = growing.all_vectors
    room = len(rows.codes)
    ids = np.arange(growing.first, growing.first + room, dtype=np.int64)
    return GraphIndex(IndexData(rows, np.zeros((room, 0), np.uint32), np.zeros(0, np.uint32), ids))


def sample_index(description: Description) -> GraphIndex:
    """Return a small index with a collection's parameters, from which an engine derives the sizes of its buffers."""
    vectors = np.random.default_rng(0).standard_normal((_SEEDS, description.dim)).astype(np.float32)
    metric, degree, dtype = description.metric, description.degree, description.dtype
    return GraphIndex.build(vectors, metric=metric, degree=degree, dtype=dtype, neighbor_codes=False)  # type: ignore[arg-type]


class _LoadedIndex:
    """A segment's index in the engine."""

    def __init__(self, key: str, number: int, rows: int, source: object) -> None:
        self.key, self.number, self.rows, self.source = key, number, rows, source

    def part(self, found: RowSet) -> Part:
        """Return those of the index's first rows that may be found as a part of a scope."""
        bits = found.bits
        if found.size < self.rows:
            bits = np.zeros(-(-self.rows // 64), np.uint64)
            bits[: len(found.bits)] = found.bits
        return Part(self.number, None if found.count == self.rows else bits, found.count)


class ServedCollection:
    """The indexes of one collection in the engine, under names that begin with `key`. One thread.

    Raises `GpuError` if the engine has no room.
    """

    def __init__(
        self,
        key: str,
        reader: CollectionReader,
        demanded: str,
        engine: Engine,
        scopes: Scopes,
        loaded: Collection[str] = (),
    ) -> None:
        """loaded: indexes that the engine was opened with."""
        self._preloaded = loaded
        self._key, self.reader, self._engine, self._scopes = key, reader, engine, scopes
        self._number_of = engine.backend().number
        self._segments: dict[int, _LoadedIndex] = {}
        self._loading: dict[SegmentInfo, _LoadedIndex | None] = {}  # new segments; None: partly loaded
        self._load_error: GpuError | None = None
        reader.segments_ready = self._load_segments
        self._growing: _LoadedIndex | None = None
        self._growing_loads = 0
        self._unloading: dict[str, int] = {}
        self._stale = False
        self._position: ReaderPosition | None = None
        self.scope = scopes.add_collection(self._update_parts())
        """The scope of all rows that are not deleted, and the collection's number in the client table."""
        scopes.register(self.scope, FilterableCollection(lambda: reader.state.schema, self._passing, demanded))

    def step(self, in_use: Callable[[], InUse], invalidate: Invalidate) -> None:
        """Apply new writes. Raises `CollectionError`, `GpuError`; the previous state is still served then."""
        if self._position is None:  # before the log is read: writers only wait for readers with a position
            self._position = ReaderPosition(self.reader.directory)
        stale, self._stale = self._stale, True  # also after an error in the middle
        self._stale = self.reader.poll(_APPLY_NS) or stale
        if self._stale:
            self._scopes.replace_collection(self.scope, self._update_parts())
            invalidate(self.scope, self._scopes.invalidate(self.scope))
            self._stale = False
        self._position.publish(self.reader.state.sequence)
        if self._unloading:
            self._unload(self._scopes.used_indexes(in_use()))
        else:
            self._scopes.drop_unused(in_use)
        if self._load_error is not None:
            raise self._load_error

    @property
    def loading(self) -> bool:
        """Whether a new segment is partly loaded."""
        return None in self._loading.values()

    def _load_segments(self, segments: Sequence[Segment]) -> bool:
        """Load the next part of new segments into the engine. Return whether all are loaded."""
        self._load_error = None
        for info in set(self._loading) - {segment.info for segment in segments}:  # merged before they were loaded
            del self._loading[info]
            self._engine.unload(self._name(info))
        for segment in segments:
            name = self._name(segment.info)
            if self._loading.get(segment.info) is None:
                try:
                    whole = self._engine.load_part(name, segment.index)
                except GpuError as error:
                    self._load_error = error
                    return False
                self._loading[segment.info] = self._loaded_index(name, segment.index, segment) if whole else None
                if not whole:
                    return False
        return True

    def _name(self, info: SegmentInfo) -> str:
        return f"{self._key}/{info.number}"

    @property
    def indexes(self) -> dict[str, GraphIndex]:
        """The sealed segments' indexes, by their names in the engine."""
        segments = self._segments.values()
        return {loaded.key: loaded.source.index for loaded in segments if isinstance(loaded.source, Segment)}

    def close(self, invalidate: Invalidate) -> None:
        """Stop serving the collection, which no session offers any more."""
        self.close_position()
        invalidate(self.scope, self._scopes.unregister(self.scope))
        self._scopes.remove_collection(self.scope)
        for loaded in (*self._segments.values(), *([self._growing] if self._growing else [])):
            self._unloading[loaded.key] = loaded.number
        for info in self._loading:
            self._engine.unload(self._name(info))
        self._segments, self._growing, self._loading = {}, None, {}
        self.reader.close()

    def close_position(self) -> None:
        """Release writers that wait for this reader."""
        if self._position is not None:
            self._position.close()

    def is_unloaded(self, in_use: InUse) -> bool:
        """Return whether all indexes have been unloaded from the engine, after `close`."""
        self._unload(self._scopes.used_indexes(in_use))
        return not self._unloading

    def _unload(self, searched: set[int]) -> None:
        for key, number in tuple(self._unloading.items()):
            if number not in searched and self._engine.unload(key):
                del self._unloading[key]

    # ---- parts

    def _update_parts(self) -> Parts:
        """Bring the loaded indexes up to date. Return those with live rows as parts, or the growing one if none has."""
        state = self.reader.state
        for segment in state.segments:
            number = segment.info.number
            if number not in self._segments:
                self._segments[number] = self._loading.pop(segment.info, None) or self._load(
                    self._name(segment.info), segment.index, segment
                )
        current = [segment.info.number for segment in state.segments]
        for number in set(self._segments) - set(current):
            loaded = self._segments.pop(number)
            self._unloading[loaded.key] = loaded.number
        self._segments = {number: self._segments[number] for number in current}
        sealed = [
            loaded.part(segment.alive)
            for loaded, segment in zip(self._segments.values(), state.segments, strict=True)
            if segment.count
        ]
        if sealed and not self.reader.was_written:
            return Parts(sealed)
        growing = self._load_growing(state.growing).part(state.growing.alive)
        return Parts([*sealed, growing] if growing.passing or not sealed else sealed)

    def _load_growing(self, growing: GrowingSegment) -> _LoadedIndex:
        """Return the growing segment's index, loading it if its buffers were replaced."""
        codes = growing.all_vectors.codes
        loaded = self._growing
        if loaded is None or loaded.source is not codes:
            if loaded is not None:
                self._unloading[loaded.key] = loaded.number
            self._growing_loads += 1
            key = f"{self._key}/growing-{self._growing_loads}"
            loaded = self._growing = self._load(key, growing_index(growing), codes)
        return loaded

    def _load(self, key: str, index: GraphIndex, source: object) -> _LoadedIndex:
        if key not in self._preloaded:
            self._engine.load(key, index)
        return self._loaded_index(key, index, source)

    def _loaded_index(self, key: str, index: GraphIndex, source: object) -> _LoadedIndex:
        return _LoadedIndex(key, self._number_of(key), index.size, source)

    def _passing(self, condition: Filter, work: Work) -> Finish:
        """Evaluate a filter over the collection as it is now, one state of all rows. On any thread."""
        snapshot = self.reader.state.snapshot()
        segments, growing = snapshot.segments, snapshot.growing
        *sealed, grown = map(RowSet.of, snapshot.passing(condition, work))

        def finish() -> Sequence[Part] | None:
            loaded, index = [self._segments.get(segment.info.number) for segment in segments], self._growing
            if self.reader.state.segments is not segments or self.reader.state.growing is not growing:
                return None  # rows were sealed or merged meanwhile
            known = [one.part(found) for found, one in zip(sealed, loaded, strict=True) if one]
            if index is None and not growing.size and len(known) == len(loaded) > 0:  # never written to
                return [part for part in known if part.passing] or known[:1]
            if None in loaded or index is None or index.source is not growing.all_vectors.codes:
                return None  # the engine has no room for them yet
            grown_part = index.part(grown)
            return [part for part in (*known, grown_part) if part.passing] or [grown_part]

        return finish


class ServedCollections:
    """All collections of a pool, by their names in the engine."""

    def __init__(self, engine: Engine, scopes: Scopes, log: logging.Logger) -> None:
        self._engine, self._scopes, self._log = engine, scopes, log
        self.watch = LogWatch()
        self._served: dict[str, ServedCollection] = {}
        self._unloading: dict[str, ServedCollection] = {}
        self._errors: dict[str, str] = {}
        self._due_ns = self._rested_ns = 0

    @property
    def due_ns(self) -> int:
        """When `step` is next due."""
        return self._due_ns if self._served else _NEVER_NS

    def look(self) -> None:
        """Make `step` due as soon as possible if a log was written to."""
        if self.watch.poll():
            self._due_ns = min(self._due_ns, self._rested_ns)

    def add(self, key: str, reader: CollectionReader, demanded: str, loaded: Collection[str] = ()) -> None:
        """Serve a collection. loaded: the indexes that the engine was opened with. Raises `GpuError`."""
        self.watch.add(reader.directory)
        self._served[key] = ServedCollection(key, reader, demanded, self._engine, self._scopes, loaded)
        self._due_ns = 0  # poll before the first query

    def remove(self, key: str, in_use: InUse, invalidate: Invalidate) -> bool:
        """Stop serving a collection that no session offers any more. Repeat until it returns True: it is unloaded."""
        if key in self._served:
            self._unloading[key] = self._served.pop(key)
            self._unloading[key].close(invalidate)
        if self._unloading[key].is_unloaded(in_use):
            del self._unloading[key]
            return True
        return False

    def find(self, key: str) -> ServedCollection | None:
        return self._served.get(key)

    @property
    def indexes(self) -> dict[str, GraphIndex]:
        """The sealed segments' indexes, by their names in the engine."""
        return {key: index for live in self._served.values() for key, index in live.indexes.items()}

    def step(self, now_ns: int, in_use: Callable[[], InUse], invalidate: Invalidate) -> None:
        """Apply new writes of all collections, if that is due."""
        if now_ns < self._due_ns or not self._served:
            return
        begin_ns = time.monotonic_ns()
        for key, live in self._served.items():
            try:
                live.step(in_use, invalidate)
                error = ""
            except (CollectionError, GpuError) as raised:
                error = str(raised)
            if error and error != self._errors.get(key, ""):
                self._log.error("collection %s: the latest writes are not served: %s", key, error)
            elif self._errors.get(key, "") and not error:
                self._log.info("collection %s: the latest writes are served again", key)
            self._errors[key] = error
        loading = any(live.loading for live in self._served.values())
        applying = any(live.reader.applying for live in self._served.values())
        took_ns = time.monotonic_ns() - begin_ns
        self._rested_ns = now_ns + min(took_ns * (1 + _REST), POLL_NS)
        written = self.watch.fileno() is None or any(live.reader.was_written for live in self._served.values())
        usual = POLL_NS if written else IDLE_POLL_NS
        self._due_ns = now_ns + (2 * took_ns if applying else PART_NS if loading else usual)

    def close(self) -> None:
        """Release writers at the end of the process."""
        self.watch.close()
        for live in self._served.values():
            live.close_position()
