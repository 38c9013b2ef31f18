"""Asking the vector pool: one client over all pool workers of a node, from any process of the same user.

with SearchClient.connect("my-node") as client:
    result = client.search(vector, k=10, collection="docs")
    batch = client.search_batch(vectors, k=10, collection="docs")
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
import zmq
from msgspec.structs import replace

from ipc import Memo, SearchSpec, Stage
from runtime.errors import InvalidRequest, Unavailable
from runtime.node.config import PoolSection
from runtime.node.placement.plan import NodePlan
from runtime.node.remote_config import RemoteSection
from runtime.node.run_dir import collection_paths, find_node
from runtime.retrieval.attributes.filters import FilterLike, filter_bytes
from runtime.retrieval.search.batch_search import BatchSearch
from runtime.retrieval.search.dispatcher import Dispatcher
from runtime.retrieval.search.hybrid import HybridSearch
from runtime.retrieval.search.pool_session import ReplicaPolicy
from runtime.retrieval.search.query import (
    AcceptBuild,
    Query,
    QueueLimits,
    SearchBatch,
    SearchOptions,
    SearchResult,
    SearchStatistics,
    check_deadline,
    deadline_after_ms,
    make_spec,
)
from runtime.retrieval.search.transport import QueryTransport
from runtime.retrieval.search.vectors import as_vectors, check_finite
from runtime.retrieval.write_client import WriteClient

if TYPE_CHECKING:
    from runtime.retrieval.search.remote_dispatcher import RemoteDispatcher

_LOOK_MS = 5  # how often pools are looked for while queries wait for one


class SearchClient:
    """Submits queries to the pools at `endpoints` and polls results. One thread; only `search…` and `sleep` wait.

    `defaults` gives top_m and search_width for queries that name none, and the doorbell; `find` tells where the pools
    are now, once all that were known are lost.
    """

    def __init__(
        self,
        endpoints: Iterable[str],
        name: str,
        defaults: PoolSection | None = None,
        policy: ReplicaPolicy | None = None,
        find: Callable[[], Iterable[str]] | None = None,
        collections: Sequence[str] = (),
        limits: QueueLimits | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        remote: Sequence[RemoteSection] = (),
        near: Collection[int] = (),
    ) -> None:
        """near: the numbers of the endpoints that are asked before the others.

        Raises `ConfigError` for a key of `remote` that cannot be read.
        """
        self._collections = tuple(collections)  # the node's own; empty: as its pools tell
        self.dispatcher = Dispatcher(endpoints, name, defaults or PoolSection(), policy, find, limits, clock, near)
        self.remote = frozenset(section.name for section in remote)
        """The collections that are on other nodes."""
        self._remote: RemoteDispatcher | None = None
        if remote:
            from runtime.retrieval.search import remote_dispatcher  # few have need of HTTP

            self._remote = remote_dispatcher.RemoteDispatcher(remote, (limits or QueueLimits()).parked)
        self._specs: Memo[tuple[Any, ...], SearchSpec] = Memo(lambda asked: make_spec(*asked[: len(asked) // 2]))
        self._writes: WriteClient | None = None  # without a node's name there is none
        self.words = HybridSearch(self.dispatcher, self.remote)
        self._kept: dict[int, SearchResult] = {}  # ended while `search` waited for another

    @classmethod
    def of_plan(
        cls,
        plan: NodePlan,
        name: str,
        policy: ReplicaPolicy | None = None,
        limits: QueueLimits | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> Self:
        """The client of one of the node's own workers; pools are attached as they come up."""
        names = [collection.name for collection in plan.config.collections]
        endpoints = [plan.endpoint(pool.name) for pool in plan.of_role("pool")]
        return cls(
            endpoints, name, plan.config.pool, collections=names, policy=policy, limits=limits, clock=clock,
            remote=plan.config.remote, near=plan.local_pools(name),
        )  # fmt: skip

    @classmethod
    def connect(cls, node: str | Path, name: str = "client", timeout_s: float = 5.0, api_key: str = "") -> Self:
        """A client of a running node, by its name or run directory; it finds the node again if that is restarted.

        `api_key`: for `upsert` and `delete`, where the node has keys; searches through the rings need none.
        Raises `Unavailable` if no pool answers, `ConfigError` for the key of a remote collection that cannot be read.
        """
        if not isinstance(node, str | Path):
            raise InvalidRequest(f"node must be a name or the Path of a run directory, not {node!r}", "node")
        info = find_node(node)

        def find() -> Iterable[str]:
            found = find_node(node)
            client._collections = found.collections
            return found.pools

        settings = PoolSection(doorbell=info.doorbell)
        client = cls(info.pools, name, settings, find=find, collections=info.collections, remote=info.remote)
        client._writes = WriteClient(lambda: find_node(node).url, api_key)
        client.words.paths = lambda: collection_paths(find_node(node))
        end = time.monotonic_ns() + int(timeout_s * 1e9)
        while (now := time.monotonic_ns()) < end and client.dispatcher.pools:
            if client.dispatcher.maintain(now) and not client.dispatcher.connecting:
                return client
            time.sleep(0.002)
        if not client.live and (info.pools or not info.remote):
            client.close()
            raise Unavailable(f"no pool of node {str(node)!r} answered within {timeout_s:g} s")
        return client

    # ---- queries

    def submit(
        self,
        vector: Any,
        k: int,
        *,
        collection: str = "",
        stage: Stage = "prefill",
        deadline_ns: int = 0,
        top_m: int | None = None,
        search_width: int | None = None,
        patience: int | None = None,
        filter: FilterLike = None,
        wait_for_room: bool = False,
        accept: AcceptBuild | None = None,
    ) -> int:
        """Ask for the `k` nearest of `vector` [d]; returns a ticket whose result `poll` brings exactly once.

        `collection` need not be said where the node has but one.
        `vector` is a sequence of numbers, a numpy array, or anything with `__dlpack__` or `__cuda_array_interface__`;
        for a collection on other nodes it may be a text, which they embed. They are told k, filter and deadline alone.
        One on a GPU must not be changed until its query has ended: float32 goes from there into the memory of a pool on
        that GPU or one that reaches it, and again into another's if the pool dies. To other pools it is copied.
        `filter`: only rows may be found whose documents pass it; OpenAI's format (docs/collections.md), or what
        `parse_filter` has made of that, which costs less the second time.
        `wait_for_room`: is kept, within bounds, while the rings are full. `accept`: told the identity of a build of the
        collection, whether an answer from it is of use; without, any is. The result names the one it came from. Raises
        `InvalidRequest` (wrong size, a limit passed), `Overloaded`, or `Unavailable` (the client was closed, the
        collection cannot be served, `CollectionReplaced` if no build that is served is accepted); nothing was accepted
        then.
        """
        width = self.dispatcher.settings.search_width if search_width is None else search_width
        asked = (k, collection, stage, top_m, width, patience)
        try:
            spec = self._specs[*asked, *map(type, asked)]  # True is not 1 here
        except TypeError:  # something that cannot be looked up: it is refused by its name
            spec = make_spec(*asked)
        if filter is not None and (content := filter_bytes(filter)):
            spec = replace(spec, filter=content)
        if type(deadline_ns) is not int or deadline_ns:
            spec = replace(spec, deadline_ns=check_deadline(deadline_ns))
        text = vector if self.remote and isinstance(vector, str) else ""
        row = as_vectors(() if text else vector)
        if row.ndim != 1:
            raise InvalidRequest(f"vector must have the shape (d,), got {row.shape}", "vector")
        if type(row) is np.ndarray and not np.logical_and.reduce(np.isfinite(row)):  # the pool looks at a GPU's
            check_finite(row)
        if not spec.collection:
            spec = replace(spec, collection=self._only())
        query = Query(next(self.dispatcher.tickets), row, spec, accept=accept, text=text)
        transport = self.dispatcher if self._remote is None else self._transport_to(spec.collection, text)
        transport.submit(query, wait_for_room)
        return query.ticket

    def _transport_to(self, collection: str, text: str = "") -> QueryTransport:
        """Who asks for a collection. Raises `InvalidRequest` for a text that nobody would embed."""
        if self._remote is not None and collection in self.remote:
            self.dispatcher.check_open()
            return self._remote
        if text:
            raise InvalidRequest(f"vector is a text, and collection {collection!r} is not on other nodes", "vector")
        return self.dispatcher

    def _only(self) -> str:
        """The name of the only collection."""
        names = (*(self._collections or self.dispatcher.routes.collections), *self.remote)
        if len(names) == 1:
            return names[0]
        if not names:
            raise Unavailable("no pool is up that could tell which collection is meant")
        raise InvalidRequest(f"collection is missing; there are {sorted(names)}", "collection")

    def search(
        self,
        vector: Any,
        k: int = 10,
        *,
        deadline_ms: float | None = None,
        text: str = "",
        hybrid: bool | float = False,
        **options: Unpack[SearchOptions],
    ) -> SearchResult:
        """Ask and wait. `vector` as for `submit`. Raises what ended the query if it was not answered.

        `hybrid`, True or a share: what the words of `text` find is fused with it, by rank (docs/hybrid.md). They are
        looked for here, in the collection's files: only a client of `connect` can.
        """
        deadline_ns = 0 if deadline_ms is None else deadline_after_ms(deadline_ms)
        asked = None if hybrid is False and text == "" else self.words.asked(text, hybrid, k, options)
        ticket = self.submit(vector, asked.depth if asked else k, deadline_ns=deadline_ns, **options)
        try:
            while ticket not in self._kept:
                self._keep(self._collect())
                if ticket not in self._kept:
                    self._wait()
        except BaseException:
            self.cancel(ticket)
            raise
        result = self._kept.pop(ticket).checked()
        return self.words.fused(result, asked, vector, deadline_ns) if asked else result

    def search_batch(
        self, vectors: Any, k: int = 10, *, deadline_ms: float | None = None, **options: Unpack[SearchOptions]
    ) -> SearchBatch:
        """Ask for each of `vectors` [n, d] and wait for all; more than the rings hold at once go in as others come out.

        What ended a query that was not answered stands in its result; nothing is raised for it. `deadline_ms` is the
        whole batch's; without one the batch ends early if nothing is answered for ten seconds. Those on a GPU
        are treated as by `submit`. Raises `InvalidRequest` for what cannot be asked at all, `Unavailable` if the client
        was closed.
        """
        batch = self.batch(vectors, k, deadline_ms, **options)
        try:
            while not batch.done:
                batch.send()
                self._keep(result for result in self._collect() if not batch.take(result))
                if not batch.done:
                    self._wait()
        except BaseException:
            batch.cancel()
            raise
        return batch.result()

    def batch(
        self,
        vectors: Any,
        k: int,
        deadline_ms: float | None,
        *,
        collection: str = "",
        stage: Stage = "prefill",
        top_m: int | None = None,
        search_width: int | None = None,
        patience: int | None = None,
        filter: FilterLike = None,
    ) -> BatchSearch:
        """A batch, of which nothing is sent yet. Raises `InvalidRequest`, `Unavailable`."""
        self.dispatcher.check_open()
        width = self.dispatcher.settings.search_width if search_width is None else search_width
        spec = make_spec(k, collection, stage, top_m, width, patience, deadline_after_ms(deadline_ms), filter)
        rows = as_vectors(vectors, "vectors")
        if rows.ndim != 2 and rows.shape != (0,):
            raise InvalidRequest(f"vectors must have the shape (n, d), got {rows.shape}", "vectors")
        if len(rows) and not spec.collection:
            spec = replace(spec, collection=self._only())
        transport, tickets = self._transport_to(spec.collection), self.dispatcher.tickets
        return BatchSearch(transport, [Query(next(tickets), row, spec) for row in rows], rows, spec.k)

    def cancel(self, ticket: int) -> None:
        """The result is not wanted any more; it comes as an error, or not at all."""
        self.dispatcher.cancel(ticket)
        if self._remote is not None:
            self._remote.cancel(ticket)

    def _collect(self) -> list[SearchResult]:
        found = self.dispatcher.collect()
        return found if self._remote is None else found + self._remote.collect()

    def poll(self) -> list[SearchResult]:
        """What has ended since the last call. Never waits. Raises `Unavailable` after `close`."""
        self.dispatcher.check_open()
        results = [*self._kept.values(), *self._collect()]
        self._kept.clear()
        return results

    # ---- live collections

    def upsert(self, documents: Sequence[Mapping[str, Any]], *, collection: str = "") -> int:
        """Store documents of a live collection, in the place of those with their ids: all of them or none. How many.

        Each has an `id`, and may have `text`, `title`, `attributes` and a `vector` [d]; without that it is embedded.
        What this returns from is kept, and found by searches within a moment. Raises `InvalidRequest`,
        `InvalidDocument`, `Overloaded`, `NoRoom`, `Unavailable` (also where this client was not made by `connect`).
        """
        return self._writer().upsert(collection or self._only(), documents)

    def delete(
        self, ids: Sequence[str] | None = None, *, filter: Mapping[str, Any] | None = None, collection: str = ""
    ) -> int:
        """Delete documents of a live collection by `ids`, or what passes `filter` (its JSON object). How many.

        No search finds them that begins when this has returned. Raises as `upsert`, and `InvalidFilter`.
        """
        return self._writer().delete(collection or self._only(), ids, filter)

    def _writer(self) -> WriteClient:
        if self._writes is None:
            raise Unavailable("only a client that SearchClient.connect has made knows where its node is written to")
        return self._writes

    def identities(self, collection: str) -> tuple[str, ...]:
        """Of the builds of a collection that are served now, as far as was noticed."""
        return self.dispatcher.routes.identities(collection)

    @property
    def unavailable(self) -> dict[str, str]:
        """The collections that the pools cannot serve, and why."""
        return self.dispatcher.routes.unavailable

    def statistics(self) -> SearchStatistics:
        """What was asked of each pool, and how it went."""
        return self.dispatcher.statistics()

    # ---- sleeping

    def sleep(self, sockets: Sequence["zmq.Socket[bytes] | int"], timeout_ms: int) -> None:
        """Wait until a result may have come, one of `sockets` or descriptors can be read, or the time is over."""
        try:
            if self.arm():
                poller = zmq.Poller()
                for source in (*sockets, *self.filenos()):
                    poller.register(source, zmq.POLLIN)
                poller.poll(min(timeout_ms, _LOOK_MS) if self.dispatcher.waiting else timeout_ms)
        finally:
            self.disarm()

    def filenos(self) -> list[int]:
        """Descriptors that become readable once armed and a result has come; they change when a pool comes back."""
        found = [client.fileno() for client in self.dispatcher.clients()]
        return found if self._remote is None else [*found, self._remote.fileno()]

    def arm(self) -> bool:
        """Ask to be rung when a result comes; False if one is there already. `disarm` after every `arm`."""
        return all([client.arm() for client in self.dispatcher.clients()])  # a list: every one must be armed

    def disarm(self) -> None:
        """Awake again."""
        for client in self.dispatcher.clients():
            client.disarm()

    @property
    def live(self) -> bool:
        """Whether a pool is attached."""
        return bool(self.dispatcher.clients())

    def _wait(self) -> None:
        only = None if self._remote is not None and self._remote.busy else self.dispatcher.only_busy()
        if only is not None:
            only.wait(50.0)  # spins for a moment first: the fast way for the common case
        else:
            self.sleep((), 5)

    def _keep(self, results: Iterable[SearchResult]) -> None:
        self._kept.update((result.ticket, result) for result in results)

    def close(self) -> None:
        """End the sessions. What is outstanding never comes."""
        self.dispatcher.close()
        if self._remote is not None:
            self._remote.close()
        self.words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
