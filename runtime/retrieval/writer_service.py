"""Write service of a node's collections for an event loop: one `CollectionWriter` a collection, in this process.

A writer is opened by the first write to its collection, and holds the collection's lock from then on; another process
gets `CollectionBusy`. A write that returned is in the log, and in the pools, unless it says otherwise. A process that
replaces this one continues at the end of the log.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from runtime.errors import (
    CollectionBusy,
    CollectionError,
    InvalidDocument,
    InvalidRequest,
    NoRoom,
    Unavailable,
)
from runtime.retrieval.attributes.filters import AttributeBinding, Filter
from runtime.retrieval.collections.description import is_collection
from runtime.retrieval.collections.validation import UpsertDocument, check_batch
from runtime.retrieval.collections.writer import CollectionWriter, WriterState
from runtime.retrieval.embedding.embedder import (
    Embedder,
    EmbedderSpec,
    TextKind,
    Vectors,
    embedder_name,
    embedding_text,
)
from runtime.retrieval.fair_gate import FairLimit
from runtime.retrieval.fair_threads import FairThreads

MAX_CONCURRENT_WRITES = 32
"""Writes in progress; more are rejected with `Overloaded`, of one API key those beyond what is left."""
_THREADS = 8  # concurrent writes share a log record and its sync
_FLUSHES = -1  # the flow of all flushes
_OPENING = -2  # the flow of writers that are opened and closed
_T = TypeVar("_T")
Observe = Callable[[float], None]
Embed = Callable[[Embedder, Sequence[str], TextKind, int], Awaitable[tuple[Vectors, int]]]
"""Returns the texts' vectors [n, dim], and their number of tokens, for a flow."""


@dataclass(frozen=True)
class Stored:
    """Acknowledgement of an upsert. visible: whether every pool has applied it; a pool that is stalled has not yet."""

    count: int
    visible: bool


class WriterService:
    """Writers of the collections in `directories`, which are given by collection name.

    embedder_of: returns a collection's embedder, for documents without vectors. observe: called with the seconds that
    each write took until it was acknowledged.
    """

    def __init__(
        self,
        directories: Mapping[str, Path],
        embed: Embed,
        embedder_of: Callable[[str], Embedder],
        observe: Observe = lambda seconds: None,
    ) -> None:
        self._directories, self._embed, self._embedder_of, self._observe = directories, embed, embedder_of, observe
        self._writers: dict[str, CollectionWriter] = {}
        self._opening: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in directories}
        self._flushing: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in directories}
        self._threads, self._filters = FairThreads(_THREADS, "writes"), FairThreads(1, "filters of writes")
        self._limit = FairLimit(MAX_CONCURRENT_WRITES, "writes")

    async def upsert(
        self, name: str, documents: Sequence[UpsertDocument], owner: AttributeBinding | None = None, flow: int = 0
    ) -> Stored:
        """Store documents, atomically, and replace those with the same ids. Searches that begin later find them.

        flow: the API key's.

        Raises as `CollectionWriter.upsert`, but `Unavailable` for a damaged collection or a failed disk, as searches
        do, and `Overloaded`.
        """
        check_batch(documents)
        return await self._write(
            name, lambda writer, given: Stored(writer.upsert(given, owner), writer.wait_visible()), flow, documents
        )

    async def delete(self, name: str, ids: Sequence[str], owner: AttributeBinding | None = None, flow: int = 0) -> int:
        """Delete documents by id. Returns how many were deleted. Raises as `upsert`."""
        return await self._write(name, lambda writer, _: writer.delete(ids, owner), flow)

    async def delete_where(
        self, name: str, filter: Filter, owner: AttributeBinding | None = None, flow: int = 0
    ) -> int:
        """Delete the documents that pass a filter. Returns how many. Raises as `upsert`, and `InvalidFilter`."""
        return await self._write(name, lambda writer, _: writer.delete_where(filter, owner), flow, filter=filter)

    async def flush(self, name: str) -> None:
        """Seal the growing rows, and wait for it. Raises as `upsert`.

        Flushes of a collection are serialised, so that they never occupy all threads of the writes.
        """
        self._directory(name)
        async with self._flushing[name]:
            await self._run(name, lambda writer, _: writer.flush(), (), _FLUSHES)

    async def states(self) -> dict[str, WriterState]:
        """Return the statistics of the open writers. On a thread: the time grows with the number of rows."""
        writers = dict(self._writers)
        return await asyncio.to_thread(lambda: {name: writer.statistics() for name, writer in writers.items()})

    def close(self) -> None:
        """Close all writers. Acknowledged writes are in their logs."""
        self._filters.close()
        self._threads.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    async def _write(
        self,
        name: str,
        write: Callable[[CollectionWriter, Sequence[UpsertDocument]], _T],
        flow: int,
        documents: Sequence[UpsertDocument] = (),
        filter: Filter | None = None,
    ) -> _T:
        begin = time.monotonic()
        async with self._limit.counted(flow):
            if filter is not None:
                await self._evaluate(name, filter, flow)
            done = await self._run(name, write, documents, flow)
        self._observe(time.monotonic() - begin)
        return done

    async def _run(
        self,
        name: str,
        write: Callable[[CollectionWriter, Sequence[UpsertDocument]], _T],
        documents: Sequence[UpsertDocument],
        flow: int,
    ) -> _T:
        writer = await self._writer(name)
        given = await self._with_vectors(name, writer.state.description.embedder, documents, flow)
        try:
            return await self._threads.run(flow, lambda: write(writer, given))
        except (NoRoom, CollectionBusy):
            raise
        except CollectionError as error:  # close the writer: reopening it checks its log
            await self._drop(name)
            raise _unavailable(name, error) from error

    async def _evaluate(self, name: str, filter: Filter, flow: int) -> None:
        """Evaluate a filter, so that the write that follows finds the result, one after another.

        Several threads would slow each other and the event loop down.
        """
        writer = await self._writer(name)

        def evaluate() -> None:
            begin = time.monotonic()
            writer.state.rows_passing(filter)
            time.sleep(time.monotonic() - begin)  # half of the time is left to searches in this process

        await self._filters.run(flow, evaluate)

    async def _with_vectors(
        self, name: str, spec: EmbedderSpec | None, documents: Sequence[UpsertDocument], flow: int
    ) -> Sequence[UpsertDocument]:
        """Return the documents with vectors. spec: the embedder of the collection that is written to."""
        missing = [number for number, document in enumerate(documents) if document.vector is None]
        if not missing:
            return documents
        try:
            embedder = self._embedder_of(name)
        except InvalidRequest as error:
            raise InvalidDocument(
                f"document {documents[missing[0]].id!r} has no vector, and collection {name!r} has no embedder",
                "vector",
            ) from error
        if spec is not None and embedder_name(spec) != embedder.name:
            raise Unavailable(
                f"collection {name!r} was built anew with the embedder {embedder_name(spec)}, and is served with "
                f"{embedder.name}: reload it"
            )
        given = list(documents)
        texts = [embedding_text(given[number].title, given[number].text) for number in missing]
        vectors, _ = await self._embed(embedder, texts, "passage", flow)
        for number, vector in zip(missing, vectors, strict=True):
            given[number] = msgspec.structs.replace(given[number], vector=vector)
        return given

    def _directory(self, name: str) -> Path:
        """Return the directory of a collection. Raises `Unavailable` if it is missing or damaged."""
        directory = self._directories[name]
        if not directory.exists():
            raise Unavailable(f"collection {name!r} is unavailable: {directory} does not exist")
        if not is_collection(directory):
            raise Unavailable(f"collection {name!r} is unavailable: {directory} is not a collection, or damaged")
        return directory

    async def _writer(self, name: str) -> CollectionWriter:
        directory = self._directory(name)
        async with self._opening[name]:
            writer = self._writers.get(name)
            if writer is None:
                try:
                    writer = await self._threads.run(_OPENING, partial(CollectionWriter, directory))
                except (NoRoom, CollectionBusy):
                    raise
                except CollectionError as error:
                    raise _unavailable(name, error) from error
                self._writers[name] = writer
            return writer

    async def _drop(self, name: str) -> None:
        async with self._opening[name]:
            writer = self._writers.pop(name, None)
            if writer is not None:
                await self._threads.run(_OPENING, writer.close)


def _unavailable(name: str, error: CollectionError) -> Unavailable:
    return Unavailable(f"collection {name!r} is unavailable: {error.message}")
