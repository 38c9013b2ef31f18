"""Process of a decode worker. Its loop: receive → probe → pull → decode → publish.

Rows join the running batch when their KV has been pulled and leave it when they end or are preempted. A row that waits
for a probe's passages skips steps. KV is copied in slices between steps, so a hand-over never delays the batch by more
than a slice. Each row ends exactly once: with a finish reason, with an error, or cancelled.
"""

import time
from typing import TYPE_CHECKING

from runtime.errors import InternalError
from runtime.node.metrics.worker_metrics import DecodeMetrics
from runtime.node.worker import Worker
from runtime.serving import stages
from runtime.serving.decode.batch import Batch, Row
from runtime.serving.decode.handover_queue import SLICE_NS, WAITING_SHARE, HandoverQueue
from runtime.serving.decode.probes import Probes
from runtime.serving.kv.blocks import BlockTable
from runtime.serving.kv.tiers import BUSY_SHARE
from runtime.serving.kv.transport import Transport, transport_for
from runtime.serving.kv_worker import KvWorker
from runtime.serving.messages import Cancel, Decode, Taken, Tokens, Welcome
from runtime.serving.model.language_model import SampledToken
from runtime.serving.model.sampler import Sampler
from runtime.serving.model.text import TextStream

if TYPE_CHECKING:
    import torch


class DecodeWorker(KvWorker):
    """Runs the requests of one decode worker: offers → rows."""

    role, metrics = "decode", DecodeMetrics

    def __init__(
        self,
        worker: Worker,
        transport: Transport | None = None,
        idle_ms: int = 100,
        slice_ns: int = SLICE_NS,
        waiting_share: float = WAITING_SHARE,
    ) -> None:
        """`transport`: by default the one for the worker's device. `idle_ms`: the longest sleep, between heartbeats."""
        transport = transport or transport_for(worker.placement.device)
        super().__init__(worker, transport, idle_ms)
        config, endpoint = worker.plan.config, worker.plan.endpoint(worker.name)
        self._limits, self._slice_ns = config.decode, slice_ns
        self._sink = transport.sink(endpoint)
        self.handovers = HandoverQueue(
            self._sink, self._blocks, self._model.kv_array, self._tiers, self._model.identity,
            waiting_share=waiting_share,
        )  # fmt: skip
        self._batch = Batch(self._slots, self._blocks, self._tiers, self.handovers)
        self.probes = Probes(self.retriever, self._model.tokenizer, self._setup.context_tokens, self._table, self._log)
        self._step_ns = self._slice_ns * BUSY_SHARE  # moving average of step times
        self._plain_step_ns = 0  # the same for steps without prompts or passages
        self._counted_ns = time.monotonic_ns()
        self._connect(self._sink.socket, endpoint)

    @property
    def busy(self) -> bool:
        return bool(self._batch.rows or len(self.handovers))

    def step(self) -> None:
        self._table.beat()
        self._count_row_time()
        self._receive()
        self._probe()  # before rows join and probe: passages are never reported before the token that they follow
        self._pull()
        stepped = self._decode()
        self._publish()
        idle = not self.handovers.pulling and not any(self._batch.loading)
        self._end_step(self._step_ns if stepped else 0, idle=idle)

    def _count_row_time(self) -> None:
        """Add the time since the last iteration to the row time and, for rows stalled by a probe, to the stall time."""
        now = time.monotonic_ns()
        elapsed_s, self._counted_ns = (now - self._counted_ns) / 1e9, now
        rows = self._batch.rows
        self._table.add(DecodeMetrics.ROW_SECONDS, elapsed_s * len(rows))
        self._table.add(DecodeMetrics.STALL_SECONDS, elapsed_s * sum(row.stalled for row in rows))

    # ---- receive

    def _receive(self) -> None:
        for message in self.link.receive():
            match message:
                case Cancel():
                    self._cancel(message.request_id)
                case Welcome():
                    self.handovers.clear()
                    for row in list(self._batch.rows):
                        self._cancel(row.id)
        self.handovers.receive(self.link.frontend_epoch)
        while self.handovers.taken:
            self.link.send(Taken(self.handovers.taken.pop()))

    # ---- probe

    def _probe(self) -> None:
        for retrieved in self.probes.poll(self._batch.rows):
            self.link.send(retrieved)

    # ---- pull

    def _pull(self) -> None:
        """Load the KV of preempted rows, then pull that of new ones. A running batch waits for one slice at most."""
        batch = self._batch
        slice_ns: int | None = min(self._slice_ns, self._step_ns // BUSY_SHARE)
        if not any(row.ready and not row.stalled for row in batch.rows):
            slice_ns = None
        batch.load(slice_ns)
        if not any(batch.preempted):  # preempted rows have priority over new ones
            self.handovers.admit(time.monotonic_ns(), running=batch.running, waiting_blocks=batch.waiting_blocks)
        for request, table in self.handovers.pull(slice_ns):
            self._join(request, table)

    def _join(self, request: Decode, table: BlockTable) -> None:
        """Add a row whose KV has been pulled, or whose prompt is to be computed here."""
        now = time.monotonic_ns()
        sampled = len(request.generated) + (request.first_token is not None)
        row = Row(
            request=request,
            context=list(request.tokens),
            cached=len(request.tokens) if request.blocks else table.reused_tokens,
            sampler=Sampler(request.sampling, drawn=sampled),
            text=TextStream(self._model.tokenizer, request.sampling.stop),
            table=table,
            generated=len(request.generated),
            token_ns=now if request.first_token is not None else 0,
            seen=set(request.seen_passages),
            build=request.build,
            last_probe_at=request.last_probe_at,
            cached_tokens=request.cached_tokens if request.has_kv else table.reused_tokens,
        )
        for token in request.generated:  # sent by the worker that had the request before
            row.text.push([token])
        self._batch.join(row)
        self._log.debug("joined with KV of %d tokens", row.cached, extra={"request": row.id})
        if request.first_token is None:
            return
        request.stages.setdefault(stages.FIRST_TOKEN, now)
        if not request.first_token_sent:
            self._accept(row, request.first_token, probe=request.probe_after_first)
            return
        row.text.push([request.first_token])
        row.context.append(request.first_token)
        row.generated += 1
        self.probes.start(row)

    # ---- decode

    def _decode(self) -> bool:
        """Run one step of every row of the batch that is not stalled. Return False if there is none."""
        self._batch.admit()
        batch = self._batch.chunks(self._limits.chunk_tokens)
        if not batch:
            return False
        begin = time.monotonic_ns()
        for row, _ in batch:
            if not row.request.has_kv:
                row.request.stages.setdefault(stages.PREFILL_BEGIN, begin)
        is_last = [chunk.start + len(chunk.tokens) == len(row.context) for row, chunk in batch]
        tokens = self._model.step(
            [chunk for _, chunk in batch],
            [row.sampler if last else None for (row, _), last in zip(batch, is_last, strict=True)],
            [row.trigger is not None and row.trigger.needs_logits for row, _ in batch],
        )
        took_ns = time.monotonic_ns() - begin
        self._step_ns += (took_ns - self._step_ns) // 8
        prompt_tokens = sum(len(chunk.tokens) for _, chunk in batch if len(chunk.tokens) > 1)
        if prompt_tokens:
            self._tiers.record_compute(prompt_tokens, took_ns - self._plain_step_ns * (len(batch) > 1))
        else:
            self._plain_step_ns += (took_ns - self._plain_step_ns) // 8 if self._plain_step_ns else took_ns
        for (row, chunk), sampled in zip(batch, tokens, strict=True):
            self._batch.record_computed(row, chunk.start + len(chunk.tokens))
            if sampled is not None:
                self._advance(row, sampled)
        now = time.monotonic_ns()
        advanced = [row for row, _ in batch if row.cached < len(row.context)]
        intervals_s = [(now - row.token_ns) / 1e9 for row in advanced if row.token_ns]
        self._table.observe_many(DecodeMetrics.INTER_TOKEN, intervals_s)
        for row in advanced:
            row.token_ns = now
        return True

    def _advance(self, row: Row, sampled: SampledToken) -> None:
        if not row.request.has_kv:
            now = row.request.stages.setdefault(stages.PREFILL_END, time.monotonic_ns())
            row.request.stages.setdefault(stages.FIRST_TOKEN, now)
        if sampled.token is None:
            self._fail(row.id, InternalError("the model returned no finite logit"))
            self._remove(row)
            return
        self._accept(row, sampled.token, sampled.scores)

    def _accept(self, row: Row, token: int, scores: "torch.Tensor | None" = None, *, probe: bool = False) -> None:
        """Append a token, sampled from the logits `scores`; end the row, or start a probe (always with `probe`)."""
        sampling = row.request.sampling
        row.context.append(token)
        row.unsent.append(token)
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
        elif probe or row.should_probe(scores):
            self.probes.start(row)

    # ---- publish

    def _publish(self) -> None:
        for row in [row for row in self._batch.rows if row.unsent]:
            request = row.request
            first = row.generated == len(row.unsent)
            if row.finish is not None:
                if row.ticket is not None:
                    self.probes.cancel(row, row.ticket)
                request.stages[stages.END] = time.monotonic_ns()
            self.link.send(
                Tokens(
                    row.id,
                    row.pending_text,
                    tuple(row.unsent),
                    row.finish,
                    request.prompt_tokens,
                    request.stages if first or row.finish else {},
                    request.tokens if first else (),
                    row.stalled_ns if row.finish else 0,
                    tuple(row.probes),
                    row.last_probe_at,
                    min(row.cached_tokens, request.prompt_tokens),
                )
            )
            self._table.add(DecodeMetrics.GENERATION_TOKENS, len(row.unsent))
            row.pending_text, row.unsent, row.probes = "", [], []
            if row.finish is not None:
                self._log.debug("finished: %s, %d tokens", row.finish, row.generated, extra={"request": row.id})
                stages.observe(self._table, request.stages, row.generated, computed=not request.has_kv)
                self._remove(row)
        self._publish_load()

    def _publish_load(self) -> None:
        batch, blocks, table = self._batch, self._blocks, self._table
        waiting = self.handovers.waiting + len(batch.rows) - batch.running
        table.set(DecodeMetrics.KV_USED, blocks.held / blocks.total)
        for counter, value in (
            (DecodeMetrics.HANDOVER_BYTES, self.handovers.pulled_bytes),
            (DecodeMetrics.LINK_BUSY_SECONDS, self.handovers.busy_ns / 1e9),
            (DecodeMetrics.PREEMPTIONS, batch.preemptions),
            (DecodeMetrics.SWAPPED, batch.swapped),
        ):
            table.total(counter, value)
        free_slots = self._slots - min(len(batch.rows), self._slots)
        self._report(waiting, batch.running, free_slots, self._sink.malformed, self._plain_step_ns)

    # ---- ends

    def _cancel(self, request_id: str) -> None:
        """Remove a cancelled request, whether it is a pending hand-over or a row."""
        self.handovers.cancel(request_id)
        for row in [row for row in self._batch.rows if row.id == request_id]:
            self._remove(row)

    def _remove(self, row: Row) -> None:
        if row.ticket is not None:
            self.probes.cancel(row, row.ticket)
        self._batch.remove(row)

    def close(self) -> None:
        super().close()
        self._sink.close()


def run(worker: Worker) -> None:
    """Run the process."""
    DecodeWorker(worker).run()
