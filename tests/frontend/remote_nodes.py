"""Nodes that each serve a part of a collection, and raw servers that replace them."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.retrieval.attributes.filters import decode_filter, parse_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.search.query import Query

HASHING = HashingEmbedder(64)
KEY = "a-key"
WORDS = ["cats", "dogs", "fish", "birds", "purr", "bark", "swim", "sing", "sleep", "run"]
_COUNTS = np.random.default_rng(0).integers(0, 9, (40, len(WORDS)))  # so that no two are equidistant from a query
DOCUMENTS = [
    UpsertDocument(
        f"d{number}", " ".join(f"{word} " * int(n) for word, n in zip(WORDS, counts, strict=True)), "", {"n": number}
    )
    for number, counts in enumerate(_COUNTS)
]


class NodeCollection:
    """A node's collection `docs` with hashing embeddings, searched without a pool."""

    def __init__(self, directory: Path, documents: list[UpsertDocument]) -> None:
        create(directory, 64, degree=8)
        with CollectionWriter(directory, background=False, embedder=HASHING) as writer:
            writer.upsert(documents)
        self.reported_summary = CollectionSummary(
            True, len(documents), len(documents), dim=64, metric="cosine", embedder="hashing-64"
        )
        self._directory = directory

    async def search(
        self, query: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        on_embedded()
        vector = query.vector if query.vector is not None else HASHING.embed([query.text], "query")[0]
        with CollectionReader(self._directory) as reader:
            rows, distances = reader.search(
                np.array([vector], np.float32),
                query.spec.k,
                filter=decode_filter(query.spec.filter) if query.spec.filter else None,
            )
            found = reader.documents(rows[0][rows[0] >= 0].tolist())
        return [
            Passage(one.id, one.title, float(distance), one.text, one.attributes)
            for one, distance in zip(found, distances[0], strict=False)
            if one is not None
        ]

    def summary(self, collection: str) -> CollectionSummary:
        return self.reported_summary

    def missing(self) -> list[str]:
        return []

    def unavailable(self) -> dict[str, str]:
        return {}


async def raw_server(content: bytes, prefix: bytes = b"") -> asyncio.Server:
    """Start a server that answers the first request of each connection with `content` if it begins with `prefix`.

    The connection stays open; b"" sends no answer.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(content if head.startswith(prefix) else b"")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await reader.read()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def url_of(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


UNREACHABLE_URL = "http://127.0.0.1:1"
SOME_FILTER = parse_filter({
    "type": "and",
    "filters": [{"type": "gte", "key": "n", "value": 10}, {"type": "nin", "key": "n", "value": [11]}],
})  # fmt: skip
