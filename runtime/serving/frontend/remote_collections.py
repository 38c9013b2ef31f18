"""The collections that the frontend searches: the node's own, in its pools, and remote ones, on other nodes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import aiohttp

from ipc import Stage
from runtime.errors import InvalidRequest
from runtime.node.remote_config import RemoteSection
from runtime.retrieval.attributes.filters import Wanted, as_json, decode_filter, filter_bytes
from runtime.retrieval.builds import About
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.passages import Passage
from runtime.retrieval.remote import LOOK_S, RemoteCollection
from runtime.serving.http.service import Catalogue, SearchSource

_KEEP_S = 30.0  # an idle connection: nodes keep it longer


class WithRemote:
    """A `SearchSource` and a `Catalogue`: asks the nodes of a remote collection, and `own` for every other."""

    def __init__(self, own: SearchSource, catalogue: Catalogue, sections: Sequence[RemoteSection]) -> None:
        """Raises `ConfigError` for a key that cannot be read."""
        self._own, self._catalogue = own, catalogue
        self._made: aiohttp.ClientSession | None = None
        self._remote = {section.name: RemoteCollection(section, self._session) for section in sections}
        self.dims: Mapping[str, int] = dict.fromkeys(self._remote, 0)  # a vector's length is the nodes' to check

    async def search(
        self,
        *,
        collection: str,
        k: int,
        query: str | None,
        vector: Sequence[float] | None,
        embedded: Callable[[], None],
        stage: Stage = "prefill",
        wanted: Wanted = None,
        hybrid: float = 0.0,
        timeout_s: float,
    ) -> list[Passage]:
        """See `SearchSource`. A remote collection's texts are embedded by its nodes; the stage stays here."""
        remote = self._remote.get(collection)
        if remote is None:
            return await self._own.search(
                collection=collection, k=k, query=query, vector=vector, embedded=embedded, stage=stage, wanted=wanted,
                hybrid=hybrid, timeout_s=timeout_s,
            )  # fmt: skip
        if hybrid:  # ranks of different nodes say nothing of each other
            raise InvalidRequest(f"collection {collection!r} is on other nodes: they are asked without it", "hybrid")
        embedded()
        asked = {"k": k} | ({"query": query} if query is not None else {"vector": vector})
        content = filter_bytes(wanted)
        return await remote.search(asked | ({"filter": as_json(decode_filter(content))} if content else {}), timeout_s)

    def missing(self) -> list[str]:
        return self._own.missing()

    def unavailable(self) -> dict[str, str]:
        remote = {name: found.unavailable for name, found in self._remote.items()}
        return self._own.unavailable() | {name: why for name, why in remote.items() if why}

    def about(self, collection: str) -> About:
        remote = self._remote.get(collection)
        return self._catalogue.about(collection) if remote is None else remote.about

    def embedders(self) -> Mapping[str, Embedder]:
        return self._catalogue.embedders()

    async def embedded(self, embedder: Embedder, texts: Sequence[str], kind: TextKind) -> tuple[Vectors, int]:
        return await self._catalogue.embedded(embedder, texts, kind)

    async def look(self) -> None:
        """Ask the nodes that are out whether they are back."""
        await asyncio.gather(*(remote.look() for remote in self._remote.values()))

    async def run(self) -> None:
        """Look for nodes that are out, until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            if self._made is not None:
                await self._made.close()

    def _session(self) -> aiohttp.ClientSession:
        """Made in the loop that uses it."""
        if self._made is None:
            self._made = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._made
