"""A simulated decode worker. As `runtime.serving.decode`: pull → probe → decode, rows join and leave between steps.

Its loop looks around between two steps only, as the real one's does: what comes during a step, be it a hand-over, a
probe's vector or its passages, is taken up when the step is over. KV is copied by the loop itself in slices between
steps, or on a GPU beside them over a link of its own; one hand-over at a time, and unlike there not before its row has
a slot. What prefill has of a prompt is pulled while it computes the rest; in order "decode first" the prompt has its
slot before. Where `[decode] kv_blocks` says how many KV blocks there are, they are counted: when they run out, the
youngest row makes room, and its KV is loaded from tiers later, or computed again. The blocks of prompts are found again
by others where the trace says which ones they share; rows are counted as if they shared none. A prompt that comes
without KV is computed in chunks beside the steps of the others, but for what tiers have of it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from runtime.node.config import DecodeSection
from runtime.serving.kv.tiers import BUSY_SHARE
from runtime.serving.messages import Report
from runtime.simulator.events import NEVER_NS, Events, ns
from runtime.simulator.kv.early_pull import EarlyPull, EarlyPulls
from runtime.simulator.kv.prompt_blocks import PromptBlocks
from runtime.simulator.kv.rows import KvRows
from runtime.simulator.kv.write_through import WriteThrough
from runtime.simulator.stages.decode_batches import Batches
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes


@dataclass(slots=True, eq=False)
class _HandOver:
    """A prompt whose KV is pulled: `left_ns` of copying, which ends at `end_ns` once nothing interrupts it. `least_ns`:
    it is loaded from tiers, by the loop itself, so much at least at a time."""

    request: SimRequest
    pulled: Callable[[], None]
    left_ns: int
    end_ns: int = 0
    least_ns: int = 0


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
        self.offers: deque[tuple[SimRequest, Callable[[], None], bool]] = deque()  # the last: announced
        self._pulling: deque[_HandOver] = deque()
        self._computing: deque[_HandOver] = deque()  # prompts without KV
        self._computed: list[SimRequest] = []  # whole with the step under way
        self._chunk_tokens = limits.chunk_tokens
        self._link_ns = ns(times.link_s)
        self._load_slice_ns = ns(slice_s)
        self._slice_ns = 0 if limits.devices[0] != "cpu" else self._load_slice_ns  # 0: copied beside the steps
        self.slots = self.free = limits.slots
        self.kv, self.prompts = kv, prompts
        self.early = EarlyPulls(kv, prompts)
        self._writes = WriteThrough(events, prompts, lambda: not self._runs) if prompts is not None else None
        self._steps = 0  # of the batch, when it was last written beside them
        self.batch = batches.add(self._between, kv.most_tokens if kv is not None else NEVER_NS)
        self.batch.calls(kv is not None)
        self._requests: dict[int, SimRequest] = {}  # by row
        self.rows = 0
        self.preemptions = 0
        self._counted_ns = 0
        self.link_busy_ns = 0
        self._row_ns = 0

    # ---- hand-over

    def announce(self, request: SimRequest, has_room: Callable[[], None]) -> None:
        """Keep room for a prompt that prefill is to compute then."""
        self._events.after(self._link_ns, partial(self._take_in, request, has_room, announced=True))

    def offer(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        if self._link_ns:
            self._events.after(self._link_ns, partial(self._offered, request, pulled))
        else:
            self._offered(request, pulled)

    def wrote(self, request: SimRequest) -> None:
        """Prefill has computed more of a prompt, and is not done with it yet."""
        early = self.early.of(request, self._events.now_ns + self._link_ns)
        if not early.held and not self.offers and self.early.take(early, len(self.batch), out=bool(self.batch.out)):
            early.held = True
        if not early.held:
            return
        early.there_ns = ns(self._times.copy_s(max(request.done_tokens - early.found_tokens, 0)))
        if not self._slice_ns:  # beside the steps
            begin_ns = max(early.end_ns, early.ready_ns, self.batch.boundary_ns())
            self.link_busy_ns += early.there_ns - early.copied_ns
            early.end_ns = begin_ns + early.there_ns - early.copied_ns
            early.copied_ns = early.there_ns
        elif early.there_ns > early.copied_ns:
            self.batch.calls(True)
            self._events.at(early.ready_ns, self.batch.poke)

    def _offered(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        early = self.early.get(request)
        if early is not None and early.reserved:
            self.early.pop(request)
            self._pulling.append(self._rest_of(early, pulled))
            self.batch.calls(True)
            self.batch.poke()
            self._tell()
        else:
            self._take_in(request, pulled)

    def _take_in(self, request: SimRequest, pulled: Callable[[], None], *, announced: bool = False) -> None:
        self.offers.append((request, pulled, announced))
        self.batch.calls(True)
        if self._slice_ns or self._pulling or self.kv is not None:
            self.batch.poke()
        else:  # the loop sees it with the next step, and has nothing else to do than to begin the copy
            self._give_room()
            if self._pulling and not self._pulling[0].least_ns:
                self._begin(self._pulling[0], self.batch.boundary_ns())
            if self._computing or self._pulling:
                self.batch.poke()
        self._tell()

    def _rest_of(self, early: EarlyPull, pulled: Callable[[], None]) -> _HandOver:
        """A prompt that is whole now, of which some is here."""
        request, now = early.request, self._events.now_ns
        took = ns(self._times.copy_s(max(request.arrival.prompt_tokens - early.found_tokens, 0)))
        left = max(took - early.copied_ns, 0)
        self.link_busy_ns += left
        return _HandOver(request, pulled, left + max(early.end_ns - now, 0))

    @property
    def _runs(self) -> bool:
        """Whether there is a batch that a copy would hold up."""
        return bool(len(self.batch) or self.batch.joining)

    def _pull(self) -> None:
        """Give room to what is offered, and bring KV in."""
        self._give_room()
        while self._pulling and self._copy(self._pulling[0]):
            self._arrived(self._pulling.popleft())
            self._give_room()
            if self._slice_ns and self._runs:
                return  # one between two steps
        if self._slice_ns and not self._pulling:
            self._pull_early()

    def _pull_early(self) -> None:
        """Copy some of the first prompt that is still computed and of which there is more."""
        now = self._events.now_ns
        early = self.early.first(now)
        if early is None:
            return
        left = early.there_ns - early.copied_ns
        if self._runs:
            left = min(left, self._slice_ns, self.batch.step_ns() // BUSY_SHARE)
            self.batch.lengthen(left / 1e9)
        else:
            early.end_ns = now + left
            self._events.at(early.end_ns, self.batch.poke)
        early.copied_ns += left
        self.link_busy_ns += left

    def _give_room(self) -> None:
        while self.free and self.offers:
            request, pulled, announced = self.offers[0]
            early = self.early.get(request) if not announced else None
            if not request.ended and not (early is not None and early.held) and not self._has_room(request):
                break
            self.offers.popleft()
            if early is not None:
                self.early.pop(request)
            if request.ended:
                self.early.release(early)
                self._events.after(0, pulled)
                continue
            self.free -= 1
            if early is not None and early.held:
                self._pulling.append(self._rest_of(early, pulled))
                continue
            found = self._take(request)
            if announced:
                self.early.reserve(request, found, self._events.now_ns)
                self._events.after(0, pulled)
            elif request.by_decode:
                self._begin_prompt(request, pulled, found)
            else:
                took = ns(self._times.copy_s(request.arrival.prompt_tokens - found))
                self.link_busy_ns += took
                self._pulling.append(_HandOver(request, pulled, took))

    def _take(self, request: SimRequest) -> int:
        """Blocks for a prompt; how many of its tokens are here already."""
        if self.kv is not None:
            self.kv.take(request, request.arrival.prompt_tokens)
        return self.prompts.take(request) if self.prompts is not None else 0

    def _begin_prompt(self, request: SimRequest, pulled: Callable[[], None], found: int) -> None:
        """A prompt without KV has room: what tiers have of it is loaded, the rest computed."""
        request.done_tokens = request.found_tokens = found
        if self.prompts is not None and (load_ns := self.prompts.begin_load(request)):
            least_ns = self.prompts.tiers.costs.load_ns
            self._pulling.append(_HandOver(request, pulled, load_ns, least_ns=least_ns))
        else:
            self._computing.append(_HandOver(request, pulled, 0))

    def _has_room(self, request: SimRequest) -> bool:
        """Whether there are blocks for a prompt; those of prompts that come early are given up for it."""
        while self.batch.out or not self.early.has_room(request.arrival, len(self.batch)):
            if self.batch.out or not self.early.give_up():
                return False  # who was here before comes first
        return True

    def _copy(self, handover: _HandOver) -> bool:
        """Go on with the first hand-over; whether all of it is here now."""
        now = self._events.now_ns
        if handover.end_ns:
            return handover.end_ns <= now
        if (self._slice_ns or handover.least_ns) and self._runs:
            slice_ns = max(min(self._load_slice_ns, self.batch.step_ns() // BUSY_SHARE), handover.least_ns)
            copied = min(handover.left_ns, slice_ns)
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
            if self.prompts is not None:
                self.prompts.record_compute(tokens, ns(seconds))
            if not self._runs:
                prompt.left_ns = ns(seconds) + self.batch.step_ns()
                self._begin(prompt, now)
                break
            self.batch.lengthen(seconds)
            if tokens == left:
                self._computed.append(self._computing.popleft().request)

    def _arrived(self, handover: _HandOver) -> None:
        request = handover.request
        if handover.least_ns:
            assert self.prompts is not None, "tiers have blocks of prompts"
            request.done_tokens = request.found_tokens = self.prompts.end_load(request)
            self._computing.append(_HandOver(request, handover.pulled, 0))
            return
        handover.pulled()
        self._joined(request)

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
        if self.offers or self._pulling or self._computing or self._computed or self.early:
            self._pull()
            self._compute()
            if self.batch.out:  # the blocks of one that has just come may have been given up on its way
                self._bring_back()
        steps, self._steps = self.batch.steps - self._steps, self.batch.steps
        if self.kv is not None:
            self.kv.tiers.write(steps * self.batch.step_ns() // BUSY_SHARE)  # of rows that make room
        if self._writes is not None:
            took_ns = self._writes.beside(steps * self.batch.step_ns())
            if self._runs:
                self.batch.lengthen(took_ns / 1e9)
            else:
                self._writes.idle()
        comes = bool(self.offers or self._pulling or self._computing or self._computed or self.early)
        self.batch.calls(comes or self.kv is not None or (self.prompts is not None and self.prompts.unsaved))
        most = self.kv.secure(self.batch, self._make_room) if self.kv is not None else self.batch.most_steps
        sliced = self._pulling and (self._slice_ns or self._pulling[0].least_ns)
        early = self._slice_ns and self.early.first(self._events.now_ns)
        self.batch.go_on(1 if self._computing or self._computed or sliced or early else most)

    def hold_up(self, seconds: float) -> None:
        """Others have its core for so long: if there is a step under way, the next one ends later."""
        if self._runs:
            self.batch.lengthen(seconds)
            self.batch.poke()

    def expire(self, request: SimRequest) -> None:
        """Nobody waits for it any more."""
        if request.row >= 0:
            self.batch.expire(request.row)
        elif (early := self.early.pop(request)) is not None:
            self.free += early.reserved
            self.early.release(early)
            if self.offers:
                self.batch.poke()

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
            loaded = self.kv.come_back(row)
            computed_s = self._times.prefill_s(loaded, context - loaded)
            self.kv.tiers.record_compute(context - loaded, ns(computed_s))
            self.batch.lengthen(computed_s)
            self.batch.lengthen(self.kv.tiers.take_time_ns() / 1e9)

    def _make_room(self) -> None:
        """Take blocks from a prompt that came early, or from the youngest row."""
        assert self.kv is not None
        if self.early.give_up():
            return
        row = self.kv.youngest()
        self.preemptions += 1
        held = row.row >= 0  # else its hand-over is under way
        self.kv.give_up(row, self.batch.context_after(row.row, 0) if held else 0)
        self.batch.lengthen(self.kv.tiers.take_time_ns() / 1e9)
        if self.prompts is not None:
            self.prompts.release(row)
        if held:
            self.batch.make_room(row.row)

    # ---- what others see

    @property
    def rests(self) -> bool:
        """Whether it has nothing to do."""
        return not self.offers and not self.early and self.free == self.slots

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
