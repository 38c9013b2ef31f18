"""Files and vector stores of a node's clients, for an event loop.

Every method takes the tenant: "" for a key without restriction, which sees everything; a restricted one sees what was
made with the same access rights. What belongs to others does not exist for it. A store may be a configured collection,
by its name, if the caller has checked that the tenant may access all of it. Methods raise `UnknownObject`,
`LimitExceeded`, and `CollectionError` if the disk fails.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from runtime.errors import BuildRefused, InvalidRequest, NoRoom, TrinityError, Unavailable
from runtime.node.stores_config import StoresSection
from runtime.retrieval.attributes.filters import Filter, Scalar
from runtime.retrieval.embedding.embedder import Embedder
from runtime.retrieval.fair_gate import FairLimit
from runtime.retrieval.ingestion.passages import FilePassage
from runtime.retrieval.ingestion.sections import UnreadableFile
from runtime.retrieval.stores.catalogue import Catalogue, Page, Quota, Usage
from runtime.retrieval.stores.collection import store_filter, with_columns
from runtime.retrieval.stores.configured import ConfiguredCollections
from runtime.retrieval.stores.file_folder import FileFolder
from runtime.retrieval.stores.indexing import Indexer, flow_of
from runtime.retrieval.stores.records import (
    Batch,
    FileStatus,
    NewEntry,
    NewFile,
    Store,
    StoredFile,
    StoreFile,
    UnknownObject,
    new_id,
)
from runtime.retrieval.writer_service import WriterService

MAX_STORES, MAX_FILES = 10_000, 100_000
MAX_FILE_BYTES = 512 << 20  # as with OpenAI
MAX_UPLOADS = 16
MAX_SEARCHED_STORES = 16
_MAINTAIN_S = 60.0
_TOUCH_S = 60
log = logging.getLogger(__name__)


class Stores:
    """The stores, whose directory is `settings.path`. embedder: see `Indexer`. clock: Unix time in seconds."""

    def __init__(
        self,
        settings: StoresSection,
        catalogue: Catalogue,
        writes: WriterService,
        embedder: Callable[[str], Embedder],
        configured: ConfiguredCollections,
        clock: Callable[[], float] = time.time,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.settings, self._catalogue, self._clock = settings, catalogue, clock
        self._files = FileFolder(Path(settings.path) / "files")
        self._indexer, self._configured = Indexer(catalogue, self._files, writes, embedder, configured), configured
        self._uploads = FairLimit(MAX_UPLOADS, "uploads")
        self._receiving: Counter[str] = Counter()  # bytes by tenant
        self.max_file_bytes = max_file_bytes
        self._bytes = Quota(settings.max_mib << 20, "bytes of files and vector stores")

    async def run(self) -> None:
        """Continue what an earlier process left unfinished, and remove what has expired, until cancelled."""
        try:
            await asyncio.to_thread(self._files.sweep, lambda id: self._catalogue.find(StoredFile, id) is not None)
            await self._indexer.resume()
            while True:
                await self.remove_expired()
                await asyncio.sleep(_MAINTAIN_S)
        finally:
            await self._indexer.close()

    async def remove_expired(self) -> None:
        """Remove the files whose time is over, and empty such stores."""
        now = self._clock()
        try:
            for file in await asyncio.to_thread(self._catalogue.with_status, StoredFile, "expiring"):
                if file.expires_at is not None and file.expires_at <= now:
                    with suppress(UnknownObject):  # deleted meanwhile
                        await self.delete_file(file.id, "")
            for store in await asyncio.to_thread(self._catalogue.with_status, Store, "expiring"):
                if self.is_expired(store):
                    while (page := await self.entries(store.id, Page(100), ""))[0]:
                        for entry in page[0]:
                            with suppress(UnknownObject):
                                await self.remove_file(store.id, entry.id, "")
        except TrinityError as error:
            log.warning("what has expired is not removed yet: %s", error.message)
        except Exception:  # such as a full disk: it is tried again
            log.exception("what has expired is not removed yet")

    def now(self) -> float:
        """Return the Unix time in seconds."""
        return self._clock()

    def is_expired(self, store: Store) -> bool:
        return store.expires_at is not None and store.expires_at <= self._clock()

    # ---- files

    async def upload(
        self, size: int, tenant: str, receive: Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[NewFile]]
    ) -> StoredFile:
        """Store a file of at most `size` bytes. receive: passes its parts to a function, and returns what it is.

        Raises `Overloaded`, and the errors of `receive`.
        """
        async with self._uploads.counted(flow_of(tenant)):
            self._receiving[tenant] += size
            try:
                await asyncio.to_thread(self._check_room, tenant)
                with await asyncio.to_thread(self._files.upload, new_id("file-")) as upload:
                    new = await receive(lambda part: asyncio.to_thread(upload.write, part))
                    await asyncio.to_thread(upload.finish)
                    now = int(self._clock())
                    file = StoredFile(
                        id=upload.id, tenant=tenant, created_at=now, name=new.name, purpose=new.purpose,
                        bytes=upload.bytes, expires_at=now + new.expires_s if new.expires_s else None,
                    )  # fmt: skip
                    await asyncio.to_thread(self._catalogue.put, file)
                    upload.keep()
                    return file
            finally:
                self._receiving[tenant] -= size

    async def file(self, id: str, tenant: str) -> StoredFile:
        return await asyncio.to_thread(self._catalogue.get, StoredFile, id, tenant or None)

    async def files(self, page: Page, purpose: str | None, tenant: str) -> tuple[list[StoredFile], bool]:
        return await asyncio.to_thread(lambda: self._catalogue.page(StoredFile, page, tenant or None, label=purpose))

    def content_path(self, file: StoredFile) -> Path:
        return self._files.path(file.id)

    async def text(self, id: str, tenant: str) -> str:
        """Return a file's name and text, for a prompt. Raises `InvalidRequest` for a file without text."""
        file = await self.file(id, tenant)
        try:
            return f"[{file.name}]\n{await self._indexer.text(file, tenant)}\n\n"
        except (UnreadableFile, BuildRefused) as error:
            raise InvalidRequest(f"file {id!r} cannot be read: {error}", "file_id") from error

    async def delete_file(self, id: str, tenant: str) -> None:
        """Delete a file, and remove it from all stores; returns when no search finds it any more."""

        def forget() -> list[StoreFile]:
            with self._catalogue.transaction():
                self._catalogue.get(StoredFile, id, tenant or None)
                entries = [replace(entry, status="deleted") for entry in self._catalogue.stores_of(id)]
                for entry in entries:
                    self._catalogue.put(entry)
                self._catalogue.remove(StoredFile, id)
            return entries

        def delete() -> list[StoreFile]:
            try:
                entries = forget()
            except NoRoom:  # there may be some without its content
                self._catalogue.get(StoredFile, id, tenant or None)
                self._files.remove(id)
                return forget()
            self._files.remove(id)
            return entries

        await self._removed(await asyncio.to_thread(delete))

    # ---- stores

    async def create_store(self, store: Store, files: Sequence[NewEntry]) -> Store:
        """Create a store, with files."""

        def create() -> list[StoreFile]:
            with self._catalogue.transaction():
                quota = Quota(MAX_STORES, "vector stores")
                total, own = self._catalogue.usage(Store), self._catalogue.usage(Store, tenant=store.tenant)
                quota.check(1, total.number, own.number, store.tenant)
                self._catalogue.put(store)
                return self._put_entries(store, files, store.tenant, "")

        self._index(await asyncio.to_thread(create))
        return store

    async def store(self, id: str, tenant: str) -> Store:
        return await asyncio.to_thread(self._catalogue.get, Store, id, tenant or None)

    async def store_ids(self, tenant: str) -> list[str]:
        """Return the ids of the stores that a tenant may see, the newest first."""
        return await asyncio.to_thread(self._catalogue.ids, Store, tenant or None)

    async def counts(self, store: str, batch: str | None = None) -> Mapping[str, Usage]:
        return await asyncio.to_thread(self._catalogue.counts, store, batch)

    async def update_store(self, id: str, tenant: str, change: Callable[[Store], Store]) -> Store:
        def update() -> Store:
            with self._catalogue.transaction():
                changed = change(self._catalogue.get(Store, id, tenant or None))
                self._catalogue.put(changed)
                return changed

        return await asyncio.to_thread(update)

    async def delete_store(self, id: str, tenant: str) -> None:
        """Delete a store; its files are kept. Returns when its passages are deleted."""
        store = await self.update_store(id, tenant, lambda store: replace(store, deleted=True))
        await asyncio.shield(self._indexer.start_removal(store))

    async def filter(self, ids: Sequence[str], tenant: str, wanted: Filter | None) -> Filter:
        """Return the filter of a search in stores, as `store_filter`. Raises `InvalidRequest` for an expired one."""
        if (count := len(ids)) > MAX_SEARCHED_STORES:
            raise InvalidRequest(f"{count} vector stores are searched, the limit is {MAX_SEARCHED_STORES}", "id")
        stores = [await self.store(id, tenant) for id in dict.fromkeys(ids)]
        for store in stores:
            if self.is_expired(store):
                raise InvalidRequest(f"vector store {store.id!r} has expired", "vector_store_id")
            if (now := int(self._clock())) > store.last_active_at + _TOUCH_S:
                await self.update_store(store.id, tenant, lambda old, now=now: replace(old, last_active_at=now))  # type: ignore[misc]
        return store_filter({store.id: store.columns for store in stores}, wanted)

    # ---- files in stores

    async def add_files(
        self, store_id: str, files: Sequence[NewEntry], tenant: str, *, batch: bool
    ) -> tuple[list[StoreFile], Batch | None]:
        """Add files to a store, all of them or none; they are indexed in the background."""

        def add() -> tuple[list[StoreFile], Batch | None]:
            with self._catalogue.transaction():
                store = self._store(store_id, tenant)
                made = None
                if batch:
                    made = Batch(id=new_id("vsfb_"), store=store_id, tenant=store.tenant, created_at=int(self._clock()))
                    self._catalogue.put(made)
                return self._put_entries(store, files, tenant, made.id if made else ""), made

        entries, made = await asyncio.to_thread(add)
        self._index(entries)
        return entries, made

    async def entry(self, store: str, file: str, tenant: str) -> StoreFile:
        return await asyncio.to_thread(self._entry, store, file, tenant)

    async def unfinished(self, collection: str) -> dict[str, FileStatus]:
        """Return the status of the files that were added to a configured collection and are not completed."""
        return await asyncio.to_thread(self._catalogue.unfinished, collection)

    async def entries(
        self, store: str, page: Page, tenant: str, status: FileStatus | None = None, batch: str | None = None
    ) -> tuple[list[StoreFile], bool]:
        return await asyncio.to_thread(
            lambda: self._catalogue.page(StoreFile, page, self._scope(store, tenant), store, status=status, label=batch)
        )

    async def names(self, store_files: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[StoreFile, str]]:
        """Return the entries of (store, file) that exist, with the names of the files."""

        def look_up() -> dict[tuple[str, str], tuple[StoreFile, str]]:
            names_by_entry = {}
            for store, id in dict.fromkeys(store_files):
                entry, file = self._catalogue.find(StoreFile, id, store), self._catalogue.find(StoredFile, id)
                if entry is not None and entry.status != "deleted" and file is not None:
                    names_by_entry[store, id] = entry, file.name
            return names_by_entry

        return await asyncio.to_thread(look_up)

    async def update_attributes(
        self, store_id: str, file: str, attributes: Mapping[str, Scalar], tenant: str
    ) -> StoreFile:
        """Replace the attributes of a file in a store, whose passages are then stored again."""

        def update() -> StoreFile:
            with self._catalogue.transaction():
                entry = self._entry(store_id, file, tenant)
                store = self._store(store_id, tenant)
                self._extend_columns(store, [attributes])
                entry = replace(entry, attributes=dict(attributes), revision=secrets.randbits(62))
                if entry.status == "completed":
                    entry = replace(entry, status="in_progress")
                self._catalogue.put(entry)
                return entry

        entry = await asyncio.to_thread(update)
        self._index([entry])
        return entry

    async def remove_file(self, store: str, file: str, tenant: str) -> None:
        """Remove a file from a store; returns when no search finds it any more."""

        def remove() -> StoreFile:
            with self._catalogue.transaction():
                entry = replace(self._entry(store, file, tenant), status="deleted")
                self._catalogue.put(entry)
                return entry

        await self._removed([await asyncio.to_thread(remove)])

    async def passages(self, entry: StoreFile) -> list[FilePassage]:
        """Return the passages of a file in a store. Raises `InvalidRequest` for a file without text, `Unavailable`."""
        file = await self.file(entry.id, "")
        try:
            return await self._indexer.passages(file, entry)
        except (UnreadableFile, BuildRefused) as error:
            raise InvalidRequest(f"the file cannot be read: {error}", "file_id") from error

    async def batch(self, store: str, id: str, tenant: str) -> Batch:
        return await asyncio.to_thread(lambda: self._catalogue.get(Batch, id, self._scope(store, tenant), store))

    async def cancel_batch(self, store: str, id: str, tenant: str) -> Batch:
        """Cancel the indexing of a batch's files that are in progress."""
        batch = await self.batch(store, id, tenant)

        def cancel() -> list[StoreFile]:
            with self._catalogue.transaction():
                entries = self._catalogue.with_status(StoreFile, "in_progress", store)
                cancelled = [replace(entry, status="cancelled") for entry in entries if entry.batch == id]
                for entry in cancelled:
                    self._catalogue.put(entry)
                return cancelled

        await self._removed(await asyncio.to_thread(cancel))
        return batch

    # ---- internals

    def _store(self, id: str, tenant: str) -> Store:
        """Return a store; of a configured collection one that is not recorded."""
        if id in self._configured:
            return Store(id=id, tenant=tenant, created_at=0, last_active_at=0)
        return self._catalogue.get(Store, id, tenant or None)

    def _scope(self, store: str, tenant: str) -> str | None:
        """Return the tenant whose files and batches of a store are shown to this one, None for all."""
        return None if self._store(store, tenant).id in self._configured else tenant or None

    def _entry(self, store: str, file: str, tenant: str) -> StoreFile:
        return self._catalogue.get(StoreFile, file, self._scope(store, tenant), store)

    def _extend_columns(self, store: Store, files: Iterable[Mapping[str, Scalar]]) -> None:
        """Prepare a store for files with these attributes, within a transaction. Raises `InvalidRequest`."""
        if store.id in self._configured:
            self._configured.check(store.id, files)
            return
        columns = dict(store.columns)
        for attributes in files:
            columns = with_columns(columns, attributes)
        if columns != store.columns:
            self._catalogue.put(replace(store, columns=columns))

    def _put_entries(self, store: Store, files: Sequence[NewEntry], tenant: str, batch: str) -> list[StoreFile]:
        """Record files in a store, within a transaction. A file that is in the store is indexed again."""
        now, entries = int(self._clock()), []
        self._check_room(store.tenant)
        self._extend_columns(store, [new.attributes for new in files])
        for new in files:
            file = self._catalogue.get(StoredFile, new.file, tenant or None)
            before = self._catalogue.find(StoreFile, new.file, store.id)
            if before is not None and before.status == "deleted":
                raise Unavailable(f"file {new.file!r} is being removed from the vector store: try again")
            owner = file.tenant if store.id in self._configured else store.tenant
            entry = StoreFile(
                id=file.id, store=store.id, tenant=owner, created_at=now, usage_bytes=file.bytes,
                attributes=dict(new.attributes), chunking=new.chunking, batch=batch, revision=secrets.randbits(62),
                rechunked=before is not None and (before.rechunked or before.chunking != new.chunking),
            )  # fmt: skip
            self._catalogue.put(entry)
            entries.append(entry)
        self._check_room(store.tenant)
        return entries

    def _check_room(self, tenant: str) -> None:
        """Raise `LimitExceeded` if a tenant has too much, with what is being received."""
        total, own = self._catalogue.usage(StoredFile, StoreFile), Usage()
        if tenant:
            own = self._catalogue.usage(StoredFile, StoreFile, tenant=tenant)
        receiving = self._receiving[tenant]
        self._bytes.check(receiving, total.bytes + sum(self._receiving.values()) - receiving, own.bytes, tenant)
        files = Quota(MAX_FILES, "files and files of vector stores")
        files.check(0, total.number, own.number, tenant)

    def _index(self, entries: Sequence[StoreFile]) -> None:
        for entry in entries:
            self._indexer.index(entry)

    async def _removed(self, entries: Sequence[StoreFile]) -> None:
        """Wait until the passages of files that are marked as deleted or cancelled are deleted."""
        await asyncio.gather(*(asyncio.shield(self._indexer.start_removal(entry)) for entry in entries))
