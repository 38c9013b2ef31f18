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
        return next(iter(self._records(kind, parent=parent, id=id)), None)

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
        where, values = "AND status != 'deleted'", list[object]()
        for edge, id, later in (
            ("after", page.after, not page.descending), ("before", page.before, page.descending),
        ):  # fmt: skip
            if id:
                try:
                    self.get(kind, id, tenant, parent)
                except UnknownObject as error:
                    raise UnknownObject(error.message, edge) from error
                sign = ">" if later else "<"
                where += f" AND number {sign} (SELECT number FROM records WHERE kind=? AND parent=? AND id=?)"
                values += [_kind(kind), parent, id]
        backwards = bool(page.before) and not page.after
        order = "DESC" if page.descending != backwards else "ASC"
        tail, values = f"{where} ORDER BY number {order} LIMIT ?", [*values, page.limit + 1]
        records = self._records(kind, tail, *values, parent=parent, tenant=tenant, status=status, label=label)
        entries = records[: page.limit]
        return entries[::-1] if backwards else entries, len(records) > page.limit

    def ids(self, kind: type[Record], tenant: str | None) -> list[str]:
        """Return the ids of the records that a tenant may see, the newest first."""
        rows = self._rows("id", kind, "AND status != 'deleted' ORDER BY number DESC", tenant=tenant)
        return [id for (id,) in rows]

    def with_status(self, kind: type[R], status: str, parent: str | None = None) -> list[R]:
        """Return the records with a status, oldest first."""
        return self._records(kind, "ORDER BY number", status=status, parent=parent)

    def unfinished(self, store: str) -> dict[str, FileStatus]:
        """Return the status of the files of a store that are not completed, oldest first."""
        return dict(self._rows("id, status", StoreFile, "AND status != 'completed' ORDER BY number", parent=store))

    def stores_of(self, file: str) -> list[StoreFile]:
        """Return the entries of a file in all stores."""
        return self._records(StoreFile, id=file)

    def counts(self, store: str, batch: str | None = None) -> dict[str, Usage]:
        """Return number and bytes of a store's files by status."""
        rows = self._rows("status, count(*), sum(bytes)", StoreFile, "GROUP BY status", parent=store, label=batch)
        return {status: Usage(count, size) for status, count, size in rows}

    def usage(self, *kinds: type[Record], tenant: str | None = None) -> Usage:
        """Return number and bytes of all records of these kinds, or of a tenant's."""
        used = [self._rows("count(*), coalesce(sum(bytes), 0)", kind, tenant=tenant)[0] for kind in kinds]
        return Usage(*map(sum, zip(*used, strict=True)))

    def oldest(self, kind: type[R], count: int, tenant: str | None = None) -> list[R]:
        """Return the oldest records of a kind, of all tenants or of one."""
        return self._records(kind, "ORDER BY number LIMIT ?", count, tenant=tenant)

    def close(self) -> None:
        with self._lock:
            self._opened.close()

    def _records(self, kind: type[R], tail: str = "", *values: object, **equal: str | None) -> list[R]:
        return [msgspec.json.decode(body, type=kind) for (body,) in self._rows("body", kind, tail, *values, **equal)]

    def _rows(
        self, columns: str, kind: type[msgspec.Struct], tail: str = "", *values: object, **equal: str | None
    ) -> list[tuple]:  # type: ignore[type-arg]
        """Return columns of the records of a kind that have the values in `equal` (None: any). tail: of the query."""
        wanted = {column: value for column, value in equal.items() if value is not None}
        where = "".join(f" AND {column}=?" for column in wanted)
        query = f"SELECT {columns} FROM records WHERE kind=?{where} {tail}"
        with self._lock, _disk_errors():
            return self._connection.execute(query, (_kind(kind), *wanted.values(), *values)).fetchall()


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
