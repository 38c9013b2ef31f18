"""The rows of a decode worker: which are in the running batch, who makes room when blocks run out, and their probes.

```
hand-over ─▶ waiting ──place free──▶ running ──▶ ends
                ▲                       │ blocks run out: the youngest row makes room
                └── blocks free ── preempted: loaded from KV tiers, or computed again
```
Rows are served in the order in which they came, so the oldest always has what it needs and the batch goes on.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy.typing as npt

from ipc import IpcError
from runtime.errors import DeadlineExceeded, TrinityError
from runtime.node.config import DecodeSection
from runtime.node.metrics.columns import DecodeMetrics
from runtime.node.metrics.table import WorkerTable
from runtime.retrieval.retriever import Found, Retriever, cited
from runtime.serving import stages
from runtime.serving.decode.bridge import Bridge
from runtime.serving.kv.blocks import BlockManager, BlockTable, OutOfBlocks
from runtime.serving.kv.tiers import Load, Tiers
from runtime.serving.messages import Decode, FinishReason, Probe, ProbeOutcome, Retrieved
from runtime.serving.model.language_model import Chunk, Sampler
from runtime.serving.model.text import TextStream, passages_chunk
from runtime.serving.model.tokenizer import Tokenizer
from runtime.serving.triggers import Trigger, trigger_of


@dataclass(eq=False)
class Row:
    """A sequence. `context` are all its tokens; its blocks hold the first `cached`, the rest goes through the model
    next.

    A row that made room for others has no `table`. While its KV is loaded from tiers it is `returning`; the rest is
    computed again.
    """

    request: Decode
    context: list[int]
    cached: int
    sampler: Sampler
    text: TextStream
    table: BlockTable | None
    generated: int
    token_ns: int  # when its last token was there; 0: it has none
    running: bool = False  # it has a place in the running batch
    returning: Load | None = None
    fresh: list[int] = field(default_factory=list)  # sampled, not yet told to the frontend
    pending_text: str = ""
    seen: set[str] = field(default_factory=set)  # ids of the passages that are in the context
    build: str = ""  # of their collection: what probes add is from the same
    ticket: int | None = None
    asked_at: int = 0  # tokens generated when its last probe was asked
    asked_ns: int = 0
    stalled_ns: int = 0
    probes: list[Probe] = field(default_factory=list)  # that are over, not yet told to the frontend
    finish: FinishReason | None = None
    trigger: Trigger | None = field(init=False)

    def __post_init__(self) -> None:
        retrieval = self.request.retrieval
        self.trigger = trigger_of(retrieval) if retrieval is not None else None

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def stalled(self) -> bool:
        """Whether it stands still until a probe's passages are there."""
        retrieval = self.request.retrieval
        return self.ticket is not None and retrieval is not None and retrieval.probe_mode == "wait"

    @property
    def ready(self) -> bool:
        """Whether all that it has cached is in its blocks."""
        return self.table is not None and self.returning is None


class Batch:
    """`slots` rows run at once; the others wait. All of them are in `rows`, the oldest first."""

    def __init__(self, slots: int, blocks: BlockManager, tiers: Tiers, bridge: Bridge) -> None:
        self.rows: list[Row] = []
        self.preemptions = 0  # rows that have made room
        self._slots, self._blocks, self._tiers, self._bridge = slots, blocks, tiers, bridge

    @property
    def running(self) -> int:
        """How many rows have a place in the running batch."""
        return sum(row.running for row in self.rows)

    @property
    def waiting_blocks(self) -> int:
        """Blocks of rows that have no place in the batch yet."""
        return sum(len(row.table.blocks) for row in self.rows if row.table is not None and not row.running)

    @property
    def preempted(self) -> Iterator[Row]:
        """Rows that have made room, the oldest first."""
        return (row for row in self.rows if row.table is None)

    @property
    def returning(self) -> Iterator[Row]:
        """Rows whose KV is being loaded."""
        return (row for row in self.rows if row.returning is not None)

    def join(self, row: Row) -> None:
        """A new row, with its blocks; it waits for a place."""
        self.rows.append(row)

    def remove(self, row: Row) -> None:
        """A row has ended: its blocks and its place are free."""
        self.rows.remove(row)
        row.running = False
        if row.table is not None:
            self._blocks.close(row.table)
        row.table = row.returning = None

    def admit(self) -> None:
        """Bring preempted rows back if there is room, and give free places to rows that are ready, in their order."""
        for row in self.preempted:
            if not self._bring_back(row):
                break
        places = self._slots - self.running
        for row in self.rows:
            if not places:
                break
            if row.ready and row.finish is None and not row.running:
                row.running = True
                places -= 1

    def load(self, for_ns: int | None) -> None:
        """Load the oldest returning row's KV, for about `for_ns` (None: all of it)."""
        row = next(self.returning, None)
        if row is None or row.returning is None or row.table is None or not row.returning.step(for_ns):
            return
        row.returning = None
        row.cached = row.table.reused_tokens

    def chunks(self, chunk_tokens: int) -> list[tuple[Row, Chunk]]:
        """The next pass: every row that does not stand still, with a token, or with more of them, of which at most
        `chunk_tokens` go into one pass. Blocks for them are there; who had to make room is left out."""
        batch: list[tuple[Row, Chunk]] = []
        for row in self.rows:
            if not row.running or row.stalled or row.finish is not None:
                continue
            pending = len(row.context) - row.cached
            count = 1 if pending == 1 else min(pending, chunk_tokens)
            if count == 0 or not self._secure(row, row.cached + count):
                continue
            chunk_tokens -= count if pending > 1 else 0
            assert row.table is not None, "it has just been given blocks"
            batch.append((row, Chunk(row.table.blocks, row.cached, row.context[row.cached : row.cached + count])))
        return batch

    def filled(self, row: Row, cached: int) -> None:
        """The KV of the row's first `cached` tokens is written."""
        assert row.table is not None, "only rows with blocks are run"
        row.cached = cached
        self._blocks.fill(row.table, row.context, cached)

    # ---- room

    def _secure(self, row: Row, tokens: int) -> bool:
        """Have blocks for `tokens` tokens; False if the row itself had to make room."""
        while row.table is not None:
            try:
                self._blocks.grow(row.table, tokens)
                return True
            except OutOfBlocks:
                if not self._bridge.make_room():
                    self._preempt(next(other for other in reversed(self.rows) if other.table is not None))
        return False

    def _preempt(self, row: Row) -> None:
        assert row.table is not None, "it holds the blocks that are wanted"
        self._blocks.close(row.table)
        row.table = row.returning = None
        row.cached = 0
        row.running = False
        self.preemptions += 1

    def _bring_back(self, row: Row) -> bool:
        """Give a preempted row blocks again; what is neither cached nor in a tier is computed again."""
        salt = row.request.salt
        if self._blocks.missing(row.context, salt=salt) + self.running > self._blocks.available:
            return False
        row.table = self._blocks.open(row.context, salt=salt)
        row.table.asked_ns = row.request.stages.get(stages.RECEIVED, 0)
        self._blocks.grow(row.table, len(row.context))
        row.cached = row.table.reused_tokens
        row.returning = self._tiers.load(row.table, row.context)
        return True


# ---- probes: what decode asks the pool while a row is written, and what becomes of the answers


_TIMEOUT_NS = 2_000_000_000  # a row waits for its passages no longer than this, then goes on without them


class Probes:
    """When a row's trigger says so it asks with its last words. One probe a row at a time; in mode "prefetch" the row
    goes on meanwhile, and a probe that would come while another is out is left out."""

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

    def due(self, row: Row, scores: npt.ArrayLike | None) -> bool:
        """Whether the row, with the token it has just got, drawn from `scores` (None: not here), is to ask."""
        if row.trigger is None or row.ticket is not None:
            return False
        return row.trigger.asks(row.generated, row.asked_at, scores)

    def ask(self, row: Row) -> None:
        """Have the row's last words embedded and the pool asked. If that cannot be, the probe is left out."""
        retrieval = row.request.retrieval
        assert retrieval is not None, "only rows with retrieval are due"
        window = self._tokenizer.decode(row.context[-self._limits.probe_window_tokens :])
        row.asked_at, row.asked_ns = row.generated, self.clock()
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
                ended.append((row, Found(ticket, error=DeadlineExceeded("it took longer than its limit"))))
        return [added for row, found in ended if (added := self._end(row, found)) is not None]

    def cancel(self, row: Row) -> None:
        """The row has ended."""
        if row.ticket is not None:
            self.retriever.cancel(row.ticket)
            self._over(row, "dropped")

    def _end(self, row: Row, found: Found) -> Retrieved | None:
        """Put what is new into the row's context, before the token that was sampled last: it is not cached yet."""
        if found.error is not None:
            self._log.warning("a probe failed: %s", found.error, extra={"request": row.id})
            self._over(row, "late" if isinstance(found.error, DeadlineExceeded) else "failed")
            return None
        retrieval, trigger = row.request.retrieval, row.trigger
        assert retrieval is not None, "only rows with retrieval ask"
        assert trigger is not None, "and with probes"
        near = not trigger.takes(found.passages, row.seen)
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
        return Retrieved(row.id, cited(chunk.used), row.generated, tuple(chunk.tokens), partial=found.partial)

    def _over(self, row: Row, outcome: ProbeOutcome, passages: int = 0) -> None:
        """Note what the row's probe took."""
        now = self.clock()
        stalled = now - row.asked_ns if row.stalled else 0
        row.stalled_ns += stalled
        row.ticket = None
        row.probes.append(Probe(row.asked_at, row.asked_ns, now, stalled, passages, outcome))
        self._table.observe(DecodeMetrics.PROBE_STALL, stalled / 1e9)
        self._table.observe(DecodeMetrics.PROBE_TIME, (now - row.asked_ns) / 1e9)
