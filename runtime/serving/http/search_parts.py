"""What every process that serves HTTP answers with: searches in the node's collections, and the settings."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.node.api_keys import ApiKey
from runtime.node.placement.plan import NodePlan
from runtime.node.stores_config import STORES
from runtime.node.worker import Worker
from runtime.retrieval.async_retriever import AsyncRetriever
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.search.client import SearchClient
from runtime.serving.http.access import access_by_key
from runtime.serving.http.ranking import Ranker
from runtime.serving.http.service import Collections, NoCollections, Settings
from runtime.serving.model.model_info import ModelInfo

_LATE = 10  # times `slo.search_s`: a text that would wait longer for its embedding is refused
_COMPUTING_THREADS = 8  # of one interpreter: a batch holds its lock for a tenth of its time


def computing_threads(plan: NodePlan) -> int:
    """Return how many threads embed in a process that serves HTTP, and how many rerank: its share of the cores that no
    model worker computes on."""
    on_cpu = [worker for worker in plan.workers if not worker.gpu or worker.only_embeds_on_gpu]
    models = sum(worker.threads for worker in on_cpu if worker.role in ("prefill", "decode"))
    free = len(os.sched_getaffinity(0)) - models
    return min(max(free // plan.config.http.workers, 1), _COMPUTING_THREADS)


class _Public(Mapping[str, int]):
    """Collections by name, without the node's own."""

    def __init__(self, collections: Mapping[str, int]) -> None:
        self._collections = collections
        self._names = tuple(name for name in collections if name != STORES)  # the mapping's keys never change

    def __getitem__(self, name: str) -> int:
        if name == STORES:
            raise KeyError(name)
        return self._collections[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class SearchParts:
    """Searches of a process. `search` is None on a node without collections."""

    registry: CollectionRegistry
    reranking: Reranking | None
    search: AsyncRetriever | None
    collections: Collections

    @classmethod
    def open(cls, worker: Worker) -> "SearchParts":
        """Open the collections, and load the embedders and the reranker. Raises `ModelError`."""
        plan, threads = worker.plan, computing_threads(worker.plan)
        registry = CollectionRegistry(plan, device=worker.placement.embedder)
        reranking = Reranking.of_plan(plan, Reranking.load(plan), worker.table, threads)
        worker.startup.mark("embedder")
        search = None
        if plan.config.searchable:
            search = AsyncRetriever(
                registry,
                SearchClient.of_plan(plan, worker.name),
                threads=threads,
                max_wait_s=_LATE * plan.config.slo.search_s,
                reranking=reranking,
            )
        return cls(registry, reranking, search, search or NoCollections())

    def settings(self, plan: NodePlan, keys: Sequence[ApiKey]) -> Settings:
        """Return the application's settings."""
        config, own, served = plan.config, plan.config.own_model, plan.config.model
        return Settings(
            model=ModelInfo.read(own.name).name if own else served.name if served else "",
            context_tokens=own.context_tokens if own else 0,
            collections=_Public(self.registry.dims),
            http=config.http,
            api_keys=tuple(one.key for one in keys),
            access=access_by_key(keys),
            max_k=plan.max_k,
            probes=config.probes,
            max_probe_tokens=config.prompts.passage_tokens,
            ranker=Ranker("" if self.reranking is None else self.reranking.name),
            default_max_tokens=min(256, own.context_tokens // 4) if own else 256,
        )
