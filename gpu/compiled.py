"""Compiling with numba, and keeping the machine code for the next process without ever keeping it too long.

numba drops a function's cached code when the function's own file changes, but not when a file changes whose functions
it has inlined. Here the code of every function is bound to all sources of `gpu`.
"""

import hashlib
from pathlib import Path
from typing import Any

from numba import njit


def _digest() -> str:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


_STAMP = _digest()


def compiled(function: Any) -> Any:
    """`function`, compiled at its first call, without the interpreter's lock, and cached on disk."""
    dispatcher = njit(nogil=True, cache=True, error_model="numpy")(function)
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):  # numba's own name for what it compares
        file._source_stamp = _STAMP
    return dispatcher
