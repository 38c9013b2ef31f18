"""The rows of a decode worker: which are in the running batch, and who makes room when blocks run out.

```
hand-over ─▶ waiting ──place free──▶ running ──▶ ends
                ▲                       │ blocks run out: the youngest row makes room
                └── blocks free ── preempted: loaded from KV tiers, or computed again
```
Rows are served in the order in which they came, so the oldest always has what it needs and the batch goes on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy.typing as npt

from runtime.serving import stages
from runtime.serving.decode.handover_queue import HandoverQueue
from runtime.serving.kv.blocks import BlockManager, BlockTable, OutOfBlocks
from runtime.serving.kv.tiers import Load, Tiers
from runtime.serving.messages import Decode, FinishReason, Probe
from runtime.serving.model.language_model import Chunk, Sampler
from runtime.serving.model.text import TextStream
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
    last_probe_at: int = 0  # tokens generated when its last probe was asked
    asked_ns: int = 0
    stalled_ns: int = 0
    probes: list[Probe] = field(default_factory=list)  # that are over, not yet told to the frontend
    finish: FinishReason | None = None
    trigger: Trigger | None = field(init=False)

    def __post_init__(self) -> None:
        self.trigger = trigger_of(self.request.retrieval)

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

    def due(self, scores: npt.ArrayLike | None) -> bool:
        """Whether it is to ask, with the token that it has just got, drawn from `scores` (None: not here)."""
        if self.trigger is None or self.ticket is not None:
            return False
        return self.trigger.should_probe(self.generated, self.last_probe_at, scores)


class Batch:
    """`slots` rows run at once; the others wait. All of them are in `rows`, the oldest first."""

    def __init__(self, slots: int, blocks: BlockManager, tiers: Tiers, handovers: HandoverQueue) -> None:
        self.rows: list[Row] = []
        self.preemptions = 0  # rows that have made room
        self._slots, self._blocks, self._tiers, self._handovers = slots, blocks, tiers, handovers

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
                if not self._handovers.evict_latest():
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
        if self._blocks.blocks_needed(row.context, salt=salt) + self.running > self._blocks.available:
            return False
        row.table = self._blocks.open(row.context, salt=salt)
        row.table.requested_ns = row.request.stages.get(stages.RECEIVED, 0)
        self._blocks.grow(row.table, len(row.context))
        row.cached = row.table.reused_tokens
        row.returning = self._tiers.load(row.table, row.context)
        return True
