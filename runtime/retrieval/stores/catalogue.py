"""Durable catalogue of files, stores, their files, batches and responses: one table in SQLite.

A change that returned survives the process and the machine. Methods block on the disk and are thread-safe.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from runtime.errors import CollectionError, NoRoom
from runtime.retrieval.collections.disk import acquire_lock
from runtime.retrieval.stores.records import (
    Batch,
    FileStatus,
    LimitExceeded,
    Record,
    Store,
    StoredFile,
    StoredResponse,
    StoreFile,
    UnknownObject,
)

R = TypeVar("R", bound=Record)
_NOUNS: dict[type[msgspec.Struct], str] = {
    StoredFile: "file",
    Store: "vector store",
    StoreFile: "file of the vector store",
    Batch: "file batch",
    StoredResponse: "response",
}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, parent TEXT NOT NULL, id TEXT NOT NULL,
    tenant TEXT NOT NULL, status TEXT NOT NULL, label TEXT NOT NULL, bytes INTEGER NOT NULL, body BLOB NOT NULL,
    UNIQUE (kind, parent, id));
CREATE INDEX IF NOT EXISTS by_order ON records (kind, parent, number);
CREATE INDEX IF NOT EXISTS by_status ON records (kind, status);
CREATE INDEX IF NOT EXISTS by_id ON records (id);
"""
_encode = msgspec.json.Encoder().encode


class Usage(NamedTuple):
    """Number of records and their bytes."""

    number: int = 0
    bytes: int = 0


class Page(NamedTuple):
    """How a list is read, by OpenAI's parameters. `before` and `after` are ids."""

    limit: int = 20
    descending: bool = True
    after: str = ""
    before: str = ""


class Catalogue:
    """The records. `path` None: in memory. Raises `CollectionError`, also `NoRoom`, if the disk fails, and
    `CollectionBusy` if another process has the folder: of two, one would wait forever to index its clients' files."""

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.RLock()
        with _disk_errors(), ExitStack() as opened:
            if path is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                opened.callback(os.close, acquire_lock(path.parent))
                path.touch(mode=0o600)
            self._connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            opened.callback(self._connection.close)
            self._connection.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_SCHEMA}")
            self._opened = opened.pop_all()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes within it durable together, or none."""
        with self._lock, _disk_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    # ---- single records

    def put(self, record: Record) -> None:
        """Store a record, or replace the one with its id."""
        parent = record.store if isinstance(record, StoreFile | Batch) else ""
        status: str = record.status if isinstance(record, StoreFile) else ""
        if isinstance(record, Store) and record.deleted:
            status = "deleted"
        elif isinstance(record, Store | StoredFile) and record.expires_at is not None:
            status = "expiring"
        label = record.batch if isinstance(record, StoreFile) else ""
        label = record.purpose if isinstance(record, StoredFile) else label
        body = _encode(record)
        size = {StoredFile: "bytes", StoreFile: "usage_bytes"}.get(type(record))
        taken = int(getattr(record, size)) if size else len(body)
        with self._lock, _disk_errors():
            self._connection.execute(
                "INSERT INTO records (kind, parent, id, tenant, status, label, bytes, body) VALUES (?,?,?,?,?,?,?,?) "
                "ON CONFLICT (kind, parent, id) DO UPDATE SET status=excluded.status, label=excluded.label, "
                "bytes=excluded.bytes, body=excluded.body",
                (_kind(type(record)), parent, record.id, record.tenant, status, label, taken, body),
            )

    def find(self, kind: type[R], id: str, parent: str = "") -> R | None:
        """Return a record, also one that is marked as deleted."""
        rows = self._rows("SELECT body FROM records WHERE kind=? AND parent=? AND id=?", _kind(kind), parent, id)
        return msgspec.json.decode(rows[0][0], type=kind) if rows else None

    def get(self, kind: type[R], id: str, tenant: str | None, parent: str = "") -> R:
        """Return a record that a tenant may see; None sees all. Raises `UnknownObject`."""
        entry = self.find(kind, id, parent)
        if entry is None or tenant not in (None, entry.tenant) or _is_deleted(entry):
            raise UnknownObject(f"no {_NOUNS[kind]} has the id {id[:128]!r}", "id")
        return entry

    def remove(self, kind: type[Record], id: str, parent: str = "") -> None:
        """Remove a record, if it exists."""
        with self._lock, _disk_errors():
            self._connection.execute(
                "DELETE FROM records WHERE kind=? AND parent=? AND id=?", (_kind(kind), parent, id)
            )

    def remove_children(self, store: str) -> None:
        """Remove the files and batches of a store from the catalogue."""
        with self._lock, _disk_errors():
            self._connection.execute("DELETE FROM records WHERE parent=?", (store,))

    # ---- many records

    def page(
        self,
        kind: type[R],
        page: Page,
        tenant: str | None,
        parent: str = "",
        *,
        status: FileStatus | None = None,
        label: str | None = None,
    ) -> tuple[list[R], bool]:
        """Return one page of the records that a tenant may see, and whether more follow. Raises `UnknownObject`.

        label: the batch of a store's files, the purpose of files.
        """
        where, values = "kind=? AND parent=? AND status != 'deleted'", [_kind(kind), parent]
        for column, value in (("tenant", tenant), ("status", status), ("label", label)):
            if value is not None:
                where, values = f"{where} AND {column}=?", [*values, value]
        for id, later in ((page.after, not page.descending), (page.before, page.descending)):
            if id:
                self.get(kind, id, tenant, parent)
                sign = ">" if later else "<"
                where += f" AND number {sign} (SELECT number FROM records WHERE kind=? AND parent=? AND id=?)"
                values = [*values, _kind(kind), parent, id]
        backwards = bool(page.before) and not page.after
        order = "DESC" if page.descending != backwards else "ASC"
        rows = self._rows(
            f"SELECT body FROM records WHERE {where} ORDER BY number {order} LIMIT ?", *values, page.limit + 1
        )
        entries = [msgspec.json.decode(row[0], type=kind) for row in rows[: page.limit]]
        return entries[::-1] if backwards else entries, len(rows) > page.limit

    def ids(self, kind: type[Record], tenant: str | None) -> list[str]:
        """Return the ids of the records that a tenant may see, the newest first."""
        where, values = ("AND tenant=?", [tenant]) if tenant is not None else ("", [])
        query = f"SELECT id FROM records WHERE kind=? AND status != 'deleted' {where} ORDER BY number DESC"
        return [id for (id,) in self._rows(query, _kind(kind), *values)]

    def with_status(self, kind: type[R], status: str, parent: str | None = None) -> list[R]:
        """Return the records with a status, oldest first."""
        where, values = ("AND parent=?", [parent]) if parent is not None else ("", [])
        rows = self._rows(
            f"SELECT body FROM records WHERE kind=? AND status=? {where} ORDER BY number", _kind(kind), status, *values
        )
        return [msgspec.json.decode(row[0], type=kind) for row in rows]

    def unfinished(self, store: str) -> dict[str, FileStatus]:
        """Return the status of the files of a store that are not completed, oldest first."""
        query = "SELECT id, status FROM records WHERE kind=? AND parent=? AND status != 'completed' ORDER BY number"
        return dict(self._rows(query, _kind(StoreFile), store))

    def stores_of(self, file: str) -> list[StoreFile]:
        """Return the entries of a file in all stores."""
        rows = self._rows("SELECT body FROM records WHERE id=? AND kind=?", file, _kind(StoreFile))
        return [msgspec.json.decode(row[0], type=StoreFile) for row in rows]

    def counts(self, store: str, batch: str | None = None) -> dict[str, Usage]:
        """Return number and bytes of a store's files by status."""
        where, values = ("AND label=?", [batch]) if batch is not None else ("", [])
        rows = self._rows(
            f"SELECT status, count(*), sum(bytes) FROM records WHERE kind=? AND parent=? {where} GROUP BY status",
            _kind(StoreFile), store, *values,
        )  # fmt: skip
        return {status: Usage(count, size) for status, count, size in rows}

    def usage(self, *kinds: type[Record], tenant: str | None = None) -> Usage:
        """Return number and bytes of all records of these kinds, or of a tenant's."""
        where, values = ("AND tenant=?", [tenant]) if tenant is not None else ("", [])
        names = ",".join("?" * len(kinds))
        ((count, size),) = self._rows(
            f"SELECT count(*), coalesce(sum(bytes), 0) FROM records WHERE kind IN ({names}) {where}",
            *map(_kind, kinds), *values,
        )  # fmt: skip
        return Usage(count, size)

    def oldest(self, kind: type[R], count: int, tenant: str | None = None) -> list[R]:
        """Return the oldest records of a kind, of all tenants or of one."""
        where, values = ("AND tenant=?", [tenant]) if tenant is not None else ("", [])
        rows = self._rows(
            f"SELECT body FROM records WHERE kind=? {where} ORDER BY number LIMIT ?", _kind(kind), *values, count
        )
        return [msgspec.json.decode(row[0], type=kind) for row in rows]

    def close(self) -> None:
        with self._lock:
            self._opened.close()

    def _rows(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock, _disk_errors():
            return self._connection.execute(query, values).fetchall()


class Quota(NamedTuple):
    """A limit shared by tenants: a restricted one ("": unrestricted) has at most half of what the others leave."""

    limit: int
    noun: str

    def allowed(self, total: int, own: int, tenant: str) -> int:
        """Return how much a tenant may have, where `total` is used, `own` of it by the tenant."""
        left = max(self.limit - (total - own), 0)
        return left // 2 if tenant else left

    def check(self, more: int, total: int, own: int, tenant: str) -> None:
        """Raise `LimitExceeded` if `more` would be too much."""
        if own + more > (allowed := self.allowed(total, own, tenant)):
            raise LimitExceeded(f"{own + more:,} {self.noun} would exceed the limit of {allowed:,}: delete some first")


def _kind(kind: type[msgspec.Struct]) -> str:
    return kind.__name__


def _is_deleted(record: Record) -> bool:
    return (isinstance(record, Store) and record.deleted) or (
        isinstance(record, StoreFile) and record.status == "deleted"
    )


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        full = isinstance(error, sqlite3.OperationalError) and "full" in str(error)
        raise (NoRoom if full else CollectionError)(f"the catalogue of stores cannot be used: {error}") from error
    except OSError as error:
        raise CollectionError(f"the catalogue of stores cannot be opened: {error}") from error
