"""Collections whose shards are on other nodes: each is asked over HTTP, and the nearest of all are the answer.

A node is in use once it has said what its collection is: all of one collection must have one embedder, dimension and
metric. One that does not answer is out until it has said so again, for which it is asked every `LOOK_S`.
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
from runtime.retrieval.attributes.filters import decode_filter, filter_bytes, filter_json
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.embedding.loading import read_key
from runtime.retrieval.passages import PartialPassages, Passage
from runtime.retrieval.search.query import PassageQuery

LOOK_S = 2.0
_LONGEST_S = 3600.0  # of a search
_KEEP_S = 30.0  # an idle connection: nodes keep it longer
MAX_ANSWER_BYTES = 32 << 20
log = logging.getLogger(__name__)


class _Store(msgspec.Struct):
    """Of a vector store, what is needed."""

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
    """`about`: what its collection is; None while it is out, for `trouble`."""

    url: str
    about: CollectionSummary | None = None
    trouble: str = "it was not asked yet"


class RemoteCollection:
    """One collection, by its nodes."""

    def __init__(self, section: RemoteSection, session: Callable[[], aiohttp.ClientSession]) -> None:
        """Raises `ConfigError` for a key that cannot be read."""
        self._section, self._session = section, session
        self._name = quote(section.collection or section.name, safe="")
        key = read_key(section.api_key_file, f"remote {section.name}: the")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._nodes = [_Node(url) for url in section.urls]

    @property
    def about(self) -> CollectionSummary:
        """What it is, as far as its nodes have said so."""
        return next((node.about for node in self._nodes if node.about is not None), CollectionSummary())

    @property
    def unavailable(self) -> str:
        """Why it cannot be searched; "" where it can."""
        out = [f"{node.url}: {node.trouble}" for node in self._nodes if node.about is None]
        enough = len(out) < len(self._nodes) if self._section.missing == "partial" else not out
        return "" if enough else "; ".join(out)

    @property
    def nodes(self) -> dict[str, str]:
        """Why each node is not asked, by its URL; "" where it is in use."""
        return {node.url: node.trouble if node.about is None else "" for node in self._nodes}

    async def look(self) -> None:
        """Ask the nodes that are out whether they are back."""
        await asyncio.gather(*(self._look_at(node) for node in self._nodes if node.about is None))

    async def search(self, asked: Mapping[str, Any], timeout_s: float) -> list[Passage]:
        """The nearest of all nodes' passages; `PartialPassages` without those of some. Raises `TrinityError`.

        asked: the body of a search, with its `k`.
        """
        until = asyncio.get_running_loop().time() + min(timeout_s, _LONGEST_S)
        if any(node.about is None and node.trouble == _Node.trouble for node in self._nodes):
            try:
                async with asyncio.timeout_at(until):
                    await self.look()
            except TimeoutError:
                if out := ", ".join(node.url for node in self._nodes if node.about is None):
                    raise DeadlineExceeded(f"{out} did not tell in time what {self._section.name!r} is") from None
        if why := self.unavailable:
            raise Unavailable(f"collection {self._section.name!r} is unavailable: {why}")
        body = msgspec.json.encode({**asked, "collection": self._section.collection or self._section.name})
        within_s = max(0.0, min(until - asyncio.get_running_loop().time(), self._section.timeout_s))
        used = [node for node in self._nodes if node.about is not None]
        answers = await asyncio.gather(*(self._ask(node, body, within_s) for node in used))
        found = [answer for answer in answers if not isinstance(answer, TrinityError)]
        failed = [answer for answer in answers if isinstance(answer, TrinityError)]
        refused = [error for error in failed if isinstance(error, InvalidRequest)]
        if failed and (refused or not found or self._section.missing == "refuse"):
            raise (refused or failed)[0]
        best: dict[str, Passage] = {}
        for passage in merge(*found, key=lambda passage: passage.distance):
            best.setdefault(passage.id, passage)
        nearest = list(best.values())[: asked["k"]]
        return nearest if len(found) == len(self._nodes) else PartialPassages(nearest)

    async def _ask(self, node: _Node, body: bytes, within_s: float) -> list[Passage] | TrinityError:
        """The node's passages, nearest first; or what ended its search."""
        try:
            async with asyncio.timeout(within_s):
                content = await self._answer("POST", f"{node.url}/v1/retrieval", body)
            return msgspec.json.decode(content, type=_Answer).passages
        except TimeoutError:
            error: TrinityError = DeadlineExceeded(f"node {node.url} did not answer within {within_s:g} s")
            if within_s < self._section.timeout_s:  # there was less time than it may take
                return error
        except TrinityError as answered:
            return answered  # it is there, and may answer the next one
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            error = Unavailable(f"node {node.url} does not answer: {_why(failure)}")
        self._out(node, error.message)
        return error

    async def _look_at(self, node: _Node) -> None:
        try:
            async with asyncio.timeout(self._section.timeout_s):
                content = await self._answer("GET", f"{node.url}/v1/vector_stores/{self._name}", None)
            store = msgspec.json.decode(content, type=_Store)
            told = store.metadata
            found = CollectionSummary(
                here=True, dim=int(told["dimensions"]), metric=told["metric"], embedder=told.get("embedder", "")
            )
        except (TrinityError, TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            self._out(node, _why(error))
            return
        others = self.about
        if store.status != "completed":
            self._out(node, "its documents cannot be used")
        elif others.here and others != found:
            self._out(node, f"it has {_told(found)}, where the others have {_told(others)}")
        else:
            node.about = found
            log.info("collection %s: node %s is in use", self._section.name, node.url)

    def _out(self, node: _Node, trouble: str) -> None:
        if trouble != node.trouble:
            log.warning("collection %s: node %s is not asked: %s", self._section.name, node.url, trouble)
        node.about, node.trouble = None, trouble

    async def _answer(self, method: str, url: str, body: bytes | None) -> bytes:
        """The body of a 200. Raises the `TrinityError` that the node answered with, and what HTTP raises."""
        async with self._session().request(method, url, data=body, headers=self._headers, allow_redirects=False) as got:
            content = bytearray()
            async for part in got.content.iter_any():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise ValueError(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
            if got.status == 200:
                return bytes(content)
            with suppress(msgspec.MsgspecError):
                error = msgspec.json.decode(content, type=_Failed).error
                raise error_from_code(error.code, f"{got.url.origin()}: {error.message}", error.param)
            raise ValueError(f"it answered with status {got.status}")


class RemoteCollections:
    """All of a node's, over one set of connections, within one event loop. `run` must run."""

    def __init__(self, sections: Iterable[RemoteSection]) -> None:
        """Raises `ConfigError` for a key that cannot be read."""
        self._made: aiohttp.ClientSession | None = None
        self.by_name = {section.name: RemoteCollection(section, self._session) for section in sections}

    async def search(self, asked: PassageQuery, timeout_s: float) -> list[Passage]:
        """Return the nearest passages over all nodes of the collection; the nodes embed a text. `PartialPassages` if
        some nodes are missing. Raises `TrinityError`."""
        if asked.hybrid:  # ranks of different nodes say nothing of each other
            told = f"collection {asked.collection!r} is on other nodes: they are asked without it"
            raise InvalidRequest(told, "hybrid")
        body: dict[str, Any] = {"k": asked.k}
        body |= {"query": asked.query} if asked.query is not None else {"vector": asked.vector}
        if content := filter_bytes(asked.wanted):
            body["filter"] = filter_json(decode_filter(content))
        return await self.by_name[asked.collection].search(body, timeout_s)

    async def look(self) -> None:
        """Ask the nodes that are out whether they are back."""
        await asyncio.gather(*(remote.look() for remote in self.by_name.values()))

    async def run(self) -> None:
        """Look for nodes that are out, until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            await self.close()

    async def close(self) -> None:
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


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.InvalidURL):
        return "it is no URL that could be asked"
    told = error.message if isinstance(error, TrinityError) else str(error)
    return told.partition("\n")[0][:200] or type(error).__name__


def _told(about: CollectionSummary) -> str:
    return f"{about.embedder or 'no embedder'}, {about.dim} dimensions, {about.metric}"
