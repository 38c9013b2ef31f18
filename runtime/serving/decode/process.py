"""A decode worker's process. Its loop: receive → pull → probe → decode → publish.

Rows join the running batch when their KV has been pulled, leave it when they end, and sit out the steps in which they
wait for a probe's passages. Each row ends exactly once: with a finish reason, with an error, or cancelled.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ipc import HandoverSink, IpcError, Offer
from runtime.errors import TrinityError, WorkerLost
from runtime.node.metrics import E2E_TIME, HANDOVER_TIME, ITL_TIME, PROBE_STALL, TPOT_TIME, TTFT_TIME
from runtime.node.worker import Worker
from runtime.retrieval.client import SearchClient
from runtime.retrieval.retriever import Found, Library, Retriever
from runtime.serving import stages
from runtime.serving.frontend_link import FrontendLink
from runtime.serving.messages import (
    Cancel,
    Decode,
    Failed,
    FinishReason,
    Hello,
    Retrieved,
    Tokens,
    Welcome,
    decode_handover,
)
from runtime.serving.model.language_model import Chunk, LanguageModel
from runtime.serving.model.prompt import passages_chunk
from runtime.serving.model.sampling import Sampler
from runtime.serving.model.text import TextStream

if TYPE_CHECKING:
    import torch

_IDLE_MS = 100  # the longest sleep: the loop writes its heartbeat in between
_PROBE_TIMEOUT_NS = 2_000_000_000  # a row waits for its passages no longer than this, then goes on without them


@dataclass
class Row:
    """A sequence of the running batch.

    `context` are all its tokens; the KV slot holds the first `cached` of them, the rest goes through the model next.
    """

    request: Decode
    slot: int
    context: list[int]
    cached: int
    sampler: Sampler
    text: TextStream
    generated: int = 0
    fresh: list[int] = field(default_factory=list)  # sampled, not yet told to the frontend
    pending_text: str = ""
    seen: set[str] = field(default_factory=set)  # ids of the passages that are in the context
    ticket: int | None = None
    asked_ns: int = 0
    token_ns: int = 0  # when its last token was there
    finish: FinishReason | None = None

    @property
    def id(self) -> str:
        return self.request.request_id


class DecodeWorker:
    """Offers → rows: where every request of this worker is."""

    def __init__(self, worker: Worker) -> None:
        config = worker.plan.config
        assert config.model is not None
        self._worker, self._table = worker, worker.table
        self._limits = config.decode
        self._context_tokens = config.model.context_tokens
        self._model = LanguageModel.load(
            config.model.name,
            slots=config.decode.slots,
            context_tokens=self._context_tokens,
            threads=config.decode.threads,
        )
        self._model.forward([Chunk(0, 0, [0])])  # the first pass allocates; a user shall not wait for that
        self._retriever = Retriever(
            Library(worker.plan, threads=config.decode.threads),
            SearchClient.of_plan(worker.plan, worker.name),
        )
        self._retriever.warm_up()
        endpoint = worker.plan.endpoint(worker.name)
        self._sink = HandoverSink(endpoint)
        self._offers: deque[tuple[Offer, Decode]] = deque()
        self._rows: list[Row] = []
        self._free = list(range(config.decode.slots))
        self._counted_ns = time.monotonic_ns()
        self._link = FrontendLink(
            worker.plan.endpoint("frontend"),
            Hello(
                role="decode", worker=worker.name, epoch=worker.epoch, pid=worker.pid,
                slots=config.decode.slots, limit_tokens=self._context_tokens, endpoint=endpoint,
            ),
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._offers)

    def step(self) -> None:
        """One round of the loop."""
        self._table.beat()
        self._count_row_time()
        self._receive()
        self._pull()
        self._probe()
        stepped = self._decode()
        self._publish()
        if not stepped:
            self._sleep()

    def _count_row_time(self) -> None:
        """The last round's time: once for every row, and once for every row that waited for a probe (stalled)."""
        now = time.monotonic_ns()
        passed_s, self._counted_ns = (now - self._counted_ns) / 1e9, now
        self._table.add("trinity_decode_row_seconds_total", passed_s * len(self._rows))
        stalled = sum(row.ticket is not None for row in self._rows)
        self._table.add("trinity_decode_stall_seconds_total", passed_s * stalled)

    # ---- receive

    def _receive(self) -> None:
        for message in self._link.receive():
            match message:
                case Cancel():
                    self._drop(message.request_id)
                case Welcome():
                    for row in list(self._rows):
                        self._drop(row.id)
        for offer in self._sink.receive():
            try:
                self._offers.append((offer, decode_handover(offer.payload)))
            except ValueError as error:
                self._sink.reject(offer, f"its payload is no hand-over: {error}")

    # ---- pull

    def _pull(self) -> None:
        """Give free slots to offers in the order they came: copy their KV, and the row joins the batch."""
        while self._offers and self._free:
            offer, request = self._offers.popleft()
            if request.frontend_epoch != self._link.frontend_epoch:
                self._sink.reject(offer, f"its frontend (epoch {request.frontend_epoch}) is gone")
                continue
            slot = self._free.pop()
            try:
                self._copy(offer, request, slot)
            except (TrinityError, IpcError, ValueError) as error:
                self._free.append(slot)
                self._sink.reject(offer, str(error))
                continue
            self._sink.acknowledge(offer)
            self._join(request, slot)

    def _copy(self, offer: Offer, request: Decode, slot: int) -> None:
        length = len(request.tokens)
        begin_ns = time.monotonic_ns()
        self._model.copy_kv(self._sink.memory(offer), offer.slot, slot, length)
        self._table.add("trinity_kv_link_busy_seconds_total", (time.monotonic_ns() - begin_ns) / 1e9)
        if not self._sink.current(offer):
            raise WorkerLost("prefill has taken its KV slot back")
        request.stages[stages.HANDOVER_END] = time.monotonic_ns()
        self._table.add("trinity_kv_handover_bytes_total", length * self._model.info.kv_bytes_per_token)

    def _join(self, request: Decode, slot: int) -> None:
        row = Row(
            request=request,
            slot=slot,
            context=list(request.tokens),
            cached=len(request.tokens),
            sampler=Sampler(request.sampling, drawn=1),  # the first token was drawn by prefill
            text=TextStream(self._model.tokenizer, request.sampling.stop),
            seen=set(request.seen_passages),
        )
        self._rows.append(row)
        request.stages[stages.FIRST_TOKEN] = time.monotonic_ns()
        self._accept(row, request.first_token)

    # ---- probe

    def _probe(self) -> None:
        for found in self._retriever.poll():
            row = next((row for row in self._rows if row.ticket == found.ticket), None)
            if row is not None:
                self._end_probe(row, found)
        now = time.monotonic_ns()
        for row in self._rows:
            if row.ticket is not None and now - row.asked_ns > _PROBE_TIMEOUT_NS:
                self._retriever.cancel(row.ticket)
                self._end_probe(row, Found(row.ticket))

    def _ask(self, row: Row) -> None:
        """Ask the pool with the row's last words. A probe that cannot be asked is left out: the answer goes on."""
        retrieval = row.request.retrieval
        assert retrieval is not None
        window = self._model.tokenizer.decode(row.context[-self._limits.probe_window_tokens :])
        row.asked_ns = time.monotonic_ns()
        try:
            vector = self._retriever.library.embed(retrieval.collection, [window])[0]
            row.ticket = self._retriever.ask(
                vector, retrieval.collection, retrieval.k, stage="decode", deadline_ns=row.asked_ns + _PROBE_TIMEOUT_NS
            )
        except (TrinityError, IpcError) as error:
            self._worker.log.warning("a probe of %s could not be asked: %s", row.id, error)
        self._table.add("trinity_decode_probes_total")

    def _end_probe(self, row: Row, found: Found) -> None:
        """Append what is new to the row's context, before the token that was sampled last: it is not cached yet."""
        row.ticket = None
        self._table.observe(PROBE_STALL, (time.monotonic_ns() - row.asked_ns) / 1e9)
        if found.error is not None:
            self._worker.log.warning("a probe of %s failed: %s", row.id, found.error)
            return
        new = tuple(passage for passage in found.passages if passage.id not in row.seen)
        left = row.request.sampling.max_tokens - row.generated
        room = min(self._limits.probe_tokens, self._context_tokens - len(row.context) - left)
        chunk = passages_chunk(self._model.tokenizer, new, room)
        if not chunk.tokens:
            return
        row.context[-1:-1] = chunk.tokens
        row.seen.update(passage.id for passage in chunk.used)
        self._link.send(Retrieved(row.id, chunk.used, at_token=row.generated))

    # ---- decode

    def _decode(self) -> bool:
        """One step of every row that does not wait for a probe; False if there is none."""
        batch = [row for row in self._rows if row.ticket is None]
        if not batch:
            return False
        chunks = [Chunk(row.slot, row.cached, row.context[row.cached :]) for row in batch]
        logits = self._model.forward(chunks)
        for row, scores in zip(batch, logits, strict=True):
            self._guard(row, partial(self._advance, scores=scores))
        now = time.monotonic_ns()
        self._table.observe_many(ITL_TIME, [(now - row.token_ns) / 1e9 for row in batch])
        for row in batch:
            row.token_ns = now
        return True

    def _advance(self, row: Row, scores: "torch.Tensor") -> None:
        row.cached = len(row.context)
        self._accept(row, row.sampler.draw(scores))

    def _accept(self, row: Row, token: int) -> None:
        """A sampled token joins the row; it may be the last, or call for a probe."""
        sampling = row.request.sampling
        row.context.append(token)
        row.fresh.append(token)
        row.generated += 1
        ended = token in self._model.tokenizer.eos_ids and not sampling.ignore_eos
        if not ended:
            row.pending_text += row.text.push([token])
        if ended or row.text.stopped:
            row.finish = "stop"
        elif row.generated >= sampling.max_tokens:
            row.finish = "length"
        if row.finish is not None:
            row.pending_text += row.text.flush()
        elif (
            row.request.retrieval is not None
            and row.request.retrieval.every_tokens
            and row.generated % row.request.retrieval.every_tokens == 0
        ):
            self._ask(row)

    # ---- publish

    def _publish(self) -> None:
        for row in list(self._rows):
            if not row.fresh:
                continue
            if row.finish is not None:
                row.request.stages[stages.END] = time.monotonic_ns()
            self._link.send(
                Tokens(
                    row.id,
                    row.pending_text,
                    tuple(row.fresh),
                    row.finish,
                    len(row.request.tokens),
                    row.request.stages if row.finish else {},
                    row.request.tokens if row.generated == len(row.fresh) else (),
                )
            )
            self._table.add("trinity_generation_tokens_total", len(row.fresh))
            row.pending_text, row.fresh = "", []
            if row.finish is not None:
                self._record(row)
                self._remove(row)
        self._table.set("trinity_num_requests_waiting", len(self._offers))
        self._table.set("trinity_num_requests_running", len(self._rows))
        self._table.set("trinity_kv_cache_usage_perc", 1 - len(self._free) / self._limits.slots)
        self._link.report(len(self._offers), len(self._rows), len(self._free), self._worker.stopping)

    def _record(self, row: Row) -> None:
        stamps = row.request.stages
        spans = stages.spans_seconds(stamps, row.generated)
        self._table.observe(HANDOVER_TIME, spans["handover"])
        self._table.observe(TTFT_TIME, spans["ttft"])
        self._table.observe(E2E_TIME, spans["e2e"])
        if "tpot" in spans:
            self._table.observe(TPOT_TIME, spans["tpot"])

    # ---- ends

    def _guard(self, row: Row, action: Callable[[Row], None]) -> None:
        """Do something for one row; an error ends this row and no other."""
        try:
            action(row)
        except TrinityError as error:
            self._table.add("trinity_decode_failed_total")
            self._link.send(Failed(row.id, error.code, error.message, error.param))
            self._remove(row)

    def _drop(self, request_id: str) -> None:
        """Forget a cancelled request, as an offer or as a row."""
        for offer, request in list(self._offers):
            if request.request_id == request_id:
                self._offers.remove((offer, request))
                self._sink.reject(offer, "cancelled")
        for row in list(self._rows):
            if row.id == request_id:
                self._table.add("trinity_decode_cancelled_total")
                self._remove(row)

    def _remove(self, row: Row) -> None:
        if row.ticket is not None:
            self._retriever.cancel(row.ticket)
        self._rows.remove(row)
        self._free.append(row.slot)

    def _sleep(self) -> None:
        """Until something comes: from the frontend, the other side of a hand-over, or the pool."""
        self._retriever.client.sleep((self._link.socket, self._sink.socket), _IDLE_MS)

    def close(self) -> None:
        self._link.close()
        self._sink.close()
        self._retriever.client.close()


def run(worker: Worker) -> None:
    """The process: serve until told to stop, and until what it has is finished (the supervisor bounds that)."""
    decode = DecodeWorker(worker)
    worker.ready()
    while not worker.stopping or decode.busy:
        decode.step()
    decode.close()
