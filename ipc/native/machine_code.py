"""The on-disk cache of a compiled function's machine code.

numba reads and writes one directory: the first that this process can write to, of NUMBA_CACHE_DIR, `__pycache__` beside
the source, and the user's cache. Here code beside the source is found also where that directory is read-only, as in an
image whose caches were filled when it was made. Code is loaded from directories of this user or root alone.

Processes that start together on an empty cache do not compile the same function: the first one holds the function's
lock, and the others wait and load its code.

    process A    not found ──▶ lock ──▶ compile ──▶ save ──▶ unlock
    process B    not found ──▶ wait for the lock ··········▶ found
"""

import contextlib
import fcntl
import os
import threading
import time
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys

from ipc.native.linked import Files
from ipc.native.private import is_private

_LOCK_POLL_S = 0.01
_LONGEST_S = 300.0  # a process that compiles for longer has been stopped: others compile, too


class _Beside:
    """numba's interface of a location: where Python's own cache of a source file is."""

    def __init__(self, function: Any, source: str) -> None:
        self._path = os.path.dirname(cache_from_source(os.path.abspath(source)))
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Any, source: str) -> "_Beside | None":
        return cls(function, source) if os.path.isfile(source) else None

    def get_cache_path(self) -> str:
        return self._path

    def get_source_stamp(self) -> str:
        return ""  # replaced by that of `MachineCode`

    def get_disambiguator(self) -> str:
        return str(self._line)


class _FilesBeside(Files):
    _locator_classes = (_Beside,)


class MachineCode(FunctionCache):  # type: ignore[misc]
    """The code of one function, valid for one `stamp` of its sources. `kind` keeps two versions of it apart.

    Raises RuntimeError if there is no directory to write to, or others could write to it.
    """

    _impl_class = Files

    def __init__(self, function: Any, stamp: str, kind: str) -> None:
        super().__init__(function)
        if not is_private(Path(self.cache_path)):
            raise RuntimeError(f"{self.cache_path} is writable by other users, so no code is loaded from it")
        self._kind = kind
        self._cache_file._source_stamp = stamp  # numba's is of the function's own file alone

    def compiled(self) -> None:
        """Release the lock that a search without a result has taken. Call it when the code has been saved."""

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the code for a signature, None if it is not in this directory.

        Unlike numba's, it does not fill the registries of what can be compiled, which takes .2 s: a compilation does.
        """
        rtsys.initialize(context)  # of the registries, code that counts references needs these functions
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, context)

    def has(self, signature: Any, codegen: Any) -> bool:
        """Whether the code for a signature is in this directory."""
        return self._index_key(signature, codegen) in self._cache_file._load_index()

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return (*super()._index_key(signature, codegen), self._kind)


class _Installed(MachineCode):
    """The code beside the source, read only."""

    _impl_class = _FilesBeside

    def save_overload(self, signature: Any, code: Any) -> None:
        pass


class _Both(MachineCode):
    """A cache that this process writes, with the code beside the source in addition."""

    def __init__(self, function: Any, stamp: str, kind: str) -> None:
        super().__init__(function, stamp, kind)
        self._installed = _installed(function, stamp, kind)
        if self._installed is not None and self._installed.cache_path == self.cache_path:
            self._installed = None
        self._lock = Lock(Path(f"{self._cache_file._index_path}.lock"))

    def compiled(self) -> None:
        self._lock.release()

    def has(self, signature: Any, codegen: Any) -> bool:
        return super().has(signature, codegen) or bool(self._installed and self._installed.has(signature, codegen))

    def load_overload(self, signature: Any, context: Any) -> Any:
        code = super().load_overload(signature, context)
        if code is None and self._installed is not None:
            code = self._installed.load_overload(signature, context)
        if code is None and self._lock.acquire():
            code = super().load_overload(signature, context)
        return code


class Lock:
    """A lock of one function's code between processes, by a file beside the code. It ends with its process.

    A function's lock is held while the functions that it calls are compiled, so locks are taken in the order of calls,
    in which there are no cycles.
    """

    def __init__(self, path: Path, longest_s: float = _LONGEST_S) -> None:
        self._path, self._longest_s = path, longest_s
        self._file: int | None = None
        self._releasing = threading.Lock()

    def acquire(self) -> bool:
        """Wait for the lock, unless this object holds it. Return whether it was taken now.

        It is not where files cannot be locked, and after `longest_s`.
        """
        if self._file is not None:
            return False
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        until = time.monotonic() + self._longest_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(_LOCK_POLL_S)
                    continue
                os.close(file)
                return False
            except OSError:  # not on this file system
                os.close(file)
                return False
            self._file = file
            return True

    def release(self) -> None:
        """Release the lock, if this object holds it. Several threads may at once, which have compiled the function.

        Its file is removed: the processes that wait for it find the code.
        """
        with self._releasing:
            file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(file)


def machine_code(function: Any, stamp: str, kind: str) -> MachineCode | None:
    """Return a function's cache; None if there is no directory for it."""
    try:
        return _Both(function, stamp, kind)
    except RuntimeError:  # numba's "no locator available" among them
        return _installed(function, stamp, kind)


def _installed(function: Any, stamp: str, kind: str) -> MachineCode | None:
    try:
        return _Installed(function, stamp, kind)
    except (RuntimeError, OSError):
        return None
