"""Reading a live collection that another process writes to."""

import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError, InvalidFilter
from runtime.retrieval.attributes.filters import Filter, check_filter
from runtime.retrieval.collections.background_task import BackgroundTask
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.live.keyword_search import LiveKeywordSearch
from runtime.retrieval.live.search import search
from runtime.retrieval.live.state import Loaded, State
from runtime.retrieval.live.storage.checksums import LiveChecksums
from runtime.retrieval.live.storage.disk import storage_error
from runtime.retrieval.live.storage.documents import StoredDocument
from runtime.retrieval.live.storage.log import LogFollower
from runtime.retrieval.live.storage.manifest import (
    DESCRIPTION,
    MANIFEST,
    Description,
    Manifest,
    read_description,
    read_manifest,
)
from runtime.retrieval.live.storage.operations import decode
from runtime.retrieval.live.storage.segment import DOCUMENTS, Segment
from runtime.retrieval.neighbors import Neighbors
from runtime.retrieval.passages import Attributes

_ATTEMPTS = 5


class LiveReader:
    """A collection as of the last `poll`. Any number of processes may read; each sees what is acknowledged, and may
    see a write that is about to be. Files that the writer removes are kept by who has them open.

    `checksums` are those of the segments that are open: who serves them for long compares them, on a thread.
    `replaced`: another collection lies in the directory by now; `poll` raises then. `outdated`: why it is to be opened
    anew: an earlier state of the collection was restored, which what was read cannot be brought forward to. `poll`
    raises that, too; "" as long as all is well. `ready`: whether who searches has taken in segments that were opened
    beside: asked by each `poll`, which goes on with the old ones until it has.
    """

    def __init__(
        self,
        directory: Path,
        *,
        background: bool = False,
        checksum_files: Collection[str] | None = None,
        shard: int | None = None,
    ) -> None:
        """beside: have `poll` open new segments on a thread, and take them in later, so that it never waits.
        checksum_files: which of a segment's files `checksums` has; None: all. shard: have the rows of this one only.

        Raises `CollectionError`.
        """
        self.directory, self.replaced, self.outdated = directory, False, ""
        self.segments_ready: Callable[[Sequence[Segment]], bool] = lambda segments: True
        self._loads_in_background = background
        self._loading: tuple[Manifest, BackgroundTask[Loaded]] | None = None
        self.description = read_description(directory)
        try:
            self._description_fd = os.open(directory / DESCRIPTION, os.O_RDONLY | os.O_CLOEXEC)  # tells copies apart
        except OSError as error:
            raise storage_error(error, f"{directory / DESCRIPTION} cannot be read") from error
        try:
            manifest = self._opened(shard)
        except BaseException:
            os.close(self._description_fd)
            raise
        self._generation = manifest.generation
        self.checksums = LiveChecksums(directory, checksum_files)
        self.checksums.add(self.state.segments)
        try:
            self.poll()
        except CollectionError:
            self.close()
            raise

    def _opened(self, shard: int | None) -> Manifest:
        """Have the state and follow the log of a manifest, which is returned. Raises `CollectionError`."""
        attempts = _ATTEMPTS
        while True:
            self._seen = self._place()
            manifest = read_manifest(self.directory)
            try:
                self.state = State(self.directory, self.description, manifest, shard)
                self._follower = self._follow(manifest)
                return manifest
            except CollectionError:  # the writer may have gone on meanwhile
                attempts -= 1
                if not attempts or self._place() == self._seen:
                    raise

    def poll(self) -> bool:
        """Take in what was written since. Whether anything was. Costs microseconds where nothing was.

        Raises `CollectionError` for what is damaged; what was read before goes on being served.
        """
        place = self._place()
        changed = False
        if place != self._seen:
            self.replaced = read_description(self.directory).identity != self.description.identity
            if self.replaced:
                raise CollectionError(f"another collection is in the place of {self.directory}: reload it")
            manifest = read_manifest(self.directory)
            if manifest.generation < self._generation or self._is_a_copy():
                raise self._restored()
            if manifest.generation != self._generation:
                try:
                    changed = self._advance(manifest)
                except CollectionError:
                    if self._place() != place:  # replaced once more: the next poll reads that one
                        return False
                    raise
            if manifest.generation == self._generation:
                self._seen = place
        if self._log_is_another():
            raise self._restored()
        for record in self._follower.poll():
            self.state.apply(decode(record.payload, self.description.dim))
            changed = True
        return changed

    def _is_a_copy(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._description_fd), os.stat(self.directory / DESCRIPTION))
        except OSError as error:
            raise storage_error(error, f"{self.directory / DESCRIPTION} cannot be read") from error

    def _log_is_another(self) -> bool:
        """Whether the file of the log that is read is the collection's no more, though it was not sealed."""
        is_current = self._follower.is_current
        return read_manifest(self.directory).sequence <= self._follower.first if is_current is None else not is_current

    def _restored(self) -> CollectionError:
        self.outdated = f"an earlier state of {self.directory} was restored while it was open: it is opened anew"
        return CollectionError(self.outdated)

    def catch_up(self) -> bool:
        """`poll`, and wait for the segments that are being opened. Whether anything was new. Raises as `poll`."""
        changed = self.poll()
        for _ in range(_ATTEMPTS):
            if self._loading is None:
                break
            self._loading[1].join()
            changed |= self.poll()
        return changed

    def _advance(self, manifest: Manifest) -> bool:
        """Take over a newer manifest, if its segments are there. Whether they are."""
        fresh = self._loaded(manifest) if self._loads_in_background else None
        if self._loads_in_background and fresh is None:
            return False
        had = set(self.state.segments)
        behind = self._follower.sequence < manifest.sequence
        follower = self._follow(manifest) if behind else self._follower  # first: state and log go forward together
        try:
            self.state.advance(manifest, fresh)
        except CollectionError:
            if behind:
                follower.close()
            raise
        if behind:
            self._follower.close()
            self._follower = follower
        self.checksums.add(segment for segment in self.state.segments if segment not in had)
        self._generation = manifest.generation
        return True

    def _loaded(self, manifest: Manifest) -> Loaded | None:
        """The manifest's new segments; None while they are being opened. Raises `CollectionError`."""
        had: Loaded = {}
        if self._loading is not None:
            loading, work = self._loading
            if not work.done:
                return None
            if loading.generation == manifest.generation and not self.segments_ready(
                list((work.result or {}).values())
            ):
                return None
            self._loading = None
            if loading.generation == manifest.generation:
                if work.error_message:
                    raise CollectionError(work.error_message)
                return work.result
            had = work.result or {}
        self._loading = manifest, BackgroundTask("segments", lambda _: self.state.load(manifest, had))
        return None

    def search(
        self,
        queries: NDArray[np.float32],
        k: int = 10,
        top_m: int = 64,
        search_width: int = 1,
        filter: Filter | None = None,
    ) -> Neighbors:
        """See `search.search`."""
        return search(self.state, queries, k, top_m, search_width, filter)

    def documents(self, rows: Sequence[int]) -> list[StoredDocument | None]:
        """The documents of rows that a search found; None for one that was deleted and merged away since."""
        return self.state.documents(rows)

    def close(self) -> None:
        self.checksums.close()
        self._follower.close()
        self.state.close()
        os.close(self._description_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self, manifest: Manifest) -> LogFollower:
        try:
            return LogFollower(self.directory, self.description.identity, manifest.sequence)
        except OSError as error:
            raise storage_error(error, f"the log of {self.directory} cannot be read") from error

    def _place(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self.directory / MANIFEST)
        except OSError as error:
            raise storage_error(error, f"{self.directory / MANIFEST} cannot be read") from error
        return found.st_ino, found.st_mtime_ns, found.st_size


# ---- the documents of a live collection for who answers with them: as of now, whatever the pool has found a moment ago


class LiveDocumentStore:
    """As `DocumentStore`, but a row may be gone. Any number of threads may ask."""

    def __init__(self, directory: Path) -> None:
        """Raises `CollectionError`."""
        self.path, self._lock = directory, threading.Lock()
        self._reader = LiveReader(directory, background=True, checksum_files=(DOCUMENTS,))
        self._words = LiveKeywordSearch(self._reader.state)

    @property
    def checksums(self) -> LiveChecksums:
        """Of the documents alone."""
        return self._reader.checksums

    @property
    def description(self) -> Description:
        return self._reader.description

    @property
    def size(self) -> int:
        """Documents that are there."""
        return self._reader.state.count

    def accepts_filter(self, filter: Filter) -> bool:
        """Whether by now a filter compares what the documents have. Raises `CollectionError`."""
        with self._lock:
            self._reader.poll()
            try:
                check_filter(filter, self._reader.state.schema)
            except InvalidFilter:
                return False
        return True

    def get(self, rows: Sequence[int]) -> list[Document | None]:
        """The documents of these rows, in their order; None for a deleted one. Raises `CollectionError`."""
        with self._lock:
            self._reader.poll()
            state = self._reader.state
            if max(rows, default=-1) >= state.growing.next_row:  # found in a segment that is not open here yet
                self._reader.catch_up()
            gone = state.deleted(rows)
            found = state.documents(rows)
        return [
            None if one is None or dead else Document(one.id, one.title, one.text, passage_attributes(one))
            for one, dead in zip(found, gone, strict=True)
        ]

    def search_keywords(
        self, text: str, vector: NDArray[np.float32], depth: int, filter: Filter | None, deadline_ns: int
    ) -> Neighbors:
        """What a text's words find: see `LiveKeywordSearch.search_keywords`."""
        with self._lock:
            self._reader.poll()
        return self._words.search_keywords(text, vector, depth, filter, deadline_ns)

    def close(self) -> None:
        self._words.close()
        self._reader.close()


def passage_attributes(document: StoredDocument) -> Attributes:
    """As passages have them."""
    return {
        name: value if isinstance(value, str | int | float) else list(value)
        for name, value in document.attributes.items()
    }
