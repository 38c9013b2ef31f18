"""Indexing of the files of stores, and the removal of their passages, in the background.

A file is `in_progress` in the catalogue until its passages are in the collection, so what a killed process left
unfinished is found there, and repeated: passages have the same ids again, and replace those written before.
"""

import asyncio
import itertools
import logging
import queue
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import PurePosixPath

from msgspec.structs import replace

from runtime.errors import BuildRefused, CollectionBusy, InvalidFilter, NoRoom, Overloaded, TrinityError, Unavailable
from runtime.files import read_regular
from runtime.node.stores_config import STORE_PREFIX, STORES
from runtime.retrieval.attributes.filters import Comparison, Filter, Scalar
from runtime.retrieval.collections.files import SOURCE
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.embedding.embedder import Embedder
from runtime.retrieval.fair_gate import FairGate
from runtime.retrieval.fair_threads import Threads
from runtime.retrieval.ingestion.isolated_reader import IsolatedReader
from runtime.retrieval.ingestion.passages import FilePassage, file_passages, passage_limit
from runtime.retrieval.ingestion.readers import SUFFIXES, check_packages
from runtime.retrieval.ingestion.sections import ParsedFile, UnreadableFile
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.collection import STORE, file_filter, stored_attributes
from runtime.retrieval.stores.configured import ConfiguredCollections, document_attributes
from runtime.retrieval.stores.file_folder import FileFolder
from runtime.retrieval.stores.records import Chunking, ErrorCode, FileStatus, Store, StoredFile, StoreFile
from runtime.retrieval.writer_service import Stored, WriterService

CONCURRENT_FILES = 4
MAX_READ_BYTES = 512 << 20
_BATCH = 32  # passages of a write
_RETRY_S = (0.2, 1.0, 5.0, 15.0)
_BUSY = (Overloaded, Unavailable, CollectionBusy)
log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The file was deleted or cancelled while it was indexed."""


class Indexer:
    """Indexes and removes files of stores. For one event loop; files of different tenants take turns.

    embedder: returns that of a collection, or raises `Unavailable` while it is not open. The files of a collection that
    is not `configured` any more stay as they are recorded.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        files: FileFolder,
        writes: WriterService,
        embedder: Callable[[str], Embedder],
        configured: ConfiguredCollections,
    ) -> None:
        self._catalogue, self._files, self._writes, self._embedder = catalogue, files, writes, embedder
        self._configured = configured
        self._gate = FairGate(CONCURRENT_FILES)
        self._threads = Threads(CONCURRENT_FILES, "files")
        self._readers = [IsolatedReader() for _ in range(CONCURRENT_FILES)]  # their processes start with a file
        self._idle: queue.SimpleQueue[IsolatedReader] = queue.SimpleQueue()
        for reader in self._readers:
            self._idle.put(reader)
        self._wanted: set[tuple[str, str]] = set()  # (store, file) to be indexed, again if that is in progress
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._removals: dict[asyncio.Task[None], tuple[str, str]] = {}  # what each removes; file "": a whole store
        self._attempts: dict[tuple[str, str], asyncio.Event] = {}  # each set if what it indexes is removed meanwhile
        self._writing: defaultdict[str, set[asyncio.Task[Stored]]] = defaultdict(set)  # by store

    async def resume(self) -> None:
        """Continue what an earlier process left unfinished."""
        for store in await asyncio.to_thread(self._catalogue.with_status, Store, "deleted"):
            self.start_removal(store)
        for status in ("deleted", "cancelled"):
            for entry in await asyncio.to_thread(self._catalogue.with_status, StoreFile, status):
                self.start_removal(entry)
        for entry in await asyncio.to_thread(self._catalogue.with_status, StoreFile, "in_progress"):
            self.index(entry)

    def index(self, entry: StoreFile) -> None:
        """Index a file of a store as it is recorded now, also if that is in progress."""
        key = entry.store, entry.id
        if self._is_gone(entry.store):
            return
        self._wanted.add(key)
        if key not in self._running:
            self._running[key] = asyncio.create_task(self._index(key, flow_of(entry.tenant)))

    def start_removal(self, removed: Store | StoreFile) -> "asyncio.Task[None]":
        """Delete the passages of a store or file that is marked as deleted or cancelled, then its records if deleted.

        Returns a task that ends when no later search finds them. It goes on if nobody waits.
        """
        key = (removed.id, "") if isinstance(removed, Store) else (removed.store, removed.id)
        for (store, file), removal in self._attempts.items():
            if store == key[0] and key[1] in ("", file):
                removal.set()
        task = asyncio.create_task(self._remove(removed, key))
        self._removals[task] = key
        task.add_done_callback(self._removals.pop)
        return task

    async def passages(self, file: StoredFile, entry: StoreFile) -> list[FilePassage]:
        """Return a file's passages in a store, in the tenant's turn.

        Raises `UnreadableFile`, `BuildRefused`, `Unavailable`.
        """
        async with self._gate.place(flow_of(entry.tenant)):
            passages, _ = await self._passages(file, entry)
            return passages

    async def text(self, file: StoredFile, tenant: str) -> str:
        """Return a file's text with its headings, in the tenant's turn. Raises `UnreadableFile`, `BuildRefused`."""

        def read() -> str:
            sections = self._parsed(file).sections
            return "\n\n".join("\n".join(filter(None, (section.heading, section.text.strip()))) for section in sections)

        async with self._gate.place(flow_of(tenant)):
            text = await asyncio.get_running_loop().run_in_executor(self._threads, read)
        if not text:
            raise UnreadableFile("there is no text in it")
        return text

    async def _passages(self, file: StoredFile, entry: StoreFile) -> tuple[list[FilePassage], int]:
        """Return a file's passages, and the bytes of their texts and vectors."""
        read = partial(self._read, file, entry.chunking, self._embedder(collection_of(entry.store)))
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    async def close(self) -> None:
        """Stop; unfinished work is continued by `resume`."""
        tasks = [*self._running.values(), *self._removals]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for reader in self._readers:  # what one reads ends with its process
            reader.close()

    # ---- indexing

    async def _index(self, key: tuple[str, str], flow: int) -> None:
        async def attempt() -> None:
            async with self._gate.place(flow):
                self._wanted.discard(key)
                self._attempts[key] = removal = asyncio.Event()  # before it looks at the catalogue
                try:
                    if removals := [task for task, removed in self._removals.items() if removed == key]:
                        await asyncio.wait(removals)  # of the same file before it was added again
                    await self._index_once(*key, removal)
                finally:
                    del self._attempts[key]

        try:
            while key in self._wanted:
                await _retried(attempt, f"file {key[1]} waits to be indexed", *_BUSY)
        except Exception:  # without an end it would stay in progress, and its client would wait
            log.exception("file %s cannot be indexed", key[1])
            await self._fail(key)
        finally:
            del self._running[key]

    async def _fail(self, key: tuple[str, str]) -> None:
        entry = await asyncio.to_thread(self._catalogue.find, StoreFile, key[1], key[0])
        if entry is not None:
            await self._end(entry, 0, "server_error", "an internal error; the node's log has it")

    async def _index_once(self, store_id: str, file_id: str, removal: asyncio.Event) -> None:
        entry = await asyncio.to_thread(self._catalogue.find, StoreFile, file_id, store_id)
        store = await asyncio.to_thread(self._catalogue.find, Store, store_id)
        file = await asyncio.to_thread(self._catalogue.find, StoredFile, file_id)
        if entry is None or file is None or entry.status != "in_progress":
            return
        if store is not None:
            prefix = f"{store_id}/{file_id}"
            attributes = stored_attributes(store_id, file_id, file.name, store.columns, entry.attributes)
        elif store_id in self._configured:
            prefix, attributes = file_id, document_attributes(file_id, file.name, entry.attributes)
        else:
            return
        try:
            passages, size = await self._passages(file, entry)
            await self._write(entry, prefix, attributes, passages, removal)
        except _Stopped:
            return
        except (UnreadableFile, BuildRefused) as error:
            known = PurePosixPath(file.name).suffix.lower() in SUFFIXES
            await self._end(entry, 0, "invalid_file" if known else "unsupported_file", str(error))
            return
        except _BUSY:
            raise
        except TrinityError as error:
            await self._delete_passages(store_id, file_id, flow_of(entry.tenant))
            await self._end(entry, 0, "server_error", error.message)
            return
        await self._end(entry, size)

    async def _end(self, entry: StoreFile, size: int, code: ErrorCode = "server_error", error: str = "") -> None:
        """Record the end of indexing, unless the file was changed meanwhile: then it is indexed again."""

        def record() -> None:
            with self._catalogue.transaction():
                now = self._catalogue.find(StoreFile, entry.id, entry.store)
                if now is not None and now.status == "in_progress" and now.revision == entry.revision:
                    status: FileStatus = "failed" if error else "completed"
                    ended = replace(now, status=status, usage_bytes=size, error_code=code, error=error[:1000])
                    self._catalogue.put(ended)

        await _recorded(record)

    async def _write(
        self,
        entry: StoreFile,
        prefix: str,
        attributes: dict[str, Scalar],
        passages: list[FilePassage],
        removal: asyncio.Event,
    ) -> None:
        """Write a file's passages, with these attributes and ids that begin with `prefix`."""
        store, collection = entry.store, collection_of(entry.store)
        for begin in range(0, len(passages), _BATCH):
            documents = [
                UpsertDocument(f"{prefix}/{number}", passage.text, passage.title, attributes)
                for number, passage in enumerate(passages[begin : begin + _BATCH], begin)
            ]
            if removal.is_set():
                raise _Stopped
            write = asyncio.create_task(self._writes.upsert(collection, documents, None, flow_of(entry.tenant)))
            self._writing[store].add(write)
            write.add_done_callback(self._writing[store].discard)
            await write
        first = len(passages)  # of what it had before, if it was split into more
        while entry.rechunked and await self._writes.delete(
            collection, [f"{prefix}/{number}" for number in range(first, first + _BATCH)], None, flow_of(entry.tenant)
        ):
            first += _BATCH

    def _read(self, file: StoredFile, chunking: Chunking, embedder: Embedder) -> tuple[list[FilePassage], int]:
        """Read a file and split it, on a thread."""
        read, title = self._parsed(file), PurePosixPath(file.name).stem[:200]
        limit = chunking.max_tokens or passage_limit(0, embedder)
        passages = list(file_passages(read, title, limit, embedder.count_tokens, chunking.overlap_tokens))
        if not passages:
            raise UnreadableFile("there is no text in it")
        size = sum(len(passage.title.encode()) + len(passage.text.encode()) for passage in passages)
        return passages, size + 4 * embedder.dim * len(passages)

    def _parsed(self, file: StoredFile) -> ParsedFile:
        """Read a file, on a thread."""
        name = PurePosixPath(file.name)
        suffix = name.suffix.lower() if name.suffix.lower() in SUFFIXES else ".txt"
        check_packages([suffix])
        try:
            content = read_regular(self._files.path(file.id), MAX_READ_BYTES)
        except OSError as error:
            raise UnreadableFile(f"its content cannot be read: {error.strerror}") from error
        reader = self._idle.get()  # there are as many as threads
        try:
            return reader.read(f"file{suffix}", content)
        finally:
            self._idle.put(reader)

    # ---- removal

    async def _remove(self, removed: Store | StoreFile, key: tuple[str, str]) -> None:
        store, file = key
        if self._is_gone(store):  # if it is configured again, its passages must be deleted
            return
        if writing := self._writing.get(store):  # later ones are of other files
            await asyncio.wait(writing)
        await self._delete_passages(store, file, flow_of(removed.tenant))
        await _recorded(partial(self._remove_records, removed))
        if not file:
            self._writing.pop(store, None)

    def _remove_records(self, removed: Store | StoreFile) -> None:
        with self._catalogue.transaction():
            if isinstance(removed, Store):
                self._catalogue.remove_children(removed.id)
                self._catalogue.remove(Store, removed.id)
            elif removed.status == "deleted":
                self._catalogue.remove(StoreFile, removed.id, removed.store)

    async def _delete_passages(self, store: str, file: str, flow: int) -> None:
        """Delete the passages of a file of a store, or of a client's whole store if `file` is ""."""
        collection = collection_of(store)
        filter: Filter = Comparison(SOURCE, "eq", (file,))
        if collection == STORES:
            filter = file_filter(store, file) if file else Comparison(STORE, "eq", (store,))
        with suppress(InvalidFilter):  # no document of the collection has a source
            delete = partial(self._writes.delete_where, collection, filter, None, flow)
            await _retried(delete, "passages wait to be deleted", *_BUSY, NoRoom)

    def _is_gone(self, store: str) -> bool:
        return collection_of(store) != STORES and store not in self._configured


def collection_of(store: str) -> str:
    """Return the collection that the passages of a store's files are in."""
    return STORES if store.startswith(STORE_PREFIX) else store


async def _retried(
    work: Callable[[], Awaitable[object]], waits: str, *errors: type[TrinityError], level: int = logging.INFO
) -> None:
    """Do the work, again after a pause for as long as it fails by one of these errors. waits: for the log."""
    for pause_s in itertools.chain(_RETRY_S, itertools.repeat(_RETRY_S[-1])):
        try:
            await work()
            return
        except errors as error:
            log.log(level, "%s: %s", waits, error.message)
            await asyncio.sleep(pause_s)


async def _recorded(change: Callable[[], None]) -> None:
    """Change the catalogue on a thread, and again until the disk has room: what has ended must be recorded."""
    waits = "what was indexed or removed waits to be recorded"
    await _retried(partial(asyncio.to_thread, change), waits, NoRoom, level=logging.WARNING)


def flow_of(tenant: str) -> int:
    """Return a number by which a tenant's work takes turns with that of others; 0 without restriction."""
    return 1 + zlib.crc32(tenant.encode()) % 65_535 if tenant else 0
