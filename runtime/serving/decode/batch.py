"""Rows of a decode worker: the running batch, and preemption when KV blocks run out.

```
hand-over ─▶ waiting ──slot free──▶ running ──▶ ends
                ▲                      │ out of blocks: the youngest row is preempted
                └── blocks free ── preempted: written to a KV tier whole, and loaded again, or recomputed
```
Rows are served in order of arrival, so the oldest row always has its blocks and the batch makes progress: the youngest
row is preempted first, and the oldest preempted row returns first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy.typing as npt

from runtime.serving.decode.handover_queue import HandoverQueue
from runtime.serving.kv.blocks import BlockManager, BlockTable, OutOfBlocks
from runtime.serving.kv.tiers import Load, SavedRow, Tiers
from runtime.serving.messages import Decode, FinishReason, Probe
from runtime.serving.model.language_model import Chunk
from runtime.serving.model.sampler import Sampler
from runtime.serving.model.text import TextStream
from runtime.serving.triggers import Trigger, trigger_of


@dataclass(eq=False)
class Row:
    """A sequence. `context` holds all its tokens; its blocks hold the KV of the first `cached`, and the model computes
    the others next.

    A preempted row has no `table`; its KV is `saved`, or recomputed. `loading` copies KV back from the tiers.
    """

    request: Decode
    context: list[int]
    cached: int
    sampler: Sampler
    text: TextStream
    table: BlockTable | None
    generated: int
    token_ns: int  # time of its last token; 0: none yet
    running: bool = False  # has a slot in the running batch
    loading: Load | None = None
    saved: SavedRow | None = None
    unsent: list[int] = field(default_factory=list)  # tokens not sent to the frontend yet
    pending_text: str = ""
    seen: set[str] = field(default_factory=set)  # ids of the passages in the context
    build: str = ""  # build of their collection: probes query the same one
    ticket: int | None = None  # of the probe in flight
    last_probe_at: int = 0  # number of generated tokens at its last probe
    cached_tokens: int = 0  # of the prompt, when it was computed
    probe_sent_ns: int = 0
    stalled_ns: int = 0
    probes: list[Probe] = field(default_factory=list)  # finished, not sent to the frontend yet
    finish: FinishReason | None = None
    trigger: Trigger | None = field(init=False)

    def __post_init__(self) -> None:
        self.trigger = trigger_of(self.request.retrieval)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def stalled(self) -> bool:
        """Whether it waits for a probe's passages."""
        retrieval = self.request.retrieval
        return self.ticket is not None and retrieval is not None and retrieval.probe_mode == "wait"

    @property
    def ready(self) -> bool:
        """Whether its KV is in its blocks."""
        return self.table is not None and self.loading is None

    def should_probe(self, scores: npt.ArrayLike | None) -> bool:
        """Return whether to probe after its latest token, sampled from the logits `scores` (None: not on the host)."""
        if self.trigger is None or self.ticket is not None:
            return False
        return self.trigger.should_probe(self.generated, self.last_probe_at, scores)


class Batch:
    """The rows of a worker, oldest first in `rows`. At most `slots` of them run at once; the others wait."""

    def __init__(self, slots: int, blocks: BlockManager, tiers: Tiers, handovers: HandoverQueue) -> None:
        self.rows: list[Row] = []
        self.preemptions = self.swapped = 0
        self._slots, self._blocks, self._tiers, self._handovers = slots, blocks, tiers, handovers

    @property
    def running(self) -> int:
        """Number of rows in the running batch."""
        return sum(row.running for row in self.rows)

    @property
    def waiting_blocks(self) -> int:
        """Number of blocks held by rows that are not running."""
        return sum(len(row.table.blocks) for row in self.rows if row.table is not None and not row.running)

    @property
    def preempted(self) -> Iterator[Row]:
        """Rows without blocks, oldest first."""
        return (row for row in self.rows if row.table is None)

    @property
    def loading(self) -> Iterator[Row]:
        """Rows whose KV is being loaded from tiers, oldest first."""
        return (row for row in self.rows if row.loading is not None)

    def join(self, row: Row) -> None:
        """Add a row that holds blocks; it waits for a slot."""
        self.rows.append(row)

    def remove(self, row: Row) -> None:
        """Remove a row that has ended; free its blocks and its slot."""
        self.rows.remove(row)
        row.running = False
        if row.table is not None:
            self._blocks.close(row.table)
        row.table = row.loading = None
        self._release(row)

    def admit(self) -> None:
        """Resume preempted rows while blocks suffice, and give free slots to rows that are ready, oldest first."""
        for row in self.preempted:
            if not self._resume(row):
                break
        free_slots = self._slots - self.running
        for row in self.rows:
            if not free_slots:
                break
            if row.ready and row.finish is None and not row.running:
                row.running = True
                free_slots -= 1

    def load(self, for_ns: int | None) -> None:
        """Load KV of the oldest row in `loading` for about `for_ns` (None: all of it)."""
        row = next(self.loading, None)
        if row is None or row.loading is None or row.table is None or not row.loading.step(for_ns):
            return
        row.loading = None
        row.cached = row.table.reused_tokens
        self._release(row)

    def chunks(self, chunk_tokens: int) -> list[tuple[Row, Chunk]]:
        """Return the chunks of the next pass: one for every running row that is not stalled.

        A chunk has one token or several; all chunks of several tokens have at most `chunk_tokens` together. Blocks are
        allocated, and rows preempted for them are left out.
        """
        batch: list[tuple[Row, Chunk]] = []
        for row in self.rows:
            if not row.running or row.stalled or row.finish is not None:
                continue
            pending = len(row.context) - row.cached
            count = 1 if pending == 1 else min(pending, chunk_tokens)
            if count == 0 or not self._allocate(row, row.cached + count):
                continue
            chunk_tokens -= count if pending > 1 else 0
            assert row.table is not None, "its blocks have just been allocated"
            batch.append((row, Chunk(row.table.blocks, row.cached, row.context[row.cached : row.cached + count])))
        return batch

    def record_computed(self, row: Row, cached: int) -> None:
        """Record that the KV of the row's first `cached` tokens is written."""
        assert row.table is not None, "only rows with blocks run"
        row.cached = cached
        self._blocks.fill(row.table, row.context, cached)

    # ---- blocks

    def _allocate(self, row: Row, tokens: int) -> bool:
        """Allocate blocks for `tokens` tokens, preempting if needed. Return False if the row itself was preempted."""
        while row.table is not None:
            try:
                self._blocks.grow(row.table, tokens)
                return True
            except OutOfBlocks:
                if not self._handovers.evict_latest():
                    self._preempt(next(other for other in reversed(self.rows) if other.table is not None))
        return False

    def _preempt(self, row: Row) -> None:
        assert row.table is not None, "only rows with blocks are preempted"
        if row.saved is None:  # else it was being loaded
            keys = self._blocks.row_keys(row.context[: row.cached], row.request.salt)
            if self._tiers.swap_out(keys, row.table.blocks[: len(keys)]):
                row.saved = SavedRow(keys, row.cached)
                self.swapped += 1
        self._blocks.close(row.table, save=False)
        row.table = row.loading = None
        row.cached = 0
        row.running = False
        self.preemptions += 1

    def _resume(self, row: Row) -> bool:
        """Allocate blocks for a preempted row again. Tokens that are neither saved, cached nor in a tier are
        recomputed."""
        salt = row.request.salt
        if self._blocks.blocks_needed(row.context, salt=salt) + self.running > self._blocks.available:
            return False
        row.table = self._blocks.open(row.context, salt=salt)
        self._blocks.grow(row.table, len(row.context))
        row.cached = row.table.reused_tokens
        if row.saved is not None:
            row.loading = self._tiers.restore(row.saved, row.table, row.context)
        else:
            row.loading = self._tiers.load(row.table, row.context)
        return True

    def _release(self, row: Row) -> None:
        if row.saved is not None:
            self._tiers.release(row.saved)
            row.saved = None
