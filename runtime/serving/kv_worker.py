"""What prefill and decode workers share: model, KV blocks and tiers, retrieval, the frontend's link, and their loop."""

import time
from abc import ABC, abstractmethod
from typing import Any, Literal

import zmq

from runtime.errors import TrinityError
from runtime.node.metrics.worker_metrics import DecodeMetrics, PrefillMetrics
from runtime.node.placement.plan import CPU
from runtime.node.startup import run_early
from runtime.node.worker import Worker
from runtime.retrieval.build_follower import BuildFollower
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.retriever import Retriever
from runtime.retrieval.search.client import SearchClient
from runtime.serving.frontend_link import FrontendLink
from runtime.serving.kv.block_events import BlockEvents
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.kv.tiers import BUSY_SHARE, Tiers
from runtime.serving.kv.transport import Transport
from runtime.serving.messages import Failed, Hello
from runtime.serving.model.compilation import Compilation, ModelSetup


class KvWorker(ABC):
    """A worker that holds KV. A subclass creates its end of the hand-over, and calls `_connect` at the end."""

    role: Literal["prefill", "decode"]
    metrics: type[PrefillMetrics] | type[DecodeMetrics]

    def __init__(self, worker: Worker, transport: Transport, idle_ms: int) -> None:
        """Load everything. `idle_ms`: the longest sleep, between heartbeats."""
        self._worker, self._idle_ms = worker, idle_ms
        plan, device, threads = worker.plan, worker.placement.embedder, worker.placement.threads
        reranks = self.role == "prefill"
        self._slots = (plan.config.prefill if self.role == "prefill" else plan.config.decode).slots
        loading = run_early(
            lambda: (CollectionRegistry.warm(plan, device), Reranking.load(plan) if reranks else None),
            captures=device != CPU,
        )
        self._setup = ModelSetup.of(plan.config, self.role, transport, plan.block_tokens, threads)
        self._model = self._setup.load(buffer=self._kv_memory(transport), stamp=worker.startup.mark)
        self._blocks = BlockManager(self._setup.blocks, self._setup.block_tokens, self._model.identity)
        self._compilation = Compilation(self._model, self._setup, self._blocks)
        if worker.placement.spare is not None:
            self._compilation.finish()
        self._tiers = Tiers.of_plan(plan, self._blocks, self._model.kv_array)
        registry, reranker = loading()
        worker.startup.mark("embedder")
        if worker.await_assignment():
            registry.refresh()
        self._table, self._log = worker.table, worker.log
        client = SearchClient.of_plan(worker.plan, worker.name)
        reranking = Reranking.of_plan(worker.plan, reranker, worker.table, threads)
        self.retriever = Retriever(registry, client, threads=threads, reranking=reranking)
        self.retriever.warm_up()
        worker.startup.mark("first search")
        self._follower = BuildFollower(registry, client.identities, worker.table, self.retriever.report)

    def _kv_memory(self, transport: Transport) -> Any:
        """Return the memory in which the model's KV lies; None: its own."""
        return None

    def _connect(self, socket: "zmq.Socket[bytes]", endpoint: str = "") -> None:
        """Connect to the frontend. `socket`: of the hand-over; `endpoint`: where it accepts some."""
        worker, setup = self._worker, self._setup
        hello = Hello(
            role=self.role, worker=worker.name, epoch=worker.epoch, pid=worker.pid, slots=self._slots,
            limit_tokens=setup.context_tokens, endpoint=endpoint, block_tokens=setup.block_tokens, blocks=setup.blocks,
            model=self._model.identity,
        )  # fmt: skip
        self.link = FrontendLink(worker.plan.endpoint("frontend"), hello, BlockEvents(self._blocks))
        self._handover_socket = socket

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether it has requests."""

    @abstractmethod
    def step(self) -> None:
        """Run one iteration of the loop."""

    def run(self) -> None:
        """Serve until the worker is stopped and its requests are finished (the supervisor bounds the drain)."""
        self._worker.ready()
        while self._worker.should_continue(busy=self.busy, released=self.link.released):
            self.step()
        self.close()

    def _end_step(self, pass_ns: int, *, idle: bool) -> None:
        """Write to tiers beside a pass that took `pass_ns`; without one (0) and `idle`, write or wait for a message."""
        self._compilation.advance()
        if pass_ns:
            self._tiers.write(pass_ns // BUSY_SHARE)
        elif idle and not self._tiers.write():
            self._sleep()

    def _sleep(self) -> None:
        """Wait for a message of the frontend, of the hand-over or of the pool."""
        self.retriever.sleep((self.link.socket, self._handover_socket), self._idle_ms)

    def _report(self, waiting: int, running: int, free_slots: int, malformed: int, step_ns: int = 0) -> None:
        """Report the load in metrics and to the frontend. `malformed`: messages of the hand-over."""
        table, metrics = self._table, self.metrics
        self._follower.step(time.monotonic_ns())
        self._tiers.publish(table, metrics)
        table.set(metrics.WAITING, waiting)
        table.set(metrics.RUNNING, running)
        table.set(metrics.UNCOMPILED, self._compilation.uncompiled)
        table.total(metrics.MALFORMED, self.link.malformed.count + malformed)
        self.link.report(
            waiting, running, free_slots, self._worker.stopping, self._blocks.available, step_ns,
            self._tiers.load_saves,
        )  # fmt: skip

    def _fail(self, request_id: str, error: TrinityError) -> None:
        """Report the error that ends a request."""
        self._log.info("failed: %s: %s", error.code, error.message, extra={"request": request_id})
        self.link.send(Failed(request_id, error.code, error.message, error.param))

    def close(self) -> None:
        self.link.close()
        self._tiers.close()
        self.retriever.close()
        self._compilation.close()
