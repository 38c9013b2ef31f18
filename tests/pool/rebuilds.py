"""Collections that are rebuilt while they are served: every text names its build."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from runtime.node.placement.plan import NodePlan
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import read_description
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.passages import Passage
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.retrieval.retriever import Retriever
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import InProcessPool
from runtime.testing.waiting import until
from tests.queries import query_of

DIM = 16
ROWS = 40
LATER_NS = 1 << 60


def build(path: Path, generation: int, *, shards: int = 1, dim: int = DIM, rows: int = ROWS) -> str:
    """Replace the collection by another build, with other texts of the same rows. Return its identity."""
    documents = [Document(f"g{generation}-{row}", "", f"text {row} of generation {generation}") for row in range(rows)]
    vectors = np.random.default_rng(generation).normal(size=(rows, dim)).astype(np.float32)
    bulk_load.build(
        documents, path, metric="l2", embedder=f"hashing-{dim}", vectors=vectors, degree=8, shards=shards, force=True
    )
    return read_description(path).identity


def generation_of(passages: tuple[Passage, ...]) -> int:
    """Return the build of all passages. Raises AssertionError if ids or texts are of several."""
    found = {int(p.text.rpartition(" ")[2]) for p in passages} | {int(p.id[1:].partition("-")[0]) for p in passages}
    assert len(found) == 1, f"texts of several builds in one answer: {passages}"
    return found.pop()


@contextmanager
def retriever(plan: NodePlan, clock: Callable[[], int] = time.monotonic_ns) -> Iterator[Retriever]:
    """Return a worker's retriever with its own document library."""
    made = Retriever(CollectionRegistry(plan, clock=clock), SearchClient.of_plan(plan, "test"))
    yield made
    made.close()


def ask(retriever: Retriever, text: str = "what?", k: int = 5, build: str = "") -> RetrievalResult:
    """Run one query to its end."""
    found: list[RetrievalResult] = []
    ticket = retriever.submit(query_of(text, "docs", k, "decode", LATER_NS), build)

    def poll() -> None:
        found.extend(retriever.poll())
        retriever.sleep((), 1)

    until(lambda: any(one.ticket == ticket for one in found), poll)
    return next(one for one in found if one.ticket == ticket)


def killed(pool: InProcessPool) -> None:
    """Stop a pool worker, and wait until another can take its endpoint: ZeroMQ releases names asynchronously."""
    pool.close()
    name = pool.endpoint.removeprefix("ipc://")
    until(lambda: name not in Path("/proc/net/unix").read_text())
