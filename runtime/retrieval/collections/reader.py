"""Reader of a collection, which another process may write to.

bulk_load.build(documents, Path("docs"))
with CollectionReader(Path("docs")) as docs:
    rows, distances = docs.search(load_embedder(docs.embedder).embed(["…"]), k=4)
    passages = docs.documents(rows[0].tolist())
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError, Overloaded
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.background_task import BackgroundTask
from runtime.retrieval.collections.description import (
    DESCRIPTION,
    MANIFEST,
    Manifest,
    SegmentInfo,
    Throttle,
    read_description,
    read_identity,
    unthrottled,
)
from runtime.retrieval.collections.disk import storage_error
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.log import LogFollower, decode, log_files
from runtime.retrieval.collections.part import ignore
from runtime.retrieval.collections.search import search
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.state import Loaded, State, close
from runtime.retrieval.collections.upgrade import read_manifest
from runtime.retrieval.embedding.embedder import EmbedderSpec
from runtime.retrieval.neighbors import Neighbors

_ATTEMPTS = 5
_NO_END_NS = 1 << 62
_NOTHING = Manifest(-2, [], 0, 0, 0, {})  # before the first `poll`


class CollectionReader:
    """A collection as of the last `poll`. Any number of processes may read; each sees all acknowledged writes, and may
    see a write shortly before it is acknowledged. Files that the writer removes stay readable while they are open.

    replaced: whether another collection replaced this one in the directory, or it was moved; the state stays as it is
        then, which is the last one, because no write is acknowledged to a directory that was replaced.
    applying: whether a write is applied in part, so that `poll` should be called again soon.
    log, manifest: the followed log, and the manifest that is installed.
    outdated: an error message if the collection must be reopened because an earlier state of it was restored from a
        backup, else ""; `poll` raises it too.
    segments_ready: called by `poll` with segments that were opened in the background; until it returns True, `poll`
        keeps the old segments, so that a search engine can load the new ones first.
    """

    def __init__(
        self,
        directory: Path,
        *,
        background: bool = False,
        shard: int | None = None,
        prepare: Callable[[Segment], object] = ignore,
    ) -> None:
        """Open the collection. Checks the sizes of its files, not their contents: see `verify`.

        Raises `CollectionError` that names the missing, foreign or damaged file.

        background: open new segments on a thread, and install them in a later `poll`, so that `poll` never blocks.
        shard: read only this shard. prepare: see `State`.
        """
        self.directory, self.replaced, self.outdated = directory, False, ""
        # Strings: joining paths takes longer than a system call.
        self._manifest_paths = os.fspath(directory / MANIFEST), os.fspath(directory / DESCRIPTION)
        self.segments_ready: Callable[[Sequence[Segment]], bool] = lambda segments: True
        self._loads_in_background = False
        self._loading: tuple[list[SegmentInfo], BackgroundTask[Loaded]] | None = None
        self._loaded: Loaded = {}  # and not installed
        for attempt in range(_ATTEMPTS):
            self._last_stat: tuple[int, ...] | None = ()
            self._parts: Iterator[None] | None = None  # of the records that are applied
            self.description = read_description(directory)
            self.state = State(directory, self.description, shard, prepare)
            self.manifest, self.log = _NOTHING, self._follow(_NOTHING)
            try:
                self.poll()
                if read_identity(directory) != self.identity:  # the files may be of either
                    raise CollectionError(f"{directory} was replaced by another collection while it was opened")
                break
            except CollectionError:
                self.close()
                if attempt == _ATTEMPTS - 1 or read_identity(directory) == self.identity:
                    raise
        self._loads_in_background = background

    @property
    def identity(self) -> str:
        """See `Description.identity`."""
        return self.description.identity

    @property
    def embedder(self) -> EmbedderSpec | None:
        """The embedder of the documents; None: queries must be vectors."""
        return self.description.embedder

    def poll(self, budget_ns: int | None = None) -> bool:
        """Apply the writes since the last call; return whether there were any. Takes microseconds if there were none.

        budget_ns: apply large writes in parts, for about so long in each call; none is visible before it is complete.
        Raises `CollectionError` for damaged files, and if the writer replaces each manifest while its segments are
        opened; the state so far stays usable.
        """
        changed = self.replaced = False
        for attempt in range(_ATTEMPTS):
            stat = self._manifest_stat()
            if stat == self._last_stat:
                break
            self.replaced = read_identity(self.directory) != self.description.identity
            if self.replaced:
                return False
            manifest = read_manifest(self.directory)
            if manifest.generation < self.manifest.generation:
                raise self._restored_error()
            if manifest.generation != self.manifest.generation:
                try:
                    changed = self._advance(manifest)
                except CollectionError:  # the writer may have installed another manifest in the meantime
                    if self._manifest_stat() == stat or attempt == _ATTEMPTS - 1:
                        raise
                    if self._loads_in_background:
                        return False  # the next poll reads it
                    continue  # who asks for documents now is told of all acknowledged writes
            if manifest.generation == self.manifest.generation:
                self._last_stat = stat
            break
        if self._log_was_replaced():
            raise self._restored_error()
        return self._apply_records(budget_ns) or changed

    def check_log(self) -> None:
        """Poll, and check that the last file of the log was reached. Raises `CollectionError` if one is missing."""
        newest = max((first for first, _ in log_files(self.directory)), default=0)
        self.poll()
        if self.log.first < newest:
            raise CollectionError(f"{self.directory / 'log'} is damaged: record {self.state.sequence} is missing")

    @property
    def applying(self) -> bool:
        return self._parts is not None

    @property
    def current(self) -> bool:
        """Whether `poll` would find no write and no other file: two system calls."""
        if self._parts is not None or self._manifest_stat() != self._last_stat:
            return False
        return self.log.at_end

    @property
    def was_written(self) -> bool:
        """Whether the collection was ever written to, except by a bulk load."""
        return self.state.sequence > 0

    def _apply_records(self, budget_ns: int | None = None) -> bool:
        """Apply the new records of the log; return whether any was completed. Raises `CollectionError`."""
        before, end_ns = self.state.sequence, time.monotonic_ns() + (budget_ns or _NO_END_NS)
        while True:
            resumed = self._parts is not None
            self._parts = self._parts or self._apply_in_parts(self.log.poll())
            for _ in self._parts:
                if time.monotonic_ns() > end_ns:
                    return self.state.sequence != before
            self._parts = None
            if not resumed:
                return self.state.sequence != before

    def _apply_in_parts(self, records: Sequence[bytes]) -> Iterator[None]:
        for payload in records:
            yield from self.state.apply_in_parts(decode(payload, self.description.dim))

    def _log_was_replaced(self) -> bool:
        """Whether the open log file is no longer the collection's, although it was not sealed."""
        is_current = self.log.is_current
        return read_manifest(self.directory).sequence <= self.log.first if is_current is None else not is_current

    def _restored_error(self) -> CollectionError:
        self.outdated = f"an earlier state of {self.directory} was restored while it was open: it is reopened"
        return CollectionError(self.outdated)

    def _advance(self, manifest: Manifest) -> bool:
        """Install a newer manifest if its segments are open; return whether they are."""
        missing = self.state.missing(manifest)
        if self._loads_in_background and (missing or self._loaded):
            if not self._load_in_background(missing):
                return False
            fresh, self._loaded = self._loaded, {}
        else:
            fresh = self.state.open_segments(missing)
        with suppress(CollectionError):  # the log is sealed, and may be gone; else it tells which rows were replaced
            self._apply_records()
        behind = self.log.sequence < manifest.sequence
        follower = self._follow(manifest) if behind else self.log  # opened first: state and log advance together
        try:
            self.state.advance(manifest, fresh)
        except CollectionError:
            if behind:
                follower.close()
            raise
        if behind:
            self.log.close()
            self.log = follower
        for segment in self.state.segments if manifest.generation < 0 else ():  # it has no schema
            self.state.schema = {**self.state.schema, **segment.columns.schema}
        self.manifest = manifest
        return True

    def _load_in_background(self, missing: list[SegmentInfo]) -> bool:
        """Open a manifest's new segments; return whether these are loaded. Raises `CollectionError`."""
        if self._loading is not None:
            wanted, task = self._loading
            if not task.done:
                return False
            self._loading = None
            if task.error_message and set(wanted) <= set(missing):  # else one may have been merged away
                raise CollectionError(task.error_message)
            self._loaded |= task.result or {}
        close([self._loaded.pop(info) for info in self._loaded.keys() - set(missing)])
        if rest := [info for info in missing if info not in self._loaded]:
            with suppress(Overloaded):  # no thread left: the next `poll` tries again
                self._loading = rest, BackgroundTask("segments", lambda _: self.state.open_segments(rest))
            return False
        return self.segments_ready(list(self._loaded.values()))

    def search(
        self,
        queries: NDArray[Any],
        k: int = 10,
        top_m: int = 64,
        search_width: int = 1,
        patience: int | None = None,
        threads: int = 1,
        filter: Filter | None = None,
    ) -> Neighbors:
        """See `search.search`."""
        return search(self.state, queries, k, top_m, search_width, filter, threads, patience)

    def documents(self, rows: Sequence[int]) -> list[Document | None]:
        """Return the documents of rows that a search found; None for one that was deleted and merged away since."""
        return self.state.documents(rows)

    # ---- checksums

    @property
    def unverified(self) -> list[Segment]:
        """The open segments whose checksums were not compared."""
        return [segment for segment in self.state.segments if segment.verified_bytes is None]

    @property
    def verified_bytes(self) -> int:
        """Bytes of the open segments' files that were compared, of `state.file_bytes()`."""
        return sum(segment.verified_bytes or 0 for segment in self.state.segments)

    def verify_segments(self, throttle: Throttle = unthrottled) -> None:
        """Compare the checksums of the open segments, and of those that are opened meanwhile, each once. On any thread.

        Raises `CollectionError` that names the first damaged file.
        """
        while unverified := self.unverified:
            try:
                unverified[0].verify(throttle)
            except CollectionError:
                if self._is_current(unverified[0].info):  # else it was merged away, or the directory was moved
                    raise

    @classmethod
    def verify(cls, directory: Path) -> str:
        """Verify all files; return a message if a crash left an incomplete record, else "".

        Raises `CollectionError` that names the damaged file.
        """
        with cls(directory) as collection:
            collection.verify_segments()
            collection.check_log()
            for segment in collection.state.segments:
                segment.check()
                if segment.store is not None:
                    rows = np.fromiter((document.row for document in segment.store.all()), np.int64)
                    if not np.array_equal(rows, np.sort(segment.rows)):
                        raise CollectionError(f"{segment.store.path} does not have the documents of the index")
            if read_manifest(directory).generation != collection.manifest.generation:
                raise CollectionError(f"{directory} was written to during the verification: verify it again")
            torn_bytes = collection.log.torn_bytes
        if not torn_bytes:
            return ""
        return f"the last {torn_bytes} bytes of the log are an incomplete record; the next writer cuts them"

    def _is_current(self, info: SegmentInfo) -> bool:
        try:
            return info in read_manifest(self.directory).segments
        except CollectionError:  # `poll` reports it
            return False

    def close(self) -> None:
        self.log.close()
        self.state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self, manifest: Manifest) -> LogFollower:
        first = -1 if manifest.generation < 0 else manifest.sequence  # a flat bulk load has no log
        return LogFollower(self.directory, self.description.identity, first)

    def _manifest_stat(self) -> tuple[int, int, int] | None:
        """Stat the manifest, or the description of a flat bulk load, which has none."""
        for path in self._manifest_paths:
            try:
                status = os.stat(path)
                return status.st_ino, status.st_mtime_ns, status.st_size
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise storage_error(error, f"{path} cannot be read") from error
        return None  # the directory was moved
