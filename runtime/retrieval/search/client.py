"""The search client: one client over all pool workers of a node, for any process of the same user.

with SearchClient.connect("my-node") as client:
    result = client.search(vector, k=10, collection="docs")
    batch = client.search_batch(vectors, k=10, collection="docs")
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import zmq
from msgspec.structs import replace

from ipc import Memo, SearchSpec, Stage
from runtime.errors import InvalidRequest, Unavailable
from runtime.node.placement.plan import NodePlan
from runtime.node.run_dir import find_node
from runtime.node.worker_config import PoolSection
from runtime.retrieval.attributes.filters import FilterLike, filter_bytes
from runtime.retrieval.search.batch_search import BatchSearch
from runtime.retrieval.search.dispatcher import Dispatcher
from runtime.retrieval.search.node_pools import NodePools
from runtime.retrieval.search.pool_session import ReplicaPolicy
from runtime.retrieval.search.query import (
    AcceptBuild,
    Query,
    QueueLimits,
    SearchBatch,
    SearchOptions,
    SearchResult,
    SearchStatistics,
    SubmitOptions,
    check_deadline,
    deadline_after_ms,
    make_spec,
)
from runtime.retrieval.search.routing import only_of
from runtime.retrieval.search.vectors import as_vectors, query_vector

_RECONNECT_MS = 5  # interval of connection checks while queries wait for a pool


class SearchClient:
    """Submits queries to the pools at `endpoints` and polls results. Not thread-safe; only `search…` and `sleep` block.

    `defaults`: top_m of queries that specify none. `find` returns the endpoints of
    the pools, once all known ones are lost.
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
        near: Collection[int] = (),
    ) -> None:
        """near: indexes of the endpoints that are preferred."""
        self._collections = tuple(collections)  # the node's own; empty: as its pools report
        limits, top_m = limits or QueueLimits(), (defaults or PoolSection()).top_m
        pools = NodePools(endpoints, name, top_m, policy, find, limits.retry_ns, near)
        self.dispatcher = Dispatcher(pools, limits, clock)
        self._specs: Memo[tuple[Any, ...], SearchSpec] = Memo(lambda key: make_spec(*key[: len(key) // 2]))
        self._unclaimed: dict[int, SearchResult] = {}  # results that arrived while `search` waited for another

    @classmethod
    def of_plan(cls, plan: NodePlan, name: str) -> Self:
        """Return the client of one of the node's own workers; pools are attached as they start."""
        names = [collection.name for collection in plan.config.collections]
        endpoints = [plan.endpoint(pool.name) for pool in plan.of_role("pool")]
        return cls(endpoints, name, plan.config.pool, collections=names, near=plan.local_pools(name))

    @classmethod
    def connect(cls, node: str | Path, name: str = "client", timeout_s: float = 5.0) -> Self:
        """Return a client of a running node, by its name or run directory; it reconnects if the node is restarted.

        Raises `Unavailable` if no pool answers.
        """
        if not isinstance(node, str | Path):
            raise InvalidRequest(f"node must be a name or the Path of a run directory, not {node!r}", "node")
        info = find_node(node)

        def find() -> Iterable[str]:
            node_info = find_node(node)
            client._collections = node_info.collections
            return node_info.pools

        client = cls(info.pools, name, find=find, collections=info.collections)
        end = time.monotonic_ns() + int(timeout_s * 1e9)
        while time.monotonic_ns() < end and client.dispatcher.pools.sessions:
            client.dispatcher.collect()
            if client.live and not client.dispatcher.pools.connecting:
                return client
            time.sleep(0.002)
        if not client.live:
            client.close()
            raise Unavailable(f"no pool of node {str(node)!r} answered within {timeout_s:g} s")
        return client

    # ---- queries

    def query(
        self,
        vector: Any,
        k: Any,
        *,
        collection: str = "",
        stage: Stage = "prefill",
        deadline_ns: int = 0,
        top_m: int | None = None,
        search_width: int | None = None,
        patience: int | None = None,
        filter: FilterLike = None,
        accept: AcceptBuild | None = None,
        flow: int = 0,
    ) -> Query:
        """Check the arguments of a search and return it as a query, for the `dispatcher`. Raises as `submit`."""
        parameters = (k, collection, stage, top_m, search_width, patience)
        try:
            spec = self._specs[*parameters, *map(type, parameters)]  # True is not 1 here
        except TypeError:  # unhashable: `make_spec` raises an error that names it
            spec = make_spec(*parameters)
        if filter is not None and (content := filter_bytes(filter)):
            spec = replace(spec, filter=content)
        if type(deadline_ns) is not int or deadline_ns or flow:
            spec = replace(spec, deadline_ns=check_deadline(deadline_ns), flow=flow)
        row = query_vector(vector)
        if not spec.collection:
            spec = replace(spec, collection=self._only_collection())
        return Query(spec, row, accept=accept, ticket=next(self.dispatcher.tickets))

    def submit(self, vector: Any, k: int, *, wait_for_room: bool = False, **options: Unpack[SubmitOptions]) -> int:
        """Submit a query for the `k` nearest neighbors of `vector` [d]; return its ticket for `poll`.

        `collection` may be omitted if the node has only one.
        `vector` is a sequence of numbers, a numpy array, or an object with `__dlpack__` or `__cuda_array_interface__`.
        A vector on a GPU must not be changed until its query has ended: float32 is copied from there into the
        memory of a pool on that GPU or of one that reaches it, and again into another's if the pool dies; to other
        pools it is copied through the host.
        `filter`: results must pass it; in OpenAI's format (docs/collections.md), or parsed by `parse_filter`, which is
        cheaper to use repeatedly.
        `wait_for_room`: accept the query, within bounds, while the rings are full. `accept`: predicate on the identity
        of a collection's build, default any; the result names the build it comes from. `flow`: see `SearchSpec`.
        Raises `InvalidRequest` (wrong size, a limit exceeded), `Overloaded`, or `Unavailable` (the client is closed,
        the collection cannot be served, `CollectionReplaced` if no served build is accepted) if the query is not
        accepted.
        """
        query = self.query(vector, k, **options)
        self.dispatcher.submit(query, wait_for_room)
        return query.ticket

    def _only_collection(self) -> str:
        """Return the name of the only collection. Raises `InvalidRequest`, `Unavailable`."""
        return only_of(self._collections or self.dispatcher.pools.routes.collections)

    def search(
        self,
        vector: Any,
        k: int = 10,
        *,
        deadline_ms: float | None = None,
        **options: Unpack[SearchOptions],
    ) -> SearchResult:
        """Submit a query and wait for its result. `vector` as for `submit`. Raises the error that ended the query."""
        deadline_ns = 0 if deadline_ms is None else deadline_after_ms(deadline_ms)
        query = self.query(vector, k, deadline_ns=deadline_ns, **options)
        ticket = query.ticket
        self.dispatcher.submit(query)
        try:
            while ticket not in self._unclaimed:
                self._unclaimed.update((result.ticket, result) for result in self.dispatcher.collect())
                if ticket not in self._unclaimed:
                    self._wait()
        except BaseException:
            self.cancel(ticket)
            raise
        return self._unclaimed.pop(ticket).checked()

    def search_batch(
        self, vectors: Any, k: int = 10, *, deadline_ms: float | None = None, **options: Unpack[SearchOptions]
    ) -> SearchBatch:
        """Search for each of `vectors` [n, d] and wait for all; batches larger than the rings are sent in parts.

        The error of a query that was not answered is in its result and is not raised. `deadline_ms` applies to the
        whole batch; without one the batch ends early if nothing is answered for ten seconds. Vectors on a GPU are
        treated as by `submit`. Raises `InvalidRequest` if the batch is invalid, `Unavailable` if the client is closed.
        """
        batch = self.batch(vectors, k, deadline_ms, **options)
        try:
            while not batch.done:
                batch.send()
                self._unclaimed.update((one.ticket, one) for one in self.dispatcher.collect() if not batch.add(one))
                if not batch.done:
                    self._wait()
        except BaseException:
            batch.cancel()
            raise
        return batch.result()

    def batch(self, vectors: Any, k: int, deadline_ms: float | None, **options: Unpack[SearchOptions]) -> BatchSearch:
        """Return a batch of which nothing is sent yet. Raises `InvalidRequest`, `Unavailable`."""
        self.dispatcher.check_open()
        spec = make_spec(k, deadline_ns=deadline_after_ms(deadline_ms), **options)
        rows = as_vectors(vectors, "vectors")
        if rows.ndim != 2 and rows.shape != (0,):
            raise InvalidRequest(f"vectors must have the shape (n, d), got {rows.shape}", "vectors")
        if len(rows) and not spec.collection:
            spec = replace(spec, collection=self._only_collection())
        tickets = self.dispatcher.tickets
        return BatchSearch(self.dispatcher, [Query(spec, row, ticket=next(tickets)) for row in rows], spec.k)

    def cancel(self, ticket: int) -> None:
        """Cancel a query: it ends with an error, or is not returned by `poll`."""
        self.dispatcher.cancel(ticket)

    def poll(self) -> list[SearchResult]:
        """Return what has ended since the last call. Never blocks. Raises `Unavailable` after `close`."""
        self.dispatcher.check_open()
        results = [*self._unclaimed.values(), *self.dispatcher.collect()]
        self._unclaimed.clear()
        return results

    # ---- collections

    def identities(self, collection: str) -> tuple[str, ...]:
        """Return the identities of the builds of a collection that are served now, as far as known here."""
        return self.dispatcher.pools.routes.identities(collection)

    @property
    def unavailable(self) -> dict[str, str]:
        """The collections that the pools cannot serve: the reasons."""
        return self.dispatcher.pools.routes.unavailable

    def statistics(self) -> SearchStatistics:
        """Return the statistics of each pool."""
        return self.dispatcher.statistics()

    # ---- sleeping

    def sleep(self, sockets: Sequence["zmq.Socket[bytes] | int"], timeout_ms: int) -> None:
        """Wait for a possible result, a readable socket or descriptor in `sockets`, or the timeout."""
        try:
            if self.arm():
                poller = zmq.Poller()
                for source in (*sockets, *self.filenos()):
                    poller.register(source, zmq.POLLIN)
                poller.poll(min(timeout_ms, _RECONNECT_MS) if self.dispatcher.waiting else timeout_ms)
        finally:
            self.disarm()

    def filenos(self) -> list[int]:
        """Return the descriptors that become readable when, once armed, a result arrives; they change on reconnects."""
        return [client.fileno() for client in self.dispatcher.pools.clients()]

    def arm(self) -> bool:
        """Enable the doorbells; return False if a result is already there. Call `disarm` after every `arm`."""
        return all([client.arm() for client in self.dispatcher.pools.clients()])  # a list: every one must be armed

    def disarm(self) -> None:
        """Disable the doorbells."""
        for client in self.dispatcher.pools.clients():
            client.disarm()

    @property
    def live(self) -> bool:
        """Whether a pool is attached."""
        return bool(self.dispatcher.pools.clients())

    @property
    def reachable(self) -> bool:
        """Whether a pool is attached or being attached."""
        return self.live or self.dispatcher.pools.connecting

    def _wait(self) -> None:
        only = self.dispatcher.only_busy()
        if only is not None:
            only.wait(50.0)  # spins before it sleeps: fast for the common case
        else:
            self.sleep((), 5)

    def close(self) -> None:
        """Close the sessions; outstanding queries never end."""
        self.dispatcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
