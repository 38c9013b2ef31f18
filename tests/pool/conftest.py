"""Fixtures: a small collection of vectors without documents, and pools that serve it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import GraphIndex
from runtime.node.placement.plan import NodePlan
from runtime.pool.collections.shard import OpenShard, open_shard
from runtime.pool.process import MakeArena, Timing
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.pool_session import ReplicaPolicy
from runtime.retrieval.search.query import QueueLimits
from runtime.testing.pool import InProcessPool, plan_of
from tests.gpu.datasets import clustered
from tests.pool.client_helpers import Vectors, attached
from tests.pool.written_collection import Served, WrittenCollection

DIM = 16
NUMBERED = clustered(np.random.default_rng(4), 64, DIM)


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "docs"
    vectors = np.random.default_rng(0).normal(size=(400, DIM)).astype(np.float32)
    bulk_load.build(vectors, path, metric="l2", degree=16)
    return path


@pytest.fixture(scope="session")
def index(collection: Path) -> GraphIndex:
    return CollectionReader(collection).state.segments[0].index


@pytest.fixture(scope="session")
def queries() -> Vectors:
    return np.random.default_rng(1).normal(size=(60, DIM)).astype(np.float32)


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a collection with the vectors of `collection` in two shards."""
    path = tmp_path_factory.mktemp("pool") / "split"
    vectors = np.random.default_rng(0).normal(size=(400, DIM)).astype(np.float32)
    bulk_load.build(vectors, path, metric="l2", degree=16, shards=2)
    return path


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a collection of `NUMBERED`, of documents d0, d1 … with the attribute `number`."""
    path = tmp_path_factory.mktemp("pool") / "numbered"
    documents = [Document(f"d{row}", "", f"text n{row}", {"number": row}) for row in range(len(NUMBERED))]
    bulk_load.build(documents, path, metric="l2", embedder=f"hashing-{DIM}", vectors=NUMBERED)
    return path


MakePool = Callable[..., InProcessPool]
BUSY = Timing(control_ns=0)
PATIENT = QueueLimits(retry_ns=10_000_000, wait_ns=60 * 10**9)
NEVER_AVOIDED = ReplicaPolicy(floor_ns=3600 * 10**9, stalled_ns=3600 * 10**9)
MakeClient = Callable[..., SearchClient]


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    """Return a factory of clients with long timeouts, which are closed after the test.

    Threads of a busy machine are slow. By default these clients do not treat a pool that waits for a core as slow or
    stalled; a test can pass another policy.
    """
    made: list[SearchClient] = []

    def make(
        plan: NodePlan,
        policy: ReplicaPolicy = NEVER_AVOIDED,
        clock: Callable[[], int] = time.monotonic_ns,
        **limits: int,
    ) -> SearchClient:
        client = SearchClient(
            [plan.endpoint(pool.name) for pool in plan.of_role("pool")], "test", plan.config.pool, policy,
            collections=[one.name for one in plan.config.collections], limits=replace(PATIENT, **limits), clock=clock,
            near=plan.local_pools("test"),
        )  # fmt: skip
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def make_pool(collection: Path) -> Iterator[MakePool]:
    """Return a factory of pools that never sleep long and poll after every extend; they are closed after the test."""
    made: list[InProcessPool] = []

    def make(
        plan: Any = None,
        name: str = "pool-0",
        epoch: int = 1,
        timing: Timing = BUSY,
        *,
        opener: OpenShard = open_shard,
        make_arena: MakeArena | None = None,
        **pool: Any,
    ) -> InProcessPool:
        made.append(
            InProcessPool(
                plan or plan_of(collection, **pool), name, epoch, timing, opener=opener, make_arena=make_arena
            )
        )
        return made[-1]

    yield make
    for pool in made:
        pool.close()
        pool.worker.table.close()
        pool.table.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WrittenCollection]:
    """Return a collection without shards."""
    made = WrittenCollection(tmp_path / "written")
    yield made
    made.writer.close()


MakeServed = Callable[..., Served]


@pytest.fixture
def serve(make_pool: MakePool, make_client: MakeClient) -> MakeServed:
    """Return a function that starts pools for the collection at a path, as many as the settings say."""

    def start(path: Path, **settings: Any) -> Served:
        plan = plan_of(path, **settings)
        pools = [make_pool(plan, worker.name).start() for worker in plan.of_role("pool")]
        return Served(plan, pools, attached(make_client(plan)))

    return start


@pytest.fixture
def two(collection: Path, make_pool: MakePool) -> tuple[NodePlan, list[InProcessPool]]:
    plan = plan_of(collection, workers=2, ring_slots=64)
    return plan, [make_pool(plan, f"pool-{number}").start() for number in range(2)]


@pytest.fixture
def pools(two: tuple[NodePlan, list[InProcessPool]]) -> list[InProcessPool]:
    return two[1]


@pytest.fixture
def client(two: tuple[NodePlan, list[InProcessPool]], make_client: MakeClient) -> SearchClient:
    return attached(make_client(two[0]))
