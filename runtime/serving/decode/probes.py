"""Probes: queries of decode rows to the pool during generation, and insertion of the retrieved passages."""

import logging
import time
from collections.abc import Callable, Iterable

from ipc import IpcError
from runtime.errors import DeadlineExceeded, TrinityError
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics
from runtime.node.retrieval_config import PROBE_TOKENS
from runtime.retrieval.passages import without_text
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.retrieval.retriever import Retriever
from runtime.serving.decode.batch import Row
from runtime.serving.messages import Probe, ProbeOutcome, Retrieved
from runtime.serving.model.text import passages_chunk
from runtime.serving.model.tokenizer import Tokenizer
from runtime.serving.triggers import PROBE_TIMEOUT_S, new_passages

_WINDOW_TOKENS = 48  # of the text that is the query: a row's latest
_TIMEOUT_NS = int(PROBE_TIMEOUT_S * 1e9)


class Probes:
    """Probes of a worker's rows. The query is the row's latest text. A row has one probe in flight at a time; in mode
    "prefetch" it keeps decoding meanwhile, and skips probes that become due while one is in flight."""

    def __init__(
        self,
        retriever: Retriever,
        tokenizer: Tokenizer,
        context_tokens: int,
        table: WorkerTable,
        log: logging.Logger,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.retriever, self._tokenizer = retriever, tokenizer
        self._context_tokens, self._table, self._log, self.clock = context_tokens, table, log, clock

    def start(self, row: Row) -> None:
        """Embed the row's latest text and query the pool. If the query cannot be sent, the row continues without it."""
        retrieval = row.request.retrieval
        assert retrieval is not None, "only rows with retrieval probe"
        window = self._tokenizer.decode(row.context[-_WINDOW_TOKENS:])
        row.last_probe_at, row.probe_sent_ns = row.generated, self.clock()
        try:
            query = retrieval.query(window, "decode", row.probe_sent_ns + _TIMEOUT_NS)
            row.ticket = self.retriever.submit(query, row.build)
        except (TrinityError, IpcError) as error:
            self._log.warning("probe not sent: %s", error, extra={"request": row.id})
            row.probes.append(Probe(row.generated, row.probe_sent_ns, self.clock(), 0, 0, "failed"))
        self._table.add(DecodeMetrics.PROBES)

    def poll(self, rows: Iterable[Row]) -> list[Retrieved]:
        """Process results and timeouts. Return the passages inserted into rows' contexts."""
        in_flight = {row.ticket: row for row in rows if row.ticket is not None}
        ended = [(in_flight[result.ticket], result) for result in self.retriever.poll() if result.ticket in in_flight]
        answered = {result.ticket for _, result in ended}
        now = self.clock()
        for ticket, row in in_flight.items():
            if ticket not in answered and now - row.probe_sent_ns > _TIMEOUT_NS:
                self.retriever.cancel(ticket)
                error = DeadlineExceeded(f"the probe took longer than its limit of {PROBE_TIMEOUT_S:g} s")
                ended.append((row, RetrievalResult(ticket, error=error)))
        return [retrieved for row, result in ended if (retrieved := self._apply(row, result)) is not None]

    def cancel(self, row: Row, ticket: int) -> None:
        """Cancel the probe of a row that has ended."""
        self.retriever.cancel(ticket)
        self._finish(row, "dropped")

    def _apply(self, row: Row, result: RetrievalResult) -> Retrieved | None:
        """Insert new passages into the row's context, before its latest token, whose KV is not cached yet."""
        if result.error is not None:
            self._log.warning("probe failed: %s", result.error, extra={"request": row.id})
            self._finish(row, "late" if isinstance(result.error, DeadlineExceeded) else "failed")
            return None
        retrieval, trigger = row.request.retrieval, row.trigger
        assert retrieval is not None, "only rows with retrieval probe"
        assert trigger is not None, "only rows with a trigger probe"
        outcome, new = new_passages(trigger, result.passages, row.seen)
        remaining = row.request.sampling.max_tokens - row.generated
        allowed = retrieval.probe_tokens or PROBE_TOKENS
        chunk = passages_chunk(self._tokenizer, new, min(allowed, self._context_tokens - len(row.context) - remaining))
        self._finish(row, outcome, len(chunk.used))
        if not chunk.tokens:
            return None
        row.context[-1:-1] = chunk.tokens
        row.build = result.build
        row.seen.update(passage.id for passage in chunk.used)
        return Retrieved(row.id, without_text(chunk.used), row.generated, tuple(chunk.tokens))

    def _finish(self, row: Row, outcome: ProbeOutcome, passages: int = 0) -> None:
        """Record the outcome and the times of the row's probe."""
        now = self.clock()
        stalled = now - row.probe_sent_ns if row.stalled else 0
        row.stalled_ns += stalled
        row.ticket = None
        row.probes.append(Probe(row.last_probe_at, row.probe_sent_ns, now, stalled, passages, outcome))
        self._table.observe(DecodeMetrics.PROBE_STALL, stalled / 1e9)
        self._table.observe(DecodeMetrics.PROBE_TIME, (now - row.probe_sent_ns) / 1e9)
