"""Catalogue of a pool worker: which configured collections it serves, and the reasons for those it does not.

```
             opened, checked as `verify` says           found damaged
  (start) ───────────────────────────────────▶ served ────────────────▶ unavailable ──▶ served, once its files have
     │                                          ▲    │ reload            (a reason)       changed and are valid
     └── a reason: unavailable                  └────┘ another valid build
```
Files are opened and verified in background tasks; `poll` returns the resulting changes.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ipc import Catalogue, Stage, Unserved
from ipc.session.messages import MAX_REASON
from runtime.errors import CollectionError, Overloaded
from runtime.node.config import CollectionSection
from runtime.node.placement.plan import ANSWERS
from runtime.pool.collections.shard import OpenShard, Shard, open_shard
from runtime.retrieval.background_task import BackgroundTask
from runtime.retrieval.collections.description import read_identity
from runtime.retrieval.collections.served_documents import CollectionDocuments

_JOIN_S = 5.0

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass
class _Entry:
    section: CollectionSection
    shard: Shard | None = None
    reason: str = ""  # why it is unavailable
    signature: Signature | None = None  # of the files found damaged
    opened: list[Signature] = field(default_factory=list)  # of the files that the last task has opened
    reload_error: str = ""  # why the last reload had no effect
    checking: BackgroundTask[None] | None = None
    opening: BackgroundTask[Shard | None] | None = None
    reload_requested: bool = False  # and not finished
    offered: bool = False  # `poll` has returned a new shard that is neither accepted nor refused yet
    next_check_ns: int = 0  # of the files, while the collection is unavailable

    @property
    def needs_reopening(self) -> bool:
        """Whether it is unavailable, or it is the answer cache's collection and was recreated.

        Operators do not reload the latter.
        """
        return self.shard is None or (self.section.name == ANSWERS and self.shard.reader.replaced)


@dataclass(frozen=True)
class Change:
    """`new` can replace `old`; without a `new` shard the collection has become unavailable."""

    name: str
    old: Shard | None
    new: Shard | None


class PoolCatalogue:
    """A pool worker's collections. One thread; only the constructor blocks.

    worker: its number. stage: whose queries it answers first, "" for both. strict: raise `CollectionError` for a
    required collection that cannot be served. suspicious: verify all checksums before serving anything, because the
    previous process died of a fault in reading memory.
    """

    def __init__(
        self,
        sections: Sequence[CollectionSection],
        worker: int,
        log: logging.Logger,
        *,
        stage: Stage | Literal[""] = "",
        strict: bool = False,
        suspicious: bool = False,
        opener: OpenShard = open_shard,
        check_every_ns: int = 5_000_000_000,
    ) -> None:
        self._check_every_ns = check_every_ns
        self._worker, self._stage, self._log, self._open = worker, stage, log, opener
        self._entries = {section.name: _Entry(section) for section in sections}
        self._reloaded = list(self._entries)  # by the last reload; the start counts as a reload of all
        for entry in self._entries.values():
            check = suspicious or entry.section.verify == "start"
            signature = signature_of(Path(entry.section.path))
            try:
                entry.shard = self._opened(entry.section, check)
            except CollectionError as error:
                if strict and entry.section.required:
                    raise
                self._mark_unavailable(entry, error.message, signature)

    def _opened(self, section: CollectionSection, check: bool) -> Shard:
        shard = self._open(section, self._worker)
        if check:
            shard.reader.verify_segments()
        return shard

    # ---- state

    @property
    def names(self) -> list[str]:
        """All configured collections, in order."""
        return list(self._entries)

    @property
    def served(self) -> list[Shard]:
        """The served shards, in the order of the configuration."""
        return [entry.shard for entry in self._entries.values() if entry.shard is not None]

    @property
    def offer(self) -> Catalogue:
        """The catalogue for new sessions, as of now."""
        unserved = (Unserved(name, entry.reason) for name, entry in self._entries.items() if entry.shard is None)
        return Catalogue(tuple(shard.offered for shard in self.served), tuple(unserved), self._stage)

    @property
    def unavailable(self) -> int:
        """Number of collections that are not served."""
        return len(self._entries) - len(self.served)

    @property
    def checked_share(self) -> float:
        """Verified share of the served collections' bytes that are to be verified, 0 to 1."""
        due = [e.shard.reader for e in self._entries.values() if e.shard and e.section.verify != "never"]
        total = sum(reader.state.file_bytes() for reader in due)
        return sum(reader.verified_bytes for reader in due) / total if total else 1.0

    @property
    def reloading(self) -> bool:
        return any(entry.reload_requested or entry.offered for entry in self._entries.values())

    @property
    def reload_failed(self) -> bool:
        """Whether the last reload (or the start) has failed for any of its collections."""
        return any(
            entry.reload_error or entry.shard is None for entry in map(self._entries.__getitem__, self._reloaded)
        )

    @property
    def note(self) -> str:
        """Summary of problems and progress for `trinity status`; "" without any."""
        return "; ".join(line for name, entry in self._entries.items() if (line := _note(name, entry)))

    # ---- changes

    def reload(self, names: Iterable[str]) -> None:
        """Reopen these collections. `reloading` until that has ended; `reload_failed` has the outcome."""
        self._reloaded = list(names)
        for name in self._reloaded:
            entry = self._entries[name]
            entry.reload_requested, entry.reload_error = True, ""

    def poll(self, now_ns: int) -> list[Change]:
        """Return the changes since the last call. Each one with a `new` shard must be accepted or refused."""
        changes = []
        for name, entry in self._entries.items():
            if entry.checking is not None and entry.checking.done:
                changes += self._finish_check(name, entry)
            changes += self._close_outdated(name, entry)
            if entry.opening is not None and entry.opening.done:
                changes += self._finish_opening(name, entry)
            due = entry.reload_requested or (entry.needs_reopening and now_ns >= entry.next_check_ns)
            if due and entry.opening is None and not entry.offered:
                self._start_opening(entry, now_ns)
        self._start_check()
        return changes

    def accept(self, change: Change) -> None:
        """Record that the new shard is served."""
        entry = self._entries[change.name]
        self._stop_check(entry)
        assert change.new is not None
        entry.shard, entry.reason, entry.reload_requested = change.new, "", False
        entry.offered = False
        self._log.info("collection %s: %s is served", change.name, change.new.served.identity[:12])

    def refuse(self, change: Change, reason: str) -> None:
        """Record that the new shard cannot be served; the old one still is."""
        entry = self._entries[change.name]
        entry.offered = False
        self._opening_failed(entry, reason)

    def _start_check(self) -> None:
        """Start to verify the next collection's checksums, one at a time: the throttle is for all of them."""
        if any(entry.checking for entry in self._entries.values()):
            return
        for entry in self._entries.values():
            if entry.shard is not None and entry.section.verify != "never" and entry.shard.reader.unverified:
                reader = entry.shard.reader
                with suppress(Overloaded):  # no thread left: the next `poll` tries again
                    entry.checking = BackgroundTask("checksums", lambda work: reader.verify_segments(work.throttle))  # noqa: B023
                return

    def _finish_check(self, name: str, entry: _Entry) -> list[Change]:
        assert entry.checking is not None
        error, entry.checking, old = entry.checking.error_message, None, entry.shard
        if not error:
            self._log.info("collection %s: all checksums match", name)
            return []
        self._mark_unavailable(entry, error, None)
        return [Change(name, old, None)]

    def _close_outdated(self, name: str, entry: _Entry) -> list[Change]:
        """Mark a collection whose directory was restored to an earlier state as unavailable, and reopen it."""
        old = entry.shard
        if old is None or not old.reader.outdated:
            return []
        self._mark_unavailable(entry, old.reader.outdated, None)
        entry.next_check_ns = 0
        return [Change(name, old, None)]

    def _start_opening(self, entry: _Entry, now_ns: int) -> None:
        """Start a task that opens the collection's directory: another build, or valid files again."""
        entry.next_check_ns = now_ns + self._check_every_ns
        section, reload = entry.section, entry.reload_requested
        damaged = None if reload else entry.signature
        identity = "" if entry.shard is None else entry.shard.served.identity
        signatures = entry.opened = []

        def open_changed(work: BackgroundTask[Shard | None]) -> Shard | None:
            signatures.append(signature_of(Path(section.path)))  # first: later changes are for the next attempt
            if signatures[0] == damaged:
                return None
            shard = self._open(section, self._worker)
            if section.verify != "never":
                shard.reader.verify_segments(work.check_cancelled)
            if shard.served.identity == identity:
                shard.reader.close()
                return None
            if reload:  # do not replace a build by one without valid documents
                _check_documents(Path(section.path), shard.served.identity)
            shard.warm_up()
            return shard

        try:
            entry.opening = BackgroundTask("opening", open_changed)
        except Overloaded as error:
            self._opening_failed(entry, error.message)

    def _finish_opening(self, name: str, entry: _Entry) -> list[Change]:
        assert entry.opening is not None
        task, entry.opening = entry.opening, None
        signature = entry.opened[0] if entry.opened else None
        if task.error_message:
            old = entry.shard
            if old is not None and read_identity(Path(entry.section.path)) == old.served.identity:
                # These are the served files: they were altered after they had been opened.
                entry.reload_requested, entry.reload_error = False, task.error_message
                self._mark_unavailable(entry, task.error_message, signature)
                return [Change(name, old, None)]
            self._opening_failed(entry, task.error_message)
        elif task.result is not None:
            entry.offered = True
            return [Change(name, entry.shard, task.result)]
        else:
            entry.reload_requested = False
        return []

    def _opening_failed(self, entry: _Entry, reason: str) -> None:
        """Record that reopening a collection has failed."""
        if entry.reload_requested:
            entry.reload_error = reason
            self._log.error("collection %s is not reloaded: %s", entry.section.name, reason)
        entry.reload_requested = False
        if entry.shard is None:
            self._mark_unavailable(entry, reason, entry.opened[0] if entry.opened else None)

    def _mark_unavailable(self, entry: _Entry, reason: str, signature: Signature | None) -> None:
        if reason[:MAX_REASON] != entry.reason:
            self._log.error("collection %s is unavailable: %s", entry.section.name, reason)
        self._stop_check(entry)
        entry.shard, entry.reason, entry.signature = None, reason[:MAX_REASON], signature

    def _stop_check(self, entry: _Entry) -> None:
        """Verify no more of a shard."""
        if entry.checking is not None:
            entry.checking.cancel()
            entry.checking = None

    def close(self) -> None:
        """Stop background tasks."""
        tasks = [task for e in self._entries.values() for task in (e.checking, e.opening) if task is not None]
        for task in tasks:
            task.cancel()
        for entry in self._entries.values():
            self._stop_check(entry)
        for task in tasks:
            task.join(_JOIN_S)


def _check_documents(directory: Path, identity: str) -> None:
    """Open the documents of a build once. Raises `CollectionError` if they are damaged or of another build."""
    with CollectionDocuments(directory) as documents:
        if documents.identity != identity:
            raise CollectionError(f"{directory} was replaced by another collection while it was opened")


def signature_of(directory: Path) -> Signature:
    """Return a value that changes with any file below the directory; () if it cannot be read."""
    try:
        files = [(str(path), path.stat()) for path in sorted(directory.rglob("*"))]
        return tuple((path, s.st_ino, s.st_size, max(s.st_mtime_ns, s.st_ctime_ns)) for path, s in files)
    except OSError:
        return ()


def _note(name: str, entry: _Entry) -> str:
    """Return a collection's part of the note."""
    notes = []
    if entry.shard is None:
        notes.append(f"unavailable: {entry.reason}")
    if entry.reload_error:
        notes.append(f"not reloaded: {entry.reload_error}")
    if entry.checking is not None and entry.shard is not None:
        reader = entry.shard.reader
        share = reader.verified_bytes / max(reader.state.file_bytes(), 1)
        notes.append(f"checksums {share:.0%} compared")
    return f"collection {name}: {', '.join(notes)}" if notes else ""
