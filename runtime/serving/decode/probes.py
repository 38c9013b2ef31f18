"""What decode asks the pool while a row is written, and what becomes of the answers."""

import logging
import time
from collections.abc import Callable, Iterable

from ipc import IpcError
from runtime.errors import DeadlineExceeded, TrinityError
from runtime.node.config import DecodeSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics
from runtime.retrieval.retriever import RetrievalResult, Retriever, without_text
from runtime.serving.decode.batch import Row
from runtime.serving.messages import Probe, ProbeOutcome, Retrieved
from runtime.serving.model.text import passages_chunk
from runtime.serving.model.tokenizer import Tokenizer

_TIMEOUT_NS = 2_000_000_000  # a row waits for its passages no longer than this, then goes on without them


class Probes:
    """A row that is `due` asks with its last words. One probe a row at a time; in mode "prefetch" the row goes on
    meanwhile, and a probe that would come while another is out is left out."""

    def __init__(
        self,
        retriever: Retriever,
        tokenizer: Tokenizer,
        limits: DecodeSection,
        context_tokens: int,
        table: WorkerTable,
        log: logging.Logger,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.retriever, self._tokenizer, self._limits = retriever, tokenizer, limits
        self._context_tokens, self._table, self._log, self.clock = context_tokens, table, log, clock

    def ask(self, row: Row) -> None:
        """Have the row's last words embedded and the pool asked. If that cannot be, the probe is left out."""
        retrieval = row.request.retrieval
        assert retrieval is not None, "only rows with retrieval are due"
        window = self._tokenizer.decode(row.context[-self._limits.probe_window_tokens :])
        row.last_probe_at, row.asked_ns = row.generated, self.clock()
        try:
            row.ticket = self.retriever.ask(
                window, retrieval.collection, retrieval.k, stage="decode",
                deadline_ns=row.asked_ns + _TIMEOUT_NS, build=row.build, wanted=retrieval.filter,
                hybrid=retrieval.hybrid,
            )  # fmt: skip
        except (TrinityError, IpcError) as error:
            self._log.warning("a probe could not be asked: %s", error, extra={"request": row.id})
            row.probes.append(Probe(row.generated, row.asked_ns, self.clock(), 0, 0, "failed"))
        self._table.add(DecodeMetrics.PROBES)

    def poll(self, rows: Iterable[Row]) -> list[Retrieved]:
        """Take in what has come; what was put into rows' contexts."""
        asking = {row.ticket: row for row in rows if row.ticket is not None}
        ended = [(asking[found.ticket], found) for found in self.retriever.poll() if found.ticket in asking]
        answered = {found.ticket for _, found in ended}
        now = self.clock()
        for ticket, row in asking.items():
            if ticket not in answered and now - row.asked_ns > _TIMEOUT_NS:
                self.retriever.cancel(ticket)
                ended.append((row, RetrievalResult(ticket, error=DeadlineExceeded("it took longer than its limit"))))
        return [added for row, found in ended if (added := self._end(row, found)) is not None]

    def cancel(self, row: Row, ticket: int) -> None:
        """The row has ended while this probe was out."""
        self.retriever.cancel(ticket)
        self._over(row, "dropped")

    def _end(self, row: Row, found: RetrievalResult) -> Retrieved | None:
        """Put what is new into the row's context, before the token that was sampled last: it is not cached yet."""
        if found.error is not None:
            self._log.warning("a probe failed: %s", found.error, extra={"request": row.id})
            self._over(row, "late" if isinstance(found.error, DeadlineExceeded) else "failed")
            return None
        retrieval, trigger = row.request.retrieval, row.trigger
        assert retrieval is not None, "only rows with retrieval ask"
        assert trigger is not None, "and with probes"
        near = not trigger.accepts(found.passages, row.seen)
        new = () if near else tuple(passage for passage in found.passages if passage.id not in row.seen)
        left = row.request.sampling.max_tokens - row.generated
        allowed = min(self._limits.probe_tokens, retrieval.probe_tokens or self._limits.probe_tokens)
        chunk = passages_chunk(self._tokenizer, new, min(allowed, self._context_tokens - len(row.context) - left))
        self._over(row, "near" if near else "answered", len(chunk.used))
        if chunk.tokens:
            row.context[-1:-1] = chunk.tokens
            row.build = found.build
            row.seen.update(passage.id for passage in chunk.used)
        elif not found.partial:
            return None
        return Retrieved(row.id, without_text(chunk.used), row.generated, tuple(chunk.tokens), partial=found.partial)

    def _over(self, row: Row, outcome: ProbeOutcome, passages: int = 0) -> None:
        """Note what the row's probe took."""
        now = self.clock()
        stalled = now - row.asked_ns if row.stalled else 0
        row.stalled_ns += stalled
        row.ticket = None
        row.probes.append(Probe(row.last_probe_at, row.asked_ns, now, stalled, passages, outcome))
        self._table.observe(DecodeMetrics.PROBE_STALL, stalled / 1e9)
        self._table.observe(DecodeMetrics.PROBE_TIME, (now - row.asked_ns) / 1e9)
