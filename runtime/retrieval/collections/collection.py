"""A collection in a directory: made, opened, described, verified.

bulk_load.build(Path("passages.jsonl"), Path("docs"))
with Collection.open(Path("docs")) as docs:
    rows, distances = docs.search(load_embedder(docs.embedder).embed(["…"]), k=4)
    passages = docs.get(rows[0])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gpu import GraphIndex
from gpu.index.storage import CODE_FILES
from runtime.errors import CollectionError
from runtime.retrieval.collections.description import INDEX, read_manifest
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.log import log_files
from runtime.retrieval.collections.part import ignore
from runtime.retrieval.collections.reader import CollectionReader


class Collection(CollectionReader):
    """A collection as it was when it was opened: any number of processes and threads may use it."""

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Map a collection into memory. Checks the sizes of its files, not their contents: see `verify`.

        Raises `CollectionError` that names the missing, foreign or damaged file.
        """
        return cls(directory, prepare=ignore)

    @property
    def indexes(self) -> list[GraphIndex]:
        """The indexes of the segments."""
        return [segment.index for segment in self.state.segments]

    @property
    def index(self) -> GraphIndex:
        """The index of a collection of one segment. Raises `CollectionError` for another one."""
        if len(self.indexes) != 1:
            raise CollectionError(f"the collection has {len(self.indexes)} segments, each with an index of its own")
        return self.indexes[0]

    @property
    def size(self) -> int:
        """Number of documents, or of vectors without documents."""
        return self.state.count

    def get(self, rows: Sequence[int] | NDArray[np.int64]) -> list[Document]:
        """Return the documents of rows, in order. Raises `CollectionError` for a row that is not there."""
        documents = self.state.documents([int(row) for row in rows])
        if None in documents:
            raise CollectionError(f"{self.directory} has no row {rows[documents.index(None)]}")
        return [one for one in documents if one is not None]

    # ---- sizes on disk, in bytes

    @property
    def index_bytes(self) -> int:
        """Of the indexes; `code_bytes` is a part of it."""
        return sum(self._index_sizes().values())

    @property
    def code_bytes(self) -> int:
        """Of the indexes' neighbour codes."""
        return sum(size for path, size in self._index_sizes().items() if path.name in CODE_FILES)

    def _index_sizes(self) -> dict[Path, int]:
        files = (path for segment in self.state.segments for path in (segment.path / INDEX).iterdir())
        return {path: path.stat().st_size for path in files}

    @property
    def log_bytes(self) -> int:
        """Of the log."""
        return sum(path.stat().st_size for _, path in log_files(self.directory))

    @classmethod
    def verify(cls, directory: Path) -> str:
        """Verify all files; return a message if a crash left an incomplete record, else "".

        Raises `CollectionError` that names the damaged file.
        """
        with cls.open(directory) as collection:
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
            torn_bytes = collection.torn_bytes
        if not torn_bytes:
            return ""
        return f"the last {torn_bytes} bytes of the log are an incomplete record; the next writer cuts them"
