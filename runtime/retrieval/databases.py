"""SQLite files that do not change: opened without locks or a journal, so that no write permission is needed."""

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runtime.errors import CollectionError, CollectionReplaced
from runtime.files import check_regular

_MAX_VALUE_BYTES = 64 << 20

Formats = Mapping[tuple[int, int], Sequence[str]]
"""The statements that made a file's tables, by its application id and version in SQLite's own header."""


class ReadOnlyDatabase:
    """An open file. Thread-safe. `version`: its own.

    Methods raise `CollectionError` for a damaged file, and `CollectionReplaced` once it is closed.
    """

    def __init__(self, path: Path, kind: str, formats: Formats) -> None:
        """Open a file. Raises `CollectionError` if it is missing, damaged, or has none of the formats; `kind`: what it
        should be, for messages."""
        if not path.is_file():
            raise CollectionError(f"{path} is missing")
        self._path, self._lock = path, threading.Lock()  # a row takes microseconds: no connection for each thread
        try:
            address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        except sqlite3.Error as error:
            raise self._damaged(error) from error
        (application_id,), (self.version,) = (
            next(self.rows(f"PRAGMA {name}")) for name in ("application_id", "user_version")
        )
        if (tables := formats.get((application_id, self.version))) is None:
            raise CollectionError(f"{path} is not a {kind} of a known version, or damaged")
        found = [sql for (sql,) in self.rows("SELECT sql FROM main.sqlite_master WHERE name NOT LIKE 'sqlite_%'")]
        # Other tables could hold other types, and a query of a view could run forever.
        if Counter(found) != Counter(tables):  # of any types: a statement may be damaged, too
            raise CollectionError(f"{path} is damaged: its tables have another schema")

    def rows(self, sql: str, *values: object) -> Iterator[Any]:
        """Yield the rows of a query, each of which is read when it is asked for."""
        try:
            with self._lock:
                cursor = self._connection.execute(sql, values)
            while True:
                with self._lock:
                    row = cursor.fetchone()
                if row is None:
                    return
                yield row
        except sqlite3.ProgrammingError as error:
            raise CollectionReplaced(f"{self._path} is closed") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> CollectionError:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_CANTOPEN:
            return CollectionError(f"{self._path} is damaged: {error}")
        try:
            check_regular(self._path)
        except OSError as reason:
            return CollectionError(f"{self._path} cannot be opened: {reason.strerror or reason}")
        return CollectionError(f"{self._path} cannot be opened: {error}")

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self.close()
