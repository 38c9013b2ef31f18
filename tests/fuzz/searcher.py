"""Subprocess that opens and searches collections, so that a crash in compiled code does not end the test process.

It reads one directory per line and answers each with a JSON line: `{"answer": [[ids], …], "verified": bool}`,
`{"refused": class, "message": message}` for a typed error, `{"fault": traceback}` for anything else.
"""

import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from gpu import GpuError
from runtime.errors import TrinityError
from runtime.retrieval.collections.reader import CollectionReader

K, TOP_M = 5, 32
ROOM_BYTES = 256 << 20  # above the process's mappings after it has searched a good collection


def queries(dim: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(4, dim)).astype(np.float32)


def answered(directory: Path) -> dict[str, Any]:
    """Open, search and fetch texts as a node's worker does, and verify as `index verify` does."""
    with CollectionReader(directory) as collection:
        assert collection.state.file_bytes() > 0
        ids, distances = collection.search(queries(collection.description.dim), K, TOP_M, search_width=2)
        collection.search(queries(collection.description.dim), 1, 1)
        assert ids.shape == distances.shape == (4, K)
        answer = [[int(i) for i in row] for row in ids]
        texts: list[list[str]] = []
        for row in ids:
            found = [document for document in collection.documents(row[row >= 0].tolist()) if document is not None]
            assert len(found) == np.count_nonzero(row >= 0)
            for document in found:
                assert {type(document.id), type(document.title), type(document.text)} == {str}, document
            texts.append([document.id for document in found])
    try:
        CollectionReader.verify(directory)
    except TrinityError as error:
        return {"answer": answer, "texts": texts, "verified": False, "message": error.message}
    return {"answer": answer, "texts": texts, "verified": True}


def outcome(directory: Path) -> dict[str, Any]:
    try:
        return answered(directory)
    except (TrinityError, GpuError) as error:
        return {"refused": type(error).__name__, "message": str(error)}
    except Exception:
        return {"fault": traceback.format_exc()}


def bound_memory() -> None:
    """Limit memory, so that an allocation of an unchecked size raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(good: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for directory in good:
        print(json.dumps(outcome(Path(directory))), flush=True)
    bound_memory()
    for line in sys.stdin:
        print(json.dumps(outcome(Path(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
