"""Nodes that have a part of a collection each, and what answers in their place."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.retrieval.attributes.filters import decode_filter, filter_bytes, parse_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.live.collection import create
from runtime.retrieval.live.reader import LiveReader, passage_attributes
from runtime.retrieval.live.validation import UpsertDocument
from runtime.retrieval.live.writer import LiveWriter
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.query import PassageQuery

HASHING = HashingEmbedder(64)
KEY = "a-key"
WORDS = ["cats", "dogs", "fish", "birds", "purr", "bark", "swim", "sing", "sleep", "run"]
_COUNTS = np.random.default_rng(0).integers(0, 9, (40, len(WORDS)))  # so that no two are equally far from a query
DOCUMENTS = [
    UpsertDocument(
        f"d{number}", " ".join(f"{word} " * int(n) for word, n in zip(WORDS, counts, strict=True)), "", {"n": number}
    )
    for number, counts in enumerate(_COUNTS)
]


class Part:
    """The collection `docs` of a node, of some documents, embedded by hashing and searched without a pool."""

    def __init__(self, directory: Path, documents: list[UpsertDocument]) -> None:
        create(directory, 64, degree=8)
        with LiveWriter(directory, background=False, embedder=HASHING) as writer:
            writer.upsert(documents)
        self.told = CollectionSummary(
            True, len(documents), len(documents), dim=64, metric="cosine", embedder="hashing-64"
        )
        self._directory = directory

    async def search(self, asked: PassageQuery, *, on_embedded: Callable[[], None], timeout_s: float) -> list[Passage]:
        on_embedded()
        query = asked.vector if asked.query is None else HASHING.embed([asked.query], "query")[0]
        with LiveReader(self._directory) as reader:
            rows, distances = reader.search(
                np.array([query], np.float32),
                asked.k,
                filter=decode_filter(filter_bytes(asked.filter)) if asked.filter else None,
            )
            found = reader.documents(rows[0][rows[0] >= 0].tolist())
        return [
            Passage(one.id, one.title, float(distance), one.text, passage_attributes(one))
            for one, distance in zip(found, distances[0], strict=False)
            if one is not None
        ]

    def summary(self, collection: str) -> CollectionSummary:
        return self.told

    def missing(self) -> list[str]:
        return []

    def unavailable(self) -> dict[str, str]:
        return {}


async def answer(content: bytes, to: bytes = b"") -> asyncio.Server:
    """A server that answers the first request of a connection with this, if that begins with `to`, and keeps the
    connection; b"" is no answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(content if head.startswith(to) else b"")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await reader.read()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def url_of(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


NOBODY = "http://127.0.0.1:1"
SOME = parse_filter({
    "type": "and",
    "filters": [{"type": "gte", "key": "n", "value": 10}, {"type": "nin", "key": "n", "value": [11]}],
})  # fmt: skip
