"""Vectors of texts that were embedded lately, bounded by memory."""

from collections import OrderedDict

from runtime.retrieval.embedding.embedder import Vectors

CACHE_BYTES = 32 << 20
_ENTRY_BYTES = 512  # of the objects besides text and vector
Key = tuple[str, str]
"""Embedder with the kind of text, and the text."""


class VectorCache:
    """The least recently found go first. Not thread-safe."""

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._vectors: OrderedDict[Key, Vectors] = OrderedDict()

    def find(self, key: Key) -> Vectors | None:
        """Return the vector [dim] of a text; it is read-only."""
        vector = self._vectors.get(key)
        if vector is not None:
            self._vectors.move_to_end(key)
        return vector

    def put(self, key: Key, vector: Vectors) -> None:
        """Keep a vector; it becomes read-only."""
        if key in self._vectors:
            return
        vector.flags.writeable = False
        self._vectors[key] = vector
        self.size_bytes += _size(key, vector)
        while self.size_bytes > self._limit_bytes:
            old, dropped = self._vectors.popitem(last=False)
            self.size_bytes -= _size(old, dropped)


def _size(key: Key, vector: Vectors) -> int:
    return vector.nbytes + 4 * len(key[1]) + _ENTRY_BYTES
