"""Process of a prefill worker. Its loop: receive → retrieve → prefill → publish.

A request queries the pool before it enters the batch, so waiting for passages never holds KV blocks. Its KV stays in
memory that decode can map until decode has pulled it, and afterwards as a prefix cache until the blocks are evicted.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from ipc import IpcError
from runtime.errors import InternalError, TrinityError, WorkerLost
from runtime.node.metrics.worker_metrics import OfferOutcome, PrefillMetrics
from runtime.node.worker import Worker
from runtime.retrieval.passages import without_text
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.serving import stages
from runtime.serving.kv.tiers import LOAD_NS, SavedRow
from runtime.serving.kv.transport import Transport, transport_for
from runtime.serving.kv_worker import KvWorker
from runtime.serving.messages import Cancel, Prefill, Retrieved, Welcome, encode
from runtime.serving.model.language_model import Chunk, SampledToken
from runtime.serving.model.model_info import ModelInfo, kv_type
from runtime.serving.prefill.job import Disaggregation, Job, virtual_deadline_ns
from runtime.serving.prefill.prompts import Prompts, common_prefix


class PrefillWorker(KvWorker):
    """Runs the requests of one prefill worker: queues → KV blocks → offers."""

    role, metrics = "prefill", PrefillMetrics

    def __init__(self, worker: Worker, transport: Transport | None = None, idle_ms: int = 100) -> None:
        """`transport`: by default the one for the worker's device. `idle_ms`: the longest sleep, between heartbeats."""
        super().__init__(worker, transport or transport_for(worker.placement.device), idle_ms)
        self._source.name = worker.name  # assigned meanwhile to a standby worker
        config = worker.plan.config
        self._through_pool = config.handover.mode == "pool"
        self._disaggregation = Disaggregation(
            config.handover.disaggregate, config.slo.tpot_s, config.decode.chunk_tokens
        )
        self.chunk_tokens = config.prefill.pass_tokens
        self._prompts = Prompts(
            self._model.tokenizer, self._model.info.vocabulary, self._setup.context_tokens,
            config.prompts.passage_tokens,
        )  # fmt: skip
        self._retrieving: dict[int, Job] = {}  # ticket → job that waits for its passages
        self._waiting: list[Job] = []  # prompts that wait for a lease and blocks
        self._running: list[Job] = []  # prompts that have blocks and are not computed completely
        self._offered: dict[int, Job] = {}  # offer id → job whose KV waits to be pulled
        self._connect(self._source.socket)

    def _kv_memory(self, transport: Transport) -> Any:
        """Return memory that decode can map."""
        setup = self._setup
        kind = kv_type(setup.weights, transport.kernels)
        self._source = transport.source(
            self._worker.name,
            leases=self._slots,
            kv_bytes=ModelInfo.read(setup.name).kv_bytes(setup.blocks, setup.block_tokens, kind),
            epoch=self._worker.epoch,
        )
        return self._source.memory

    @property
    def busy(self) -> bool:
        return bool(self._jobs())

    def step(self) -> None:
        self._table.beat()
        self._receive()
        self._retrieve()
        self._admit()
        took_ns = self._prefill()
        self._collect_outcomes()
        self._publish()
        self._end_step(took_ns, idle=not self._running)

    # ---- receive

    def _receive(self) -> None:
        arrived: list[Job] = []
        for message in self.link.receive():
            match message:
                case Prefill(generation=generation, resume=resume):
                    stamps = {stages.RECEIVED: generation.received_ns}
                    if resume:
                        stamps[stages.FIRST_TOKEN] = resume.first_token_ns
                    else:
                        stamps[stages.DEQUEUED] = time.monotonic_ns()
                    arrived.append(Job(message, stamps))
                case Cancel():
                    arrived = [job for job in arrived if job.id != message.request_id]
                    self._cancel({message.request_id})
                case Welcome():
                    arrived.clear()
                    self._cancel({job.id for job in self._jobs()})
        for job in arrived:
            self._log.debug("received", extra={"request": job.id})
            self._guard(job, self._start)

    def _start(self, job: Job) -> None:
        """Validate the request, then query the pool for passages, or queue the prompt if it needs none."""
        request = job.request
        if request.resume is not None:
            job.tokens, job.passages = list(request.resume.tokens), request.resume.seen_passages
            self._enqueue(job)
            return
        generation = request.generation
        job.tokens = self._prompts.bare(generation)
        if generation.retrieval is None:
            self._enqueue(job)
            return
        job.ticket = self.retriever.submit(self._prompts.query(generation, generation.retrieval))
        self._retrieving[job.ticket] = job

    # ---- retrieve

    def _retrieve(self) -> None:
        for result in self.retriever.poll():
            job = self._retrieving.pop(result.ticket, None)
            if job is not None:
                job.ticket = None
                self._guard(job, partial(self._add_passages, result=result))

    def _add_passages(self, job: Job, result: RetrievalResult) -> None:
        """Put the retrieved passages into the prompt and queue it."""
        if result.error is not None:
            raise result.error
        job.stages[stages.EMBEDDED] = result.embedded_ns
        stages.stamp_search_end(job.stages, result.times, time.monotonic_ns())
        generation = job.request.generation
        bare = job.tokens
        prompt = self._prompts.with_passages(generation, bare, result.passages)
        prefix_tokens = common_prefix(bare, prompt.tokens) if prompt.used else 0
        job.tokens, job.passages = prompt.tokens, tuple(passage.id for passage in prompt.used)
        job.build = result.build if prompt.used else ""
        texts = prompt.texts if generation.retrieval and generation.retrieval.quote else ()
        used = without_text(prompt.used)
        self.link.send(Retrieved(job.id, used, 0, (), job.stages, texts, result.ranking, prefix_tokens))
        self._enqueue(job)

    # ---- prefill

    def _enqueue(self, job: Job) -> None:
        """Queue a complete prompt for blocks, or send it to decode without KV if decode is to compute it."""
        request = job.request
        uncached = len(job.tokens) - self._tiers.cached_tokens(job.tokens, job.salt)
        queued = sum(len(other.tokens) - other.done for other in (*self._running, *self._waiting))
        by_decode = self._disaggregation.route_to_decode(
            time.monotonic_ns(), request.decode_worker, uncached, queued, request.decode_load
        )
        self._table.add(PrefillMetrics.PROMPTS["decode" if by_decode else "prefill"])
        self._table.add(PrefillMetrics.NEW_TOKENS["decode" if by_decode else "prefill"], uncached)
        if not by_decode:
            job.virtual_deadline_ns = virtual_deadline_ns(
                request.generation.received_ns - round(request.generation.head_start_s * 1e9),
                uncached,
                self._disaggregation.token_s,
            )
            self._waiting.append(job)
            return
        message = encode(job.decode_message(self._model.identity, job.resumed_token))
        job.offer = self._source.announce(request.decode_endpoint, message)
        self._offered[job.offer] = job
        self._log.debug("prompt sent to %s, which computes it", request.decode_worker, extra={"request": job.id})
        self._record(job)

    def _admit(self) -> None:
        """Allocate blocks to waiting prompts by virtual deadline. A smaller prompt never overtakes."""
        self._waiting.sort(key=lambda job: job.virtual_deadline_ns)
        for job in tuple(self._waiting):
            missing = self._blocks.blocks_needed(job.tokens, salt=job.salt)
            if missing > self._blocks.available or (lease := self._source.lease()) is None:
                break
            self._waiting.remove(job)
            job.lease, job.table = lease, self._blocks.open(job.tokens, salt=job.salt)
            self._blocks.grow(job.table, len(job.tokens))
            job.done = job.cached_tokens = job.table.reused_tokens
            job.load = self._tiers.load(job.table, job.tokens)
            job.stages[stages.PREFILL_BEGIN] = time.monotonic_ns()
            self._running.append(job)
        self._running.sort(key=lambda job: job.virtual_deadline_ns)

    def _prefill(self) -> int:
        """Run one pass of at most `chunk_tokens` tokens, of as many prompts as fit. Return its duration in ns, or 0 if
        there is nothing to compute."""
        budget = self.chunk_tokens
        batch: list[tuple[Job, Chunk]] = []
        for job in self._running:
            if job.load is not None and job.load.step(LOAD_NS):
                job.load, job.done = None, job.table.reused_tokens
                job.cached_tokens = job.done
            if budget == 0 or job.load is not None:
                continue
            tokens = job.tokens[job.done : job.done + budget]
            batch.append((job, Chunk(job.table.blocks, job.done, tokens)))
            budget -= len(tokens)
        if not batch:
            return 0
        begin_ns = time.monotonic_ns()
        is_last = [job.done + len(chunk.tokens) == len(job.tokens) for job, chunk in batch]
        sampled = self._model.step(
            [chunk for _, chunk in batch],
            [job.sampler() if last else None for (job, _), last in zip(batch, is_last, strict=True)],
            [job.trigger is not None and job.trigger.needs_logits for job, _ in batch],
        )
        took_ns = time.monotonic_ns() - begin_ns
        self._disaggregation.record_pass(self.chunk_tokens - budget, took_ns / 1e9)
        self._tiers.record_compute(self.chunk_tokens - budget, took_ns)
        self._table.add(PrefillMetrics.PASS_SECONDS, took_ns / 1e9)
        offered = len(self._offered)
        for (job, chunk), first in zip(batch, sampled, strict=True):
            self._guard(job, partial(self._advance, chunk=chunk, sampled=first))
        if self._running and len(self._offered) > offered:
            os.sched_yield()  # lets ZeroMQ's I/O thread send the offer: on a shared core the next pass would delay it
        return took_ns

    def _advance(self, job: Job, chunk: Chunk, sampled: SampledToken | None) -> None:
        """Account for a computed chunk, and offer the prompt to decode when it is complete."""
        job.done += len(chunk.tokens)
        self._blocks.fill(job.table, job.tokens, job.done)
        if job.done < len(job.tokens):
            if not self._through_pool:
                self._offer_early(job)
            return
        first, scores = sampled or (job.resumed_token, None)
        if first is None:
            raise InternalError("the model returned no finite logit")
        job.stages[stages.PREFILL_END] = time.monotonic_ns()
        self._running.remove(job)
        keys = self._blocks.row_keys(job.tokens, job.salt) if self._through_pool else []
        if keys and self._tiers.save(keys, job.table.blocks):
            job.saved = SavedRow(keys, len(job.tokens))
            self._free(job)  # decode needs nothing of this worker any more
        message = encode(job.decode_message(self._model.identity, first, scores))
        if job.lease is None:
            job.offer = self._source.announce(job.request.decode_endpoint, message)
        else:
            job.offer = self._source.offer(job.request.decode_endpoint, job.lease, message)
        self._table.add(PrefillMetrics.HANDOVERS["pool" if job.saved else "p2p"])
        self._offered[job.offer] = job
        self._log.debug("prefilled %d tokens, for %s", job.done, job.request.decode_worker, extra={"request": job.id})
        self._record(job)

    def _offer_early(self, job: Job) -> None:
        """Let decode pull the KV computed so far while the rest of the prompt is computed."""
        assert job.lease is not None, "a running job has a lease"
        self._source.set_written(job.lease, job.done)
        if job.early_offer is None:
            message = encode(job.reserve_message(self._model.identity))
            job.early_offer = self._source.offer(job.request.decode_endpoint, job.lease, message)

    # ---- publish

    def _collect_outcomes(self) -> None:
        for outcome in self._source.poll():
            job = self._offered.pop(outcome.offer_id, None)
            if job is None:
                continue
            if outcome.accepted:
                job.saved = None  # decode has it now
            self._release(job)
            if not outcome.accepted:
                reason = f"{job.request.decode_worker} rejected the hand-over: {outcome.reason}"
                self._fail(job.id, WorkerLost(reason))  # the frontend restarts it, from the tokens sent so far

    def _publish(self) -> None:
        waiting, running = len(self._waiting) + len(self._retrieving), len(self._running) + len(self._offered)
        offers = self._source.counts
        for outcome in get_args(OfferOutcome):
            self._table.total(PrefillMetrics.OFFERS[outcome], offers[outcome])
        self._report(waiting, running, self._source.free_leases, offers["malformed"])

    def _record(self, job: Job) -> None:
        self._table.add(PrefillMetrics.PROMPT_TOKENS, len(job.tokens))
        if job.request.resume is None:  # else the worker that had the request before has recorded its times
            stages.observe(self._table, job.stages)

    # ---- ends

    def _guard(self, job: Job, action: Callable[[Job], None]) -> None:
        """Run `action` for one job; an error ends this job only."""
        try:
            action(job)
        except (TrinityError, IpcError) as error:
            self._release(job)
            self._fail(job.id, error if isinstance(error, TrinityError) else WorkerLost(str(error)))

    def _cancel(self, request_ids: set[str]) -> None:
        for job in (job for job in self._jobs() if job.id in request_ids):
            self._release(job)

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *self._retrieving.values(), *self._running, *self._offered.values()]

    def _release(self, job: Job) -> None:
        """Remove a job from its queue and free its query, offers, lease and blocks."""
        if job.ticket is not None:
            self._retrieving.pop(job.ticket, None)
            self.retriever.cancel(job.ticket)
        for queue in (self._waiting, self._running):
            if job in queue:
                queue.remove(job)
        if job.offer is not None and self._offered.pop(job.offer, None) is not None:
            self._source.withdraw(job.offer)
        if job.early_offer is not None:
            self._source.withdraw(job.early_offer)
        if job.saved is not None:
            self._tiers.release(job.saved)
            job.saved = None
        self._free(job)

    def _free(self, job: Job) -> None:
        """Free a job's lease and blocks, if it has them."""
        if job.lease is not None:
            self._source.release(job.lease)  # a decode worker that is copying finds its offer no longer current
            self._blocks.close(job.table)
            job.lease = None

    def close(self) -> None:
        super().close()
        self._source.close()


def run(worker: Worker) -> None:
    """Run the process."""
    PrefillWorker(worker).run()
