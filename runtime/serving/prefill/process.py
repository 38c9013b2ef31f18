"""A prefill worker's process. Its loop: receive → retrieve → prefill → publish.

A request asks the pool before it takes a KV slot, so that waiting for passages never holds one. Its KV stays in the
slot, in memory that decode workers can map, until the decode worker it was offered to has pulled it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ipc import HandoverSource, IpcError, KvArena
from runtime.errors import ContextLengthExceeded, InvalidRequest, TrinityError, WorkerLost
from runtime.node.metrics import EMBED_TIME, PREFILL_TIME, QUEUE_TIME, RETRIEVAL_TIME
from runtime.node.worker import Worker
from runtime.retrieval.client import SearchClient
from runtime.retrieval.passages import Passage
from runtime.retrieval.retriever import Found, Library, Retriever
from runtime.serving import stages
from runtime.serving.frontend_link import FrontendLink
from runtime.serving.messages import Cancel, Decode, Failed, Hello, Prefill, Retrieved, Welcome, encode
from runtime.serving.model.language_model import Chunk, LanguageModel
from runtime.serving.model.prompt import build_prompt, query_text
from runtime.serving.model.sampling import Sampler

if TYPE_CHECKING:
    import torch

_IDLE_MS = 100  # the longest sleep: the loop writes its heartbeat in between


@dataclass
class Job:
    """A request on its way through prefill. `done` of its `tokens` are in the KV slot."""

    request: Prefill
    stages: dict[str, int]
    ticket: int | None = None
    passages: tuple[Passage, ...] = ()
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    done: int = 0
    offer: int | None = None

    @property
    def id(self) -> str:
        return self.request.request_id


class PrefillWorker:
    """Queues → KV slots → offers: where every request of this worker is."""

    def __init__(self, worker: Worker) -> None:
        config = worker.plan.config
        assert config.model is not None
        self._worker, self._table, self._log = worker, worker.table, worker.log
        self._limits = config.prefill
        self._context_tokens = config.model.context_tokens
        kv_bytes = LanguageModel.kv_bytes(config.model.name, config.prefill.slots, self._context_tokens)
        self._arena = KvArena.create(config.prefill.slots, kv_bytes, epoch=worker.epoch)
        self._model = LanguageModel.load(
            config.model.name,
            slots=config.prefill.slots,
            context_tokens=self._context_tokens,
            threads=config.prefill.threads,
            buffer=self._arena.payload,
        )
        self._model.forward([Chunk(0, 0, [0, 0])])  # the first pass allocates; a user shall not wait for that
        self._retriever = Retriever(
            Library(worker.plan, threads=config.prefill.threads),
            SearchClient.of_plan(worker.plan, worker.name),
        )
        self._retriever.warm_up()
        self._source = HandoverSource(
            worker.name, self._arena, lease_ms=worker.plan.config.http.request_timeout_s * 1e3
        )
        self._waiting: deque[Job] = deque()  # with their passages, for a slot
        self._asking: dict[int, Job] = {}  # ticket → the job that waits for its passages
        self._running: list[Job] = []  # in a slot, some of the prompt still to run
        self._offered: dict[int, Job] = {}  # offer id → the job whose KV waits to be pulled
        self._free = list(range(config.prefill.slots))
        self._link = FrontendLink(
            worker.plan.endpoint("frontend"),
            Hello(
                role="prefill", worker=worker.name, epoch=worker.epoch, pid=worker.pid,
                slots=config.prefill.slots, limit_tokens=self._context_tokens,
            ),
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        return bool(self._jobs())

    def step(self) -> None:
        """One round of the loop."""
        self._table.beat()
        self._receive()
        self._retrieve()
        self._admit()
        self._prefill()
        self._collect_outcomes()
        self._publish()
        if not self._running:
            self._sleep()

    # ---- receive

    def _receive(self) -> None:
        arrived: list[Job] = []
        for message in self._link.receive():
            match message:
                case Prefill():
                    stamps = {stages.RECEIVED: message.received_ns, stages.DEQUEUED: time.monotonic_ns()}
                    arrived.append(Job(message, stamps))
                case Cancel():
                    arrived = [job for job in arrived if job.id != message.request_id]
                    self._drop({message.request_id})
                case Welcome():
                    arrived.clear()
                    self._drop({job.id for job in self._jobs()})
        for job in arrived:
            self._guard(job, self._start)

    def _start(self, job: Job) -> None:
        """Check what can be checked before any work, then ask for passages, or queue for a slot at once."""
        request = job.request
        bare = build_prompt(
            self._model.tokenizer, request.messages, request.prompt, budget_tokens=self._prompt_budget(request)
        )
        if max(bare.tokens, default=0) >= self._model.info.vocabulary:
            raise InvalidRequest(
                f"token id {max(bare.tokens)} in the prompt; the vocabulary has {self._model.info.vocabulary}", "prompt"
            )
        retrieval = request.retrieval
        if retrieval is None:
            job.tokens = bare.tokens
            self._waiting.append(job)
            return
        text = query_text(self._model.tokenizer, request.messages, request.prompt)
        vector = self._retriever.library.embed(retrieval.collection, [text])[0]
        job.stages[stages.EMBEDDED] = time.monotonic_ns()
        job.ticket = self._retriever.ask(
            vector, retrieval.collection, retrieval.k, stage="prefill", deadline_ns=request.deadline_ns
        )
        self._asking[job.ticket] = job

    def _prompt_budget(self, request: Prefill) -> int:
        budget = self._context_tokens - request.sampling.max_tokens
        if budget < 1:
            raise ContextLengthExceeded(
                f"max_tokens = {request.sampling.max_tokens} leaves no room for a prompt in {self._context_tokens}",
                "max_tokens",
            )
        return budget

    # ---- retrieve

    def _retrieve(self) -> None:
        for found in self._retriever.poll():
            job = self._asking.pop(found.ticket, None)
            if job is not None:
                job.ticket = None
                self._guard(job, partial(self._take_passages, found=found))

    def _take_passages(self, job: Job, found: Found) -> None:
        if found.error is not None:
            raise found.error
        job.stages[stages.SEARCHED] = time.monotonic_ns()
        prompt = build_prompt(
            self._model.tokenizer,
            job.request.messages,
            job.request.prompt,
            found.passages,
            budget_tokens=self._prompt_budget(job.request),
            passage_tokens=self._limits.passage_tokens,
        )
        job.tokens, job.passages = prompt.tokens, prompt.used
        self._link.send(Retrieved(job.id, prompt.used))
        self._waiting.append(job)

    # ---- prefill

    def _admit(self) -> None:
        """Give free slots to the waiting, the earliest deadline first."""
        while self._free and self._waiting:
            job = min(self._waiting, key=lambda job: job.request.deadline_ns)
            self._waiting.remove(job)
            job.slot = self._free.pop()
            self._arena.begin(job.slot)
            job.stages[stages.PREFILL_BEGIN] = time.monotonic_ns()
            self._running.append(job)

    def _prefill(self) -> None:
        """One pass through the model: at most `chunk_tokens` tokens, of as many prompts as that holds."""
        budget = self._limits.chunk_tokens
        batch: list[tuple[Job, Chunk]] = []
        for job in self._running:
            if budget == 0:
                break
            tokens = job.tokens[job.done : job.done + budget]
            batch.append((job, Chunk(job.slot, job.done, tokens)))
            budget -= len(tokens)
        if not batch:
            return
        logits = self._model.forward([chunk for _, chunk in batch])
        for (job, chunk), row in zip(batch, logits, strict=True):
            self._guard(job, partial(self._advance, chunk=chunk, logits=row))

    def _advance(self, job: Job, chunk: Chunk, logits: "torch.Tensor") -> None:
        job.done += len(chunk.tokens)
        if job.done < len(job.tokens):
            return
        first = Sampler(job.request.sampling).draw(logits)
        job.stages[stages.PREFILL_END] = time.monotonic_ns()
        self._running.remove(job)
        payload = Decode(
            request_id=job.id,
            frontend_epoch=job.request.frontend_epoch,
            sampling=job.request.sampling,
            tokens=tuple(job.tokens),
            first_token=first,
            retrieval=job.request.retrieval,
            seen_passages=tuple(passage.id for passage in job.passages),
            stages=job.stages,
        )
        job.offer = self._source.offer(job.request.decode_endpoint, job.slot, encode(payload))
        self._offered[job.offer] = job
        self._record(job)

    # ---- publish

    def _collect_outcomes(self) -> None:
        for outcome in self._source.poll():
            job = self._offered.pop(outcome.offer_id, None)
            if job is None:
                continue
            self._free.append(job.slot)
            if not outcome.accepted:
                self._fail(job, WorkerLost(f"{job.request.decode_worker} did not take the hand-over: {outcome.reason}"))

    def _publish(self) -> None:
        waiting = len(self._waiting) + len(self._asking)
        running = len(self._running) + len(self._offered)
        self._table.set("trinity_prefill_waiting", waiting)
        self._table.set("trinity_prefill_running", running)
        self._link.report(waiting, running, len(self._free), self._worker.stopping)

    def _record(self, job: Job) -> None:
        stamps = job.stages
        self._table.add("trinity_prompt_tokens_total", len(job.tokens))
        self._table.observe(QUEUE_TIME, (stamps[stages.DEQUEUED] - stamps[stages.RECEIVED]) / 1e9)
        self._table.observe(PREFILL_TIME, (stamps[stages.PREFILL_END] - stamps[stages.PREFILL_BEGIN]) / 1e9)
        if stages.SEARCHED in stamps:
            self._table.observe(EMBED_TIME, (stamps[stages.EMBEDDED] - stamps[stages.DEQUEUED]) / 1e9)
            self._table.observe(RETRIEVAL_TIME, (stamps[stages.SEARCHED] - stamps[stages.EMBEDDED]) / 1e9)

    # ---- ends

    def _guard(self, job: Job, action: Callable[[Job], None]) -> None:
        """Do something for one job; an error ends this job and no other."""
        try:
            action(job)
        except (TrinityError, IpcError) as error:
            self._forget(job)
            self._fail(job, error)

    def _fail(self, job: Job, error: TrinityError | IpcError) -> None:
        self._table.add("trinity_prefill_failed_total")
        known = error if isinstance(error, TrinityError) else WorkerLost(str(error))
        self._link.send(Failed(job.id, known.code, known.message, known.param))

    def _drop(self, request_ids: set[str]) -> None:
        for job in self._jobs():
            if job.id in request_ids:
                self._forget(job)

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *self._asking.values(), *self._running, *self._offered.values()]

    def _forget(self, job: Job) -> None:
        """Free all that a job holds, wherever it is."""
        if job.ticket is not None:
            self._asking.pop(job.ticket, None)
            self._retriever.cancel(job.ticket)
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._running:
            self._running.remove(job)
        if job.offer is not None and self._offered.pop(job.offer, None) is not None:
            self._source.withdraw(job.offer)
        if job.slot >= 0:
            self._arena.begin(job.slot)  # a decode worker that is copying it just now finds it changed
            self._free.append(job.slot)
            job.slot = -1

    def _sleep(self) -> None:
        """Until something comes: from the frontend, the other side of a hand-over, or the pool."""
        self._retriever.client.sleep((self._link.socket, self._source.socket), _IDLE_MS)

    def close(self) -> None:
        self._link.close()
        self._source.close()
        self._retriever.client.close()


def run(worker: Worker) -> None:
    """The process: serve until told to stop, and until what it has is finished (the supervisor bounds that)."""
    prefill = PrefillWorker(worker)
    worker.ready()
    while not worker.stopping or prefill.busy:
        prefill.step()
    prefill.close()
