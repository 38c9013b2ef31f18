"""A simulated decode worker. As `runtime.serving.decode`: pull → probe → decode, rows join and leave between steps.

Its loop looks around between two steps only, as the real one's does: what comes during a step, be it a hand-over, a
probe's vector or its passages, is taken up when the step is over. KV is copied by the loop itself in slices between
steps, or on a GPU beside them over a link of its own; one hand-over at a time, and unlike there not before its row has
a slot. Where `[decode] kv_blocks` says how many KV blocks there are, they are counted: when they run out, the
youngest row makes room and is computed again (there are no KV tiers here). The blocks of prompts are found again by
others where the trace says which ones they share; rows are counted as if they shared none. A prompt that comes without
KV is computed in chunks beside the steps of the others.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from runtime.node.config import DecodeSection
from runtime.serving.kv.blocks import BlockManager, BlockTable, OutOfBlocks
from runtime.serving.messages import Report
from runtime.simulator.events import NEVER_NS, Events, ns
from runtime.simulator.stages.decode_batches import Batches
from runtime.simulator.stages.prompt_blocks import PromptBlocks
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival

_SLICE_SHARE = 30  # a slice of KV takes a thirtieth of a step at most, as there


@dataclass(slots=True, eq=False)
class _HandOver:
    """A prompt whose KV is pulled: `left_ns` of copying, which ends at `end_ns` once nothing interrupts it."""

    request: SimRequest
    pulled: Callable[[], None]
    left_ns: int
    end_ns: int = 0


class KvRows:
    """The KV blocks of a worker's rows, held by production's block manager (no prefix is shared).

    Rows are in the order in which they came. A row that has made room for others has no blocks, and keeps its place.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.most_tokens = blocks * block_tokens
        self._blocks = BlockManager(blocks, block_tokens, b"")
        self._tables: dict[SimRequest, BlockTable | None] = {}

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self._tables)

    @property
    def available(self) -> int:
        return self._blocks.available

    def has_room(self, tokens: int, running: int) -> bool:
        """Whether a row of `tokens` tokens can come, with one block left for each running row (as `decode.bridge`)."""
        return self._blocks.blocks_for(tokens) + running <= self.available

    def missing(self, wanted: Sequence[tuple[SimRequest, int]]) -> int:
        """Blocks to take until each of these rows holds so many tokens."""
        return sum(self._blocks.blocks_for(tokens) - len(self._held(row).blocks) for row, tokens in wanted)

    def holds(self, row: SimRequest) -> bool:
        return self._tables[row] is not None

    def take(self, row: SimRequest, tokens: int) -> None:
        """Blocks for a row that has none, a new one or one that comes back. Raises `OutOfBlocks`."""
        table = BlockTable()
        self._blocks.grow(table, tokens)
        self._tables[row] = table

    def grow(self, row: SimRequest, tokens: int) -> None:
        """Raises `OutOfBlocks`."""
        self._blocks.grow(self._held(row), tokens)

    def youngest(self) -> SimRequest:
        """The row that makes room next."""
        return next(row for row in reversed(self._tables) if self._tables[row] is not None)

    def give_up(self, row: SimRequest) -> None:
        """The row makes room."""
        self._blocks.close(self._held(row))
        self._tables[row] = None

    def end(self, row: SimRequest) -> None:
        """The row is over."""
        table = self._tables.pop(row)
        if table is not None:
            self._blocks.close(table)

    def _held(self, row: SimRequest) -> BlockTable:
        table = self._tables[row]
        assert table is not None, "it holds blocks"
        return table


class SimDecode:
    """Offers → rows. A row leaves the batch while a probe of its runs, two seconds at most."""

    def __init__(
        self,
        name: str,
        events: Events,
        times: ServiceTimes,
        limits: DecodeSection,
        slice_s: float,
        batches: Batches,
        report: Callable[[Report], None],
        finish: Callable[[SimRequest], None],
        kv: KvRows | None = None,
        prompts: PromptBlocks | None = None,
    ) -> None:
        self.name = name
        self._events, self._times = events, times
        self._report, self._finish = report, finish
        self.offers: deque[tuple[SimRequest, Callable[[], None]]] = deque()
        self._pulling: deque[_HandOver] = deque()
        self._computing: deque[_HandOver] = deque()  # prompts without KV
        self._computed: list[SimRequest] = []  # whole with the step under way
        self._chunk_tokens = limits.chunk_tokens
        self._link_ns = ns(times.link_s)
        self._slice_ns = 0 if limits.devices[0] != "cpu" else ns(slice_s)  # 0: copied beside the steps
        self.slots = self.free = limits.slots
        self.kv, self.prompts = kv, prompts
        self.batch = batches.add(self._between, kv.most_tokens if kv is not None else NEVER_NS)
        self.batch.calls(kv is not None)
        self._requests: dict[int, SimRequest] = {}  # by row
        self.rows = 0
        self.preemptions = 0
        self._counted_ns = 0
        self.link_busy_ns = 0
        self._row_ns = 0

    # ---- hand-over

    def offer(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        if self._link_ns:
            self._events.after(self._link_ns, partial(self._offered, request, pulled))
        else:
            self._offered(request, pulled)

    def _offered(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        self.offers.append((request, pulled))
        self.batch.calls(True)
        if self._slice_ns or self._pulling or self.kv is not None:
            self.batch.poke()
        else:  # the loop sees it with the next step, and has nothing else to do than to begin the copy
            self._give_room()
            if self._pulling:
                self._begin(self._pulling[0], self.batch.boundary_ns())
            if self._computing:
                self.batch.poke()
        self._tell()

    def _pull(self) -> None:
        """Give room to what is offered, and bring KV in."""
        self._give_room()
        while self._pulling and self._copy(self._pulling[0]):
            self._arrived(self._pulling.popleft())
            self._give_room()
            if self._slice_ns and (len(self.batch) or self.batch.joining):
                return  # one between two steps

    def _give_room(self) -> None:
        while self.free and self.offers:
            request, pulled = self.offers[0]
            tokens = request.arrival.prompt_tokens
            if not request.ended and not self._has_room(request.arrival):
                break
            self.offers.popleft()
            if request.ended:
                self._events.after(0, pulled)
                continue
            self.free -= 1
            if self.kv is not None:
                self.kv.take(request, tokens)
            found = self.prompts.take(request) if self.prompts is not None else 0
            if request.by_decode:
                request.done_tokens = request.found_tokens = found
                self._computing.append(_HandOver(request, pulled, 0))
                continue
            took = ns(self._times.copy_s(tokens - found))
            self.link_busy_ns += took
            self._pulling.append(_HandOver(request, pulled, took))

    def _has_room(self, arrival: Arrival) -> bool:
        """Whether there are blocks for a prompt."""
        if self.kv is not None and (self.batch.out or not self.kv.has_room(arrival.prompt_tokens, len(self.batch))):
            return False  # who was here before comes first
        return self.prompts is None or self.prompts.has_room(arrival)

    def _copy(self, handover: _HandOver) -> bool:
        """Go on with the first hand-over; whether all of it is here now."""
        now = self._events.now_ns
        if handover.end_ns:
            return handover.end_ns <= now
        if self._slice_ns and (len(self.batch) or self.batch.joining):
            copied = min(handover.left_ns, self._slice_ns, self.batch.step_ns() // _SLICE_SHARE)
            handover.left_ns -= copied
            self.batch.lengthen(copied / 1e9)
            return handover.left_ns == 0
        self._begin(handover, now)
        return handover.end_ns <= now

    def _begin(self, handover: _HandOver, at_ns: int) -> None:
        """Copy all of it from then on; the loop sees its end."""
        handover.end_ns = at_ns + handover.left_ns
        if handover.end_ns > self._events.now_ns:
            self._events.at(handover.end_ns, self.batch.poke)
        else:
            self.batch.poke()

    def _compute(self) -> None:
        """A chunk of the prompts that are computed here goes through the model with the next step; one that is whole
        then has its first token when that is over. Without other rows a chunk is a pass of its own."""
        now, budget = self._events.now_ns, self._chunk_tokens - self.batch.appended
        computed, self._computed = self._computed, []
        for request in computed:
            self._joined(request)
        while self._computing and budget > 0:
            prompt = self._computing[0]
            request = prompt.request
            left = request.arrival.prompt_tokens - request.done_tokens
            request.begun_ns = request.begun_ns or now
            if prompt.end_ns > now:
                break
            if request.ended or not left:
                self._computing.popleft()
                self._joined(request)
                continue
            tokens = min(left, budget)
            seconds = self._times.prefill_s(request.done_tokens, tokens)
            request.done_tokens += tokens
            budget -= tokens
            if not len(self.batch) and not self.batch.joining:
                prompt.left_ns = ns(seconds) + self.batch.step_ns()
                self._begin(prompt, now)
                break
            self.batch.lengthen(seconds)
            if tokens == left:
                self._computed.append(self._computing.popleft().request)

    def _arrived(self, handover: _HandOver) -> None:
        handover.pulled()
        self._joined(handover.request)

    def _joined(self, request: SimRequest) -> None:
        self._count_row_time()
        if self.prompts is not None:
            self.prompts.fill(request, request.done_tokens)
        self.rows += 1
        request.first_token_ns = self._events.now_ns
        request.row = self.batch.arrive(
            request.arrival.prompt_tokens,
            request.arrival.output_tokens,
            expired=request.ended,
            holds=self.kv is None or self.kv.holds(request),
        )
        if request.row < 0:
            self._end(request)
        else:
            self._requests[request.row] = request

    # ---- rows

    def _between(self, over: list[int]) -> None:
        """What compiled code leaves to this one between two runs of steps."""
        for row in over:
            self._end(self._requests[row])
        if self.batch.out:
            self._bring_back()
        if self.offers or self._pulling or self._computing or self._computed:
            self._pull()
            self._compute()
            computes = bool(self._computing or self._computed)
            self.batch.calls(bool(self.offers or self._pulling or computes or self.kv is not None))
        most = self._secure() if self.kv is not None else self.batch.most_steps
        self.batch.go_on(1 if self._computing or self._computed or (self._pulling and self._slice_ns) else most)

    def expire(self, request: SimRequest) -> None:
        """Nobody waits for it any more."""
        if request.row >= 0:
            self.batch.expire(request.row)

    def _end(self, request: SimRequest) -> None:
        self._count_row_time()
        if self.kv is not None:
            self.kv.end(request)
        if self.prompts is not None:
            self.prompts.release(request)
        if request.row >= 0:
            del self._requests[request.row]
            request.stalled_ns = self.batch.free(request.row)
            request.row = -1
        self.rows -= 1
        self.free += 1
        self._finish(request)
        self._tell()

    # ---- KV blocks

    def _bring_back(self) -> None:
        """Rows that made room get blocks again, the oldest first, and are computed anew with the batch's next step."""
        assert self.kv is not None
        for row in [row for row in self.kv if self.batch.is_out(row.row)]:
            context = self.batch.context(row.row)
            if not row.ended and not self.kv.has_room(context, len(self.batch) + self.batch.joining):
                break
            self.batch.bring_back(row.row, over=row.ended)
            if row.ended:
                self._end(row)
                continue
            self.kv.take(row, context)
            self.batch.lengthen(self._times.prefill_s(0, context))

    def _secure(self) -> int:
        """Have blocks for the next steps of every row, the oldest first; how many steps they are for."""
        assert self.kv is not None
        self.batch.take_in()
        steps = min(self.batch.most_steps, self.kv.block_tokens)
        wanted = self._wanted(steps)
        if self.kv.missing(wanted) > self.kv.available:
            steps, wanted = 1, self._wanted(1)
        for row, tokens in wanted:
            while self.batch.has(row.row):
                try:
                    self.kv.grow(row, tokens)
                    break
                except OutOfBlocks:
                    self._preempt(self.kv.youngest())
        return steps

    def _wanted(self, steps: int) -> list[tuple[SimRequest, int]]:
        """How many tokens each row of the batch will have so many steps on."""
        assert self.kv is not None
        return [(row, self.batch.context_after(row.row, steps)) for row in self.kv if self.batch.has(row.row)]

    def _preempt(self, row: SimRequest) -> None:
        assert self.kv is not None
        self.preemptions += 1
        self.kv.give_up(row)
        if self.prompts is not None:
            self.prompts.release(row)
        if row.row >= 0:  # else its hand-over is under way
            self.batch.make_room(row.row)

    # ---- what others see

    @property
    def rests(self) -> bool:
        """Whether it has nothing to do."""
        return not self.offers and self.free == self.slots

    @property
    def row_ns(self) -> int:
        """The time of all rows, up to now."""
        self._count_row_time()
        return self._row_ns

    def _count_row_time(self) -> None:
        now = self._events.now_ns
        self._row_ns += self.rows * (now - self._counted_ns)
        self._counted_ns = now

    def _tell(self) -> None:
        free_blocks = self.kv.available if self.kv is not None else 0
        rows = self.rows + len(self._computing) + len(self._computed)
        self._report(
            Report(
                self.name, 1, 1, len(self.offers), rows, self.free, free_blocks=free_blocks,
                evicted_ns=self.prompts.evicted_ns if self.prompts is not None else 0, step_ns=self.batch.step_ns(),
            )
        )  # fmt: skip
