"""Writes to a node's live collections, inside an event loop: one writer a collection, in this process.

A writer is opened by its collection's first write, and holds the collection's lock from then on: another process is
told that the collection is busy. What returns is in the log, and found by searches within a moment. A process that
takes this one's place goes on where the log ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from runtime.errors import (
    CollectionBusy,
    CollectionError,
    InvalidDocument,
    InvalidRequest,
    NoRoom,
    Overloaded,
    Unavailable,
)
from runtime.retrieval.attributes.filters import AttributeBinding, Filter
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors, embedding_text
from runtime.retrieval.live.state import WriterState
from runtime.retrieval.live.storage.manifest import is_live
from runtime.retrieval.live.validation import UpsertDocument, check
from runtime.retrieval.live.writer import LiveWriter

MAX_CONCURRENT_WRITES = 32
"""Writes that are under way; more are refused."""
_THREADS = 8  # that wait for the disk together: writes which come at once share a record, and its sync
_EMBEDDED_AT_ONCE = 16  # texts; between two such batches queries of searches are embedded
_T = TypeVar("_T")
Observe = Callable[[float], None]
Embed = Callable[[Embedder, Sequence[str], TextKind], Awaitable[tuple[Vectors, int]]]
"""The texts' vectors [n, dim], and how many tokens they have."""


class WriterService:
    """The writers of the live collections among `directories`, directories by name.

    embedder_of: a collection's own, for documents that come without vectors. observe: is told how many seconds each
    write took until it was acknowledged.
    """

    def __init__(
        self,
        directories: Mapping[str, Path],
        embed: Embed,
        embedder_of: Callable[[str], Embedder],
        observe: Observe = lambda seconds: None,
    ) -> None:
        self._directories, self._embed, self._embedder_of, self._observe = directories, embed, embedder_of, observe
        self._writers: dict[str, LiveWriter] = {}
        self._opening: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in directories}
        self._flushing: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in directories}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="write")
        self._running = 0

    async def upsert(
        self, name: str, documents: Sequence[UpsertDocument], owner: AttributeBinding | None = None
    ) -> int:
        """Store documents, in the place of those with their ids; all of them or none. How many.

        Raises as `LiveWriter.upsert`, `InvalidRequest` for a collection that is none of these, `Overloaded`.
        """
        check(documents)
        return await self._write(name, lambda writer, given: writer.upsert(given, owner), documents)

    async def delete(self, name: str, ids: Sequence[str], owner: AttributeBinding | None = None) -> int:
        """Delete documents by id; how many were there. Raises as `upsert`."""
        return await self._write(name, lambda writer, _: writer.delete(ids, owner))

    async def delete_where(self, name: str, filter: Filter) -> int:
        """Delete what passes a filter; how many. Raises as `upsert`, and `InvalidFilter`."""
        return await self._write(name, lambda writer, _: writer.delete_where(filter))

    async def flush(self, name: str) -> None:
        """Seal what is in the log only, and wait for that; `states` says how far it is. Raises as `upsert`.

        One after the other, so that however many ask, writes have threads.
        """
        async with self._flushing[self._known(name)]:
            await self._acknowledged(name, lambda writer, _: writer.flush(), ())

    def states(self) -> dict[str, WriterState]:
        """Of the writers that are open."""
        return {name: writer.statistics() for name, writer in self._writers.items()}

    def close(self) -> None:
        """End all writers. What was acknowledged is in their logs."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    async def _write(
        self,
        name: str,
        write: Callable[[LiveWriter, Sequence[UpsertDocument]], _T],
        documents: Sequence[UpsertDocument] = (),
    ) -> _T:
        if self._running >= MAX_CONCURRENT_WRITES:
            raise Overloaded(f"{self._running} writes are under way, the limit is {MAX_CONCURRENT_WRITES}")
        begin = time.monotonic()
        self._running += 1
        try:
            done = await self._acknowledged(name, write, documents)
        finally:
            self._running -= 1
        self._observe(time.monotonic() - begin)
        return done

    async def _acknowledged(
        self,
        name: str,
        write: Callable[[LiveWriter, Sequence[UpsertDocument]], _T],
        documents: Sequence[UpsertDocument],
    ) -> _T:
        writer = await self._writer(name)
        given = await self._with_vectors(name, documents)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, write, writer, given)
        except (NoRoom, CollectionBusy):
            raise
        except CollectionError:  # whether its log is whole is seen when it is opened anew
            await self._drop(name)
            raise

    async def _with_vectors(self, name: str, documents: Sequence[UpsertDocument]) -> Sequence[UpsertDocument]:
        bare = [number for number, document in enumerate(documents) if document.vector is None]
        if not bare:
            return documents
        try:
            embedder = self._embedder_of(name)
        except InvalidRequest as error:
            raise InvalidDocument(
                f"document {documents[bare[0]].id!r} has no vector, and collection {name!r} has no embedder", "vector"
            ) from error
        given = list(documents)
        for begin in range(0, len(bare), _EMBEDDED_AT_ONCE):
            part = bare[begin : begin + _EMBEDDED_AT_ONCE]
            texts = [embedding_text(given[number].title, given[number].text) for number in part]
            vectors, _ = await self._embed(embedder, texts, "passage")
            for number, vector in zip(part, vectors, strict=True):
                given[number] = msgspec.structs.replace(given[number], vector=vector)
        return given

    def _known(self, name: str) -> str:
        """A live collection's. Raises `InvalidRequest`, and `Unavailable` where its directory was removed or moved."""
        directory = self._directories.get(name)
        if directory is not None and not directory.exists():
            raise Unavailable(f"collection {name!r} is unavailable: {directory} is not there")
        if directory is None or not is_live(directory):
            raise InvalidRequest(f"collection {name!r} is not a live one: it changes by being built anew", "collection")
        return name

    async def _writer(self, name: str) -> LiveWriter:
        directory = self._directories[self._known(name)]
        async with self._opening[name]:
            writer = self._writers.get(name)
            if writer is None:
                loop = asyncio.get_running_loop()
                try:
                    writer = await loop.run_in_executor(self._threads, LiveWriter, directory)
                except RuntimeError as error:  # the threads are gone
                    raise Unavailable("the node is stopping") from error
                self._writers[name] = writer
            return writer

    async def _drop(self, name: str) -> None:
        async with self._opening[name]:
            writer = self._writers.pop(name, None)
            if writer is not None:
                await asyncio.get_running_loop().run_in_executor(self._threads, writer.close)
