"""Retrieval inside an event loop: what the frontend answers `/v1/retrieval` with."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from runtime.errors import InternalError
from runtime.retrieval.client import SearchClient
from runtime.retrieval.passages import Passage
from runtime.retrieval.retriever import Library, Retriever

_TICK_S = 0.02  # while queries are outstanding: how late a result can be noticed if its doorbell is missed


class AsyncSearch:
    """Searches for many callers of one event loop. Embedding runs in a thread of its own, so the loop goes on."""

    def __init__(self, library: Library, client: SearchClient, timeout_s: float) -> None:
        self._library = library
        self._retriever = Retriever(library, client)
        self._client = client
        self._timeout_ns = int(timeout_s * 1e9)
        self._embedding = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._waiting: dict[int, asyncio.Future[tuple[Passage, ...]]] = {}
        self._asked = asyncio.Event()

    def missing(self) -> list[str]:
        """["pool"] while no pool is attached."""
        return [] if self._client.live else ["pool"]

    async def search(
        self, *, collection: str, k: int, query: str | None, vector: Sequence[float] | None
    ) -> list[Passage]:
        """The k nearest passages to a text or a vector, nearest first. Raises `TrinityError`."""
        if query is not None:
            loop = asyncio.get_running_loop()
            array = (await loop.run_in_executor(self._embedding, self._library.embed, collection, [query]))[0]
        else:
            array = np.asarray(vector, dtype=np.float32)
        deadline = time.monotonic_ns() + self._timeout_ns
        ticket = self._retriever.ask(array, collection, k, stage="prefill", deadline_ns=deadline)
        future: asyncio.Future[tuple[Passage, ...]] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = future
        self._asked.set()
        try:
            return list(await future)
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._retriever.cancel(ticket)

    async def run(self) -> None:
        """Bring results to their callers until cancelled."""
        try:
            while True:
                for found in self._retriever.poll():
                    future = self._waiting.pop(found.ticket, None)
                    if future is None or future.done():
                        continue
                    if found.error is not None:
                        future.set_exception(found.error)
                    else:
                        future.set_result(found.passages)
                await self._rest()
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(InternalError("the frontend is stopping"))
            self._embedding.shutdown(wait=False, cancel_futures=True)

    async def _rest(self) -> None:
        """Until a result rings, a query is asked, or a moment has passed."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):  # lost pools are attached again even when nobody asks
                    await self._asked.wait()
            return
        rung = asyncio.Event()
        descriptors = self._client.filenos()
        for descriptor in descriptors:
            loop.add_reader(descriptor, rung.set)
        try:
            if self._client.arm():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await rung.wait()
        finally:
            self._client.disarm()
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
