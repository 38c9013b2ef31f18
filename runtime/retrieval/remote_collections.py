"""Collections on other nodes: every node is searched over HTTP, and the nearest passages of all are returned.

A node is up once it has reported its collection's embedder, dimension and metric, which must be the same on all nodes
of a collection. A node that does not answer is marked down and probed every `PROBE_EVERY_S`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from runtime.errors import DeadlineExceeded, InvalidRequest, TrinityError, Unavailable, error_from_code
from runtime.node.remote_config import RemoteSection
from runtime.retrieval.attributes.filters import decode_filter, filter_json
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.embedding.loading import read_key
from runtime.retrieval.passages import MAX_PASSAGES_BYTES, FoundPassages, OnRead, Passage, check_size, ignore_size
from runtime.retrieval.search.query import Query
from runtime.retrieval.search.vectors import on_host

PROBE_EVERY_S = 2.0
_MAX_SEARCH_S = 3600.0
_KEEPALIVE_S = 30.0  # of an idle connection; shorter than the nodes' own
log = logging.getLogger(__name__)


class _Store(msgspec.Struct):
    """The fields of a vector store that are used."""

    status: str
    metadata: dict[str, str]


class _Answer(msgspec.Struct):
    passages: list[Passage]


class _Error(msgspec.Struct):
    code: str
    message: str
    param: str | None = None


class _Failed(msgspec.Struct):
    error: _Error


@dataclass
class _Node:
    """`summary`: of its collection; None while it is down, with the reason in `error`."""

    url: str
    summary: CollectionSummary | None = None
    error: str = "not probed yet"


class RemoteCollection:
    """One collection and its nodes."""

    def __init__(self, section: RemoteSection, session: Callable[[], aiohttp.ClientSession]) -> None:
        """Raises `ConfigError` for a key that cannot be read."""
        self._section, self._session = section, session
        self._name = quote(section.collection or section.name, safe="")
        key = read_key(section.api_key_file, f"remote {section.name}: the")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._nodes = [_Node(url) for url in section.urls]

    @property
    def summary(self) -> CollectionSummary:
        """The collection's properties, from a node that is up."""
        return next((node.summary for node in self._nodes if node.summary is not None), CollectionSummary())

    @property
    def unavailable(self) -> str:
        """Why it cannot be searched; "" if it can."""
        down = [f"{node.url}: {node.error}" for node in self._nodes if node.summary is None]
        enough = len(down) < len(self._nodes) if self._section.missing == "partial" else not down
        return "" if enough else "; ".join(down)

    @property
    def nodes(self) -> dict[str, str]:
        """By URL, why each node is down; "" if it is up."""
        return {node.url: node.error if node.summary is None else "" for node in self._nodes}

    async def probe(self) -> None:
        """Probe the nodes that are down."""
        await asyncio.gather(*(self._probe_node(node) for node in self._nodes if node.summary is None))

    async def search(self, body: Mapping[str, Any], timeout_s: float, on_read: OnRead = ignore_size) -> FoundPassages:
        """Return the nearest passages of all nodes; partial ones if some did not answer.

        body: of `POST /v1/retrieval`, with its `k`. `on_read` is called with the bytes that all nodes have sent so far.
        Raises `TrinityError`, also that of `on_read`.
        """
        read = 0
        refusal: TrinityError | None = None

        def count(size: int) -> None:
            nonlocal read, refusal
            read += size
            try:
                check_size(read, body["k"])
                on_read(read)
            except TrinityError as error:
                refusal = error
                raise

        until = asyncio.get_running_loop().time() + min(timeout_s, _MAX_SEARCH_S)
        if any(node.summary is None and node.error == _Node.error for node in self._nodes):
            try:
                async with asyncio.timeout_at(until):
                    await self.probe()
            except TimeoutError:
                if down := ", ".join(node.url for node in self._nodes if node.summary is None):
                    raise DeadlineExceeded(f"{down} did not report {self._section.name!r} in time") from None
        if reason := self.unavailable:
            raise Unavailable(f"collection {self._section.name!r} is unavailable: {reason}")
        content = msgspec.json.encode({**body, "collection": self._section.collection or self._section.name})
        within_s = max(0.0, min(until - asyncio.get_running_loop().time(), self._section.timeout_s))
        used = [node for node in self._nodes if node.summary is not None]
        answers = await asyncio.gather(*(self._search_node(node, content, within_s, count) for node in used))
        if refusal is not None:
            raise refusal
        found = [answer for answer in answers if not isinstance(answer, TrinityError)]
        failed = [answer for answer in answers if isinstance(answer, TrinityError)]
        refused = [error for error in failed if isinstance(error, InvalidRequest)]
        if failed and (refused or not found or self._section.missing == "refuse"):
            raise (refused or failed)[0]
        best: dict[str, Passage] = {}
        for passage in merge(*found, key=lambda passage: passage.distance):
            best.setdefault(passage.id, passage)
        nearest = list(best.values())[: body["k"]]
        return FoundPassages(nearest, partial=len(found) < len(self._nodes))

    async def _search_node(
        self, node: _Node, body: bytes, within_s: float, count: OnRead
    ) -> list[Passage] | TrinityError:
        """Return the node's passages, nearest first; or the error that ended its search."""
        try:
            async with asyncio.timeout(within_s):
                content = await self._request("POST", f"{node.url}/v1/retrieval", body, count)
            return msgspec.json.decode(content, type=_Answer).passages
        except TimeoutError:
            error: TrinityError = DeadlineExceeded(f"node {node.url} did not answer within {within_s:g} s")
            if within_s < self._section.timeout_s:  # the request's own timeout was shorter
                return error
        except TrinityError as answered:
            return answered  # the node is up
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            error = Unavailable(f"node {node.url} does not answer: {_error_text(failure)}")
        self._mark_down(node, error.message)
        return error

    async def _probe_node(self, node: _Node) -> None:
        try:
            async with asyncio.timeout(self._section.timeout_s):
                content = await self._request("GET", f"{node.url}/v1/vector_stores/{self._name}", None)
            store = msgspec.json.decode(content, type=_Store)
            metadata = store.metadata
            found = CollectionSummary(
                is_open=True,
                dim=int(metadata["dimensions"]),
                metric=metadata["metric"],
                embedder=metadata.get("embedder", ""),
            )
        except (TrinityError, TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            self._mark_down(node, _error_text(error))
            return
        others = self.summary
        if store.status != "completed":
            self._mark_down(node, "its documents cannot be used")
        elif others.is_open and others != found:
            self._mark_down(node, f"it has {_describe(found)}, the others have {_describe(others)}")
        else:
            node.summary = found
            log.info("collection %s: node %s is up", self._section.name, node.url)

    def _mark_down(self, node: _Node, error: str) -> None:
        if error != node.error:
            log.warning("collection %s: node %s is down: %s", self._section.name, node.url, error)
        node.summary, node.error = None, error

    async def _request(self, method: str, url: str, body: bytes | None, count: OnRead = ignore_size) -> bytes:
        """Return the body of a 200 response. `count` is called with the size of each part.

        Raises the node's `TrinityError`, aiohttp's errors, and that of `count`.
        """
        async with self._session().request(method, url, data=body, headers=self._headers, allow_redirects=False) as got:
            content = bytearray()
            async for part in got.content.iter_any():
                content += part
                if len(content) > MAX_PASSAGES_BYTES:
                    raise ValueError(f"its response is longer than {MAX_PASSAGES_BYTES} bytes")
                count(len(part))
            if got.status == 200:
                return bytes(content)
            with suppress(msgspec.MsgspecError):
                error = msgspec.json.decode(content, type=_Failed).error
                raise error_from_code(error.code, f"{got.url.origin()}: {error.message}", error.param)
            raise ValueError(f"it responded with status {got.status}")


class RemoteCollections:
    """The remote collections of a node, over one connection pool, within one event loop. `run` must be running."""

    def __init__(self, sections: Iterable[RemoteSection]) -> None:
        """Raises `ConfigError` for a key that cannot be read."""
        self._client_session: aiohttp.ClientSession | None = None
        self.by_name = {section.name: RemoteCollection(section, self._session) for section in sections}

    async def search(self, query: Query, timeout_s: float, on_read: OnRead = ignore_size) -> FoundPassages:
        """Return the nearest passages over all nodes of the collection; the nodes embed a text. Raises
        `TrinityError`."""
        spec = query.spec
        if query.hybrid:  # ranks of different nodes are not comparable
            message = f"collection {spec.collection!r} is on other nodes, without hybrid search"
            raise InvalidRequest(message, "hybrid")
        body: dict[str, Any] = {"k": spec.k}
        body |= {"query": query.text} if query.vector is None else {"vector": on_host(query.vector).tolist()}
        if spec.filter:
            body["filter"] = filter_json(decode_filter(spec.filter))
        return await self.by_name[spec.collection].search(body, timeout_s, on_read)

    async def probe(self) -> None:
        """Probe the nodes that are down."""
        await asyncio.gather(*(remote.probe() for remote in self.by_name.values()))

    async def run(self) -> None:
        """Probe nodes that are down, until cancelled."""
        try:
            while True:
                await self.probe()
                await asyncio.sleep(PROBE_EVERY_S)
        finally:
            await self.close()

    async def close(self) -> None:
        if self._client_session is not None:
            await self._client_session.close()

    def _session(self) -> aiohttp.ClientSession:
        """Return the session, created in the event loop that uses it."""
        if self._client_session is None:
            self._client_session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._client_session


def _error_text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.InvalidURL):
        return "the URL is invalid"
    message = error.message if isinstance(error, TrinityError) else str(error)
    return message.partition("\n")[0][:200] or type(error).__name__


def _describe(summary: CollectionSummary) -> str:
    return f"{summary.embedder or 'no embedder'}, {summary.dim} dimensions, {summary.metric}"
