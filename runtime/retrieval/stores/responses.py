"""Stored responses, which later ones continue: bounded in number, bytes and time, the oldest removed first."""

import asyncio
import time
from collections.abc import Callable

from runtime.retrieval.stores.catalogue import Catalogue, Quota
from runtime.retrieval.stores.records import StoredResponse, UnknownObject

MAX_BYTES = 256 << 20
MAX_RESPONSES = 10_000
TTL_S = 30 * 86_400  # as at OpenAI
_TRIMMED = 16


class ResponseStore:
    """The responses in a catalogue. A restricted tenant has at most half of what the others leave."""

    def __init__(
        self, catalogue: Catalogue, clock: Callable[[], float] = time.time, max_responses: int = MAX_RESPONSES
    ) -> None:
        self._catalogue, self._clock = catalogue, clock
        self._number, self._bytes = Quota(max_responses, "responses"), Quota(MAX_BYTES, "bytes of responses")

    async def put(self, response: StoredResponse) -> None:
        await asyncio.to_thread(self._put, response)

    async def get(self, id: str, tenant: str) -> StoredResponse:
        """Return a response. Raises `UnknownObject`, also for one whose time is over."""
        response = await asyncio.to_thread(self._catalogue.get, StoredResponse, id, tenant or None)
        if response.created_at + TTL_S <= self._clock():
            await asyncio.to_thread(self._catalogue.remove, StoredResponse, id)
            raise UnknownObject(f"no response has the id {id[:128]!r}", "id")
        return response

    async def delete(self, id: str, tenant: str) -> None:
        """Delete a response. Raises `UnknownObject`."""
        await self.get(id, tenant)
        await asyncio.to_thread(self._catalogue.remove, StoredResponse, id)

    def _put(self, response: StoredResponse) -> None:
        tenant = response.tenant
        with self._catalogue.transaction():
            self._catalogue.put(response)
            self._remove_expired()
            while self._is_full(tenant) and (old := self._catalogue.oldest(StoredResponse, 1, tenant)):
                self._catalogue.remove(StoredResponse, old[0].id)

    def _remove_expired(self) -> None:
        for old in self._catalogue.oldest(StoredResponse, _TRIMMED):
            if old.created_at + TTL_S <= self._clock():
                self._catalogue.remove(StoredResponse, old.id)

    def _is_full(self, tenant: str) -> bool:
        total = self._catalogue.usage(StoredResponse)
        own = self._catalogue.usage(StoredResponse, tenant=tenant)
        return own.number > self._number.allowed(total.number, own.number, tenant) or own.bytes > self._bytes.allowed(
            total.bytes, own.bytes, tenant
        )
