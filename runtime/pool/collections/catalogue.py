"""Which of the configured collections a pool worker serves, and why not the others.

```
             opened, checked as `verify` says           found damaged
  (start) ───────────────────────────────────▶ served ────────────────▶ unavailable ──▶ served, once its files have
     │                                          ▲    │ reload            (a reason)       changed and are found good
     └── a reason: unavailable                  └────┘ another build, found good
```
Files are opened and read beside the loop; `poll` hands over what has become of that.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from ipc import Catalogue, Unserved
from ipc.session.messages import MAX_REASON
from runtime.errors import CollectionError
from runtime.node.config import CollectionSection
from runtime.node.placement.plan import ANSWERS
from runtime.pool.collections.shard import OpenShard, Shard, open_shard
from runtime.retrieval.collections.background_task import BackgroundTask
from runtime.retrieval.open_build import check_documents, directory_identity

_JOIN_S = 5.0

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass
class _Entry:
    section: CollectionSection
    shard: Shard | None = None
    reason: str = ""  # why it is unavailable
    signature: Signature | None = None  # of the files that were found bad
    tried: list[Signature] = field(default_factory=list)  # of those that are being opened
    refused: str = ""  # why the last reload has changed nothing
    checking: BackgroundTask[None] | None = None
    opening: BackgroundTask[Shard | None] | None = None
    wanted: bool = False  # a reload was asked for and is not over
    offered: bool = False  # a new shard was handed out and not answered yet
    look_ns: int = 0

    @property
    def lost(self) -> bool:
        """Whether it is unavailable; or it is that of stored answers and was begun anew, which nobody will reload."""
        live = None if self.shard is None else self.shard.live
        return self.shard is None or (self.section.name == ANSWERS and live is not None and live.replaced)


@dataclass(frozen=True)
class Change:
    """`new` can be served in the place of `old`; without a `new` one the collection is unavailable by now."""

    name: str
    old: Shard | None
    new: Shard | None


class PoolCatalogue:
    """A pool worker's collections. One thread; nothing waits but the constructor.

    worker: its number. strict: raise `CollectionError` for a required collection that cannot be served. suspicious:
    compare all checksums before anything is served, for the last life ended by a fault in reading memory.
    """

    def __init__(
        self,
        sections: Sequence[CollectionSection],
        worker: int,
        log: logging.Logger,
        *,
        strict: bool = False,
        suspicious: bool = False,
        opener: OpenShard = open_shard,
        look_every_ns: int = 5_000_000_000,
    ) -> None:
        self._look_every_ns = look_every_ns
        self._worker, self._log, self._open = worker, log, opener
        self._entries = {section.name: _Entry(section) for section in sections}
        self._asked = list(self._entries)  # of the last reload; the start is one of all
        for entry in self._entries.values():
            check = suspicious or entry.section.verify == "start"
            signature = signature_of(Path(entry.section.path))
            try:
                entry.shard = self._opened(entry.section, check)
            except CollectionError as error:
                if strict and entry.section.required:
                    raise
                self._take_out(entry, error.message, signature)

    def _opened(self, section: CollectionSection, check: bool) -> Shard:
        shard = self._open(section, self._worker)
        if check:
            shard.checksums.verify()
        elif section.verify == "never":
            shard.checksums.close()
        return shard

    # ---- what is so

    @property
    def names(self) -> list[str]:
        """All that are configured, in their order."""
        return list(self._entries)

    @property
    def served(self) -> list[Shard]:
        """What is served, in the order of the configuration."""
        return [entry.shard for entry in self._entries.values() if entry.shard is not None]

    @property
    def offer(self) -> Catalogue:
        """What sessions are opened with."""
        unserved = (Unserved(name, entry.reason) for name, entry in self._entries.items() if entry.shard is None)
        return Catalogue(tuple(shard.served for shard in self.served), tuple(unserved))

    @property
    def unavailable(self) -> int:
        """How many collections are not served."""
        return len(self._entries) - len(self.served)

    @property
    def checked_share(self) -> float:
        """The part of the served collections' bytes that are to be checked and were, 0 to 1."""
        due = [e.shard.checksums for e in self._entries.values() if e.shard and e.section.verify != "never"]
        total = sum(one.total_bytes for one in due)
        return sum(one.read_bytes for one in due) / total if total else 1.0

    @property
    def reloading(self) -> bool:
        """Whether a reload is not over."""
        return any(entry.wanted or entry.offered for entry in self._entries.values())

    @property
    def refused(self) -> bool:
        """Whether the last reload (or the start) has left one of its collections as it was, or without being served."""
        return any(entry.refused or entry.shard is None for entry in map(self._entries.__getitem__, self._asked))

    @property
    def note(self) -> str:
        """What people should know; "" if all is well."""
        return "; ".join(line for name, entry in self._entries.items() if (line := _line(name, entry)))

    # ---- what becomes of it

    def reload(self, names: Iterable[str]) -> None:
        """Look at these collections' directories anew; `reloading` until that has ended, then `refused` or not."""
        self._asked = list(names)
        for name in self._asked:
            entry = self._entries[name]
            entry.wanted, entry.refused = True, ""

    def poll(self, now_ns: int) -> list[Change]:
        """What has changed since the last call. A change with a `new` shard is to be answered: `accept` or `refuse`."""
        changes = []
        for name, entry in self._entries.items():
            if entry.checking is not None and entry.checking.done:
                changes += self._checked(name, entry)
            changes += self._outdated(name, entry)
            if entry.opening is not None and entry.opening.done:
                changes += self._reopened(name, entry)
            due = entry.wanted or (entry.lost and now_ns >= entry.look_ns)
            if due and entry.opening is None and not entry.offered:
                self._look(entry, now_ns)
        self._check_next()
        return changes

    def accept(self, change: Change) -> None:
        """The new shard is served from now on."""
        entry = self._entries[change.name]
        self._let_go(entry)
        assert change.new is not None
        entry.shard, entry.reason, entry.wanted = change.new, "", False
        entry.offered = False
        self._log.info("collection %s: %s is served", change.name, change.new.served.identity[:12])

    def learn(self, name: str, attributes: dict[str, str]) -> None:
        """A collection that is served has these attributes by now."""
        entry = self._entries[name]
        assert entry.shard is not None
        entry.shard = replace(entry.shard, served=structs.replace(entry.shard.served, attributes=attributes))

    def refuse(self, change: Change, reason: str) -> None:
        """The new shard cannot be served; what was served still is."""
        entry = self._entries[change.name]
        entry.offered = False
        self._failed(entry, reason)

    def _check_next(self) -> None:
        """Begin to compare the next collection's checksums: one after the other, for the pace is that of all."""
        if any(entry.checking for entry in self._entries.values()):
            return
        for entry in self._entries.values():
            if entry.shard is not None and entry.shard.checksums.pending:
                checksums = entry.shard.checksums
                entry.checking = BackgroundTask("checksums", lambda work: checksums.verify(work.throttle))  # noqa: B023
                return

    def _checked(self, name: str, entry: _Entry) -> list[Change]:
        assert entry.checking is not None
        trouble, entry.checking, old = entry.checking.error_message, None, entry.shard
        if not trouble:
            self._log.info("collection %s: every checksum is right", name)
            return []
        self._take_out(entry, trouble, None)
        return [Change(name, old, None)]

    def _outdated(self, name: str, entry: _Entry) -> list[Change]:
        """A live collection of which an earlier state was restored is taken out, and opened anew."""
        old = entry.shard
        if old is None or old.live is None or not old.live.outdated:
            return []
        self._take_out(entry, old.live.outdated, None)
        entry.look_ns = 0
        return [Change(name, old, None)]

    def _look(self, entry: _Entry, now_ns: int) -> None:
        """See whether what lies in the collection's directory is another build, or whole again."""
        entry.look_ns = now_ns + self._look_every_ns
        section, bad, wanted = entry.section, None if entry.wanted else entry.signature, entry.wanted
        identity = "" if entry.shard is None else entry.shard.served.identity
        tried = entry.tried = []

        def opened(work: BackgroundTask[Shard | None]) -> Shard | None:
            tried.append(signature_of(Path(section.path)))  # first: what comes while it is read is another attempt's
            if tried[0] == bad:
                return None
            shard = self._open(section, self._worker)
            if section.verify == "never":
                shard.checksums.close()
            else:
                shard.checksums.verify(work.check_cancelled)
            if shard.served.identity == identity:
                if shard.live is not None:
                    shard.live.close()
                return None
            if wanted and shard.live is None:  # nobody is to be without the texts of what is taken
                check_documents(Path(section.path), shard.served.identity)
            shard.touch()
            return shard

        entry.opening = BackgroundTask("opening", opened)

    def _reopened(self, name: str, entry: _Entry) -> list[Change]:
        assert entry.opening is not None
        ended, entry.opening = entry.opening, None
        if ended.error_message:
            old = entry.shard
            if old is not None and directory_identity(Path(entry.section.path)) == old.served.identity:
                # The very files that are served: they have been altered since they were opened.
                entry.wanted, entry.refused = False, ended.error_message
                self._take_out(entry, ended.error_message, entry.tried[0] if entry.tried else None)
                return [Change(name, old, None)]
            self._failed(entry, ended.error_message)
        elif ended.result is not None:
            entry.offered = True
            return [Change(name, entry.shard, ended.result)]
        else:
            entry.wanted = False
        return []

    def _failed(self, entry: _Entry, reason: str) -> None:
        """Nothing has come of opening a collection anew."""
        if entry.wanted:
            entry.refused = reason
            self._log.error("collection %s is not reloaded: %s", entry.section.name, reason)
        entry.wanted = False
        if entry.shard is None:
            self._take_out(entry, reason, entry.tried[0] if entry.tried else None)

    def _take_out(self, entry: _Entry, reason: str, signature: Signature | None) -> None:
        if reason[:MAX_REASON] != entry.reason:
            self._log.error("collection %s is unavailable: %s", entry.section.name, reason)
        self._let_go(entry)
        entry.shard, entry.reason, entry.signature = None, reason[:MAX_REASON], signature

    def _let_go(self, entry: _Entry) -> None:
        """Of the files that were still to be read."""
        if entry.checking is not None:
            entry.checking.cancel()  # and closes them
            entry.checking = None
        elif entry.shard is not None:
            entry.shard.checksums.close()

    def close(self) -> None:
        """End what is done beside the loop."""
        works = [w for e in self._entries.values() for w in (e.checking, e.opening) if w is not None]
        for work in works:
            work.cancel()
        for entry in self._entries.values():
            self._let_go(entry)
        for work in works:
            work.join(_JOIN_S)


def signature_of(directory: Path) -> Signature:
    """Changes when a file below the directory does; () if it cannot be read."""
    try:
        found = [(str(path), path.stat()) for path in sorted(directory.rglob("*"))]
        return tuple((path, s.st_ino, s.st_size, max(s.st_mtime_ns, s.st_ctime_ns)) for path, s in found)
    except OSError:
        return ()


def _line(name: str, entry: _Entry) -> str:
    """A collection's part of the note."""
    said = []
    if entry.shard is None:
        said.append(f"unavailable: {entry.reason}")
    if entry.refused:
        said.append(f"not reloaded: {entry.refused}")
    if entry.checking is not None and entry.shard is not None:
        share = entry.shard.checksums.read_bytes / max(entry.shard.checksums.total_bytes, 1)
        said.append(f"checksums {share:.0%} compared")
    return f"collection {name}: {', '.join(said)}" if said else ""
