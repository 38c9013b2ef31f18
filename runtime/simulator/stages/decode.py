"""A simulated decode worker. As `runtime.serving.decode`: pull → probe → decode, rows join and leave between steps.

Its loop looks around between two steps only, as the real one's does: what comes during a step, be it a hand-over, a
probe's vector or its passages, is taken up when the step is over. KV is copied by the loop itself in slices between
steps, or on a GPU beside them over a link of its own; one hand-over at a time, and unlike there not before its row has
a slot. Where `[decode] kv_blocks` says how many KV blocks there are, they are counted: when they run out, the
youngest row makes room and is computed again (there is no swap space here).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from runtime.node.config import DecodeSection
from runtime.serving.kv.blocks import OutOfBlocks
from runtime.serving.messages import Report
from runtime.simulator.events import Events, Timeouts, ns
from runtime.simulator.stages.embedder import Embedder
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.stages.kv_rows import KvRows
from runtime.simulator.stages.prefill import Ask
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.stages.step_batch import StepBatch
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.workload import Workload

_MOST_STEPS = 64  # in one run: contexts grow, and the time of a step with them
_PROBE_TIMEOUT_NS = 2_000_000_000  # as in runtime.serving.decode
_SLICE_SHARE = 30  # a slice of KV takes a thirtieth of a step at most, as there


@dataclass(slots=True, eq=False)
class _Probe:
    """A row's query to the pool. `query`: its number while the pool has it."""

    row: SimRequest
    deadline_ns: int = 0
    query: int = -1
    over: bool = False


@dataclass(slots=True, eq=False)
class _HandOver:
    """A prompt whose KV is pulled: `left_ns` of copying, which ends at `end_ns` once nothing interrupts it."""

    request: SimRequest
    pulled: Callable[[], None]
    left_ns: int
    end_ns: int = 0


class SimDecode:
    """Offers → rows. A row leaves the batch while a probe of its runs, two seconds at most."""

    def __init__(
        self,
        name: str,
        events: Events,
        times: ServiceTimes,
        limits: DecodeSection,
        slice_s: float,
        workload: Workload,
        gpu: Gpu,
        random: Random,
        ask: Ask | None,
        forget: Callable[[int], None],
        report: Callable[[Report], None],
        finish: Callable[[SimRequest], None],
        kv: KvRows | None = None,
    ) -> None:
        self.name = name
        self._events, self._times, self._limits, self._workload = events, times, limits, workload
        self._embedder = Embedder(events, times.embed_s)
        self._asking: list[_Probe] = []  # begun between these two steps
        self._answered: list[tuple[_Probe, str]] = []
        self._gpu, self._random = gpu, random
        self._ask, self._forget, self._report, self._finish = ask, forget, report, finish
        self._timeouts: Timeouts[_Probe] = Timeouts(events, _PROBE_TIMEOUT_NS, self._timed_out)
        self.offers: deque[tuple[SimRequest, Callable[[], None]]] = deque()
        self._pulling: deque[_HandOver] = deque()
        self._link_ns = ns(times.link_s)
        self._costs_ns = times.decode_step_s * 1e9, times.decode_row_s * 1e9, times.decode_context_s * 1e9
        self._slice_ns = 0 if limits.devices[0] != "cpu" else ns(slice_s)  # 0: copied beside the steps
        self.slots = self.free = limits.slots
        self.rows = 0
        self.stalled = 0
        self.batch: StepBatch[SimRequest] = StepBatch(events, self._between)
        self._members = self.batch.members
        self._joining: list[SimRequest] = []
        self.kv = kv
        self._out: set[SimRequest] = set()  # have made room, and wait for blocks
        self.preemptions = 0
        self._context = 0  # cached tokens of all rows in the batch
        self._extra_s = 0.0
        self._counted_ns = 0
        self.link_busy_ns = 0
        self.row_ns = 0
        self.stall_ns = 0
        self.tokens = 0
        self.probes = 0

    # ---- hand-over

    def offer(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        if self._link_ns:
            self._events.after(self._link_ns, partial(self._offered, request, pulled))
        else:
            self._offered(request, pulled)

    def _offered(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        self.offers.append((request, pulled))
        if self._slice_ns or self._pulling or self.kv is not None:
            self.batch.poke()
        else:  # the loop sees it with the next step, and has nothing else to do than to begin the copy
            self._give_room()
            if self._pulling:
                self._begin(self._pulling[0], self.batch.boundary_ns())
        self._tell()

    def _pull(self) -> None:
        """Give room to what is offered, and bring KV in."""
        self._give_room()
        while self._pulling and self._copy(self._pulling[0]):
            self._arrived(self._pulling.popleft())
            self._give_room()
            if self._slice_ns and (self._members or self._joining):
                return  # one between two steps

    def _give_room(self) -> None:
        while self.free and self.offers:
            request, pulled = self.offers[0]
            tokens = request.arrival.prompt_tokens
            if not request.ended and self.kv is not None:
                if self._out or not self.kv.has_room(tokens, len(self._members)):
                    break  # who was here before comes first
                self.kv.take(request, tokens)
            self.offers.popleft()
            if request.ended:
                self._events.after(0, pulled)
                continue
            self.free -= 1
            took = ns(self._times.copy_s(tokens))
            self.link_busy_ns += took
            self._pulling.append(_HandOver(request, pulled, took))

    def _copy(self, handover: _HandOver) -> bool:
        """Go on with the first hand-over; whether all of it is here now."""
        now = self._events.now_ns
        if handover.end_ns:
            return handover.end_ns <= now
        if self._slice_ns and (self._members or self._joining):
            step_ns = self._step_ns(len(self._members) + len(self._joining))
            copied = min(handover.left_ns, self._slice_ns, step_ns // _SLICE_SHARE)
            handover.left_ns -= copied
            self._extra_s += copied / 1e9
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

    def _arrived(self, handover: _HandOver) -> None:
        request = handover.request
        handover.pulled()
        self.count_row_time()
        self.rows += 1
        request.first_token_ns = self._events.now_ns
        request.generated = 1
        self.tokens += 1
        request.context = request.arrival.prompt_tokens
        self._go_on(request)

    # ---- rows

    def _go_on(self, row: SimRequest) -> None:
        """After a token: the row ends, asks, or takes more steps."""
        every = self._workload.probe_every_tokens
        if row.ended or row.generated >= row.arrival.output_tokens:
            self._end(row)
        elif self._ask is not None and every and row.generated % every == 0:
            self._probe(row)
        else:
            self._join(row)

    def _join(self, row: SimRequest) -> None:
        """With the next step. Only between two steps."""
        if self.kv is not None and not self.kv.holds(row):
            self._out.add(row)  # it has made room while it waited for its probe
        else:
            self._joining.append(row)

    def _steps(self, row: SimRequest) -> int:
        """Tokens until the row's end or next probe."""
        left = row.arrival.output_tokens - row.generated
        every = self._workload.probe_every_tokens
        return min(left, every - row.generated % every) if every else left

    def _between(self, done: list[SimRequest], steps: int) -> tuple[int, int, int]:
        taken = steps * (len(self._members) + len(done))
        self._context += taken
        self.tokens += taken
        for row in done:
            taken = row.steps
            row.generated += taken
            row.context += taken
            self._context -= row.context
            self._go_on(row)
        if self._answered:
            self._take_answers()
        if self._out:
            self._bring_back()
        if self.offers or self._pulling:
            self._pull()
        if self._joining:
            for row in self._joining:
                row.steps = self._steps(row)
                self.batch.join(row, row.steps)
                self._context += row.context
            self._joining.clear()
        most = self._secure() if self.kv is not None else _MOST_STEPS
        self._gpu.model_busy = bool(self._members)
        if self._pulling and self._slice_ns:
            most = 1
        extra_ns = self._gpu.take_debt_ns() if self._gpu.slowdown > 1.0 else 0
        if self._extra_s:
            extra_ns += ns(self._extra_s)
            self._extra_s = 0.0
        step_ns = self._step_ns(len(self._members))
        if self._asking:
            self._embed(self._events.now_ns + extra_ns + step_ns if self._members else 0)
        return most, step_ns, extra_ns

    def _step_ns(self, rows: int) -> int:
        """`ServiceTimes.decode_s`, with the rows of the batch."""
        fixed, row, context = self._costs_ns
        return int(fixed + rows * row + self._context * context) or 1

    def _end(self, row: SimRequest) -> None:
        self.count_row_time()
        if self.kv is not None:
            self.kv.end(row)
        self.rows -= 1
        self.free += 1
        if self.offers or self._out:
            self.batch.poke()
        self._finish(row)
        self._tell()

    # ---- KV blocks

    def _bring_back(self) -> None:
        """Rows that made room get blocks again, the oldest first, and are computed anew with the batch's next step."""
        assert self.kv is not None
        for row in [row for row in self.kv if row in self._out]:
            if not row.ended and not self.kv.has_room(row.context, len(self._members) + len(self._joining)):
                break
            self._out.remove(row)
            if row.ended:
                self._end(row)
                continue
            self.kv.take(row, row.context)
            self._extra_s += self._times.prefill_s(0, row.context)
            self._joining.append(row)

    def _secure(self) -> int:
        """Have blocks for the next steps of every row, the oldest first; how many steps they are for."""
        assert self.kv is not None
        steps = min(_MOST_STEPS, self.kv.block_tokens)
        wanted = self._wanted(steps)
        if self.kv.missing(wanted) > self.kv.available:
            steps, wanted = 1, self._wanted(1)
        for row, tokens in wanted:
            while row in self.batch:
                try:
                    self.kv.grow(row, tokens)
                    break
                except OutOfBlocks:
                    self._preempt(self.kv.youngest())
        return steps

    def _wanted(self, steps: int) -> list[tuple[SimRequest, int]]:
        """How many tokens each row of the batch will have so many steps on."""
        assert self.kv is not None
        found = []
        for row in self.kv:
            if row in self.batch:
                left = self.batch.left(row)
                found.append((row, row.context + row.steps - left + min(steps, left)))
        return found

    def _preempt(self, row: SimRequest) -> None:
        assert self.kv is not None
        self.preemptions += 1
        self.kv.give_up(row)
        if row in self.batch:  # else it waits for a probe, or for its hand-over to end
            taken = row.steps - self.batch.leave(row)
            row.generated += taken
            row.context += taken
            self._context -= row.context
            self._out.add(row)

    # ---- probes

    def _probe(self, row: SimRequest) -> None:
        self.count_row_time()
        self.stalled += 1
        self.probes += 1
        probe = _Probe(row)
        probe.deadline_ns = self._timeouts.begin(probe)
        self._asking.append(probe)

    def _embed(self, boundary_ns: int) -> None:
        """The pool is asked when the step that begins now is over, or later, when a vector is there."""
        for probe in self._asking:
            at_ns = self._embedder.begin()
            if at_ns <= boundary_ns:
                self._send(probe, boundary_ns)
            else:
                self._events.at(at_ns, partial(self._vector, probe))
        self._asking.clear()

    def _vector(self, probe: _Probe) -> None:
        """The pool is asked when the step under way is over."""
        if not probe.over:
            self._send(probe, self.batch.boundary_ns())

    def _send(self, probe: _Probe, at_ns: int) -> None:
        assert self._ask is not None
        probe.query = self._ask(at_ns, probe.deadline_ns, partial(self._reply, probe))

    def _reply(self, probe: _Probe, status: str) -> None:
        probe.over = True
        self._timeouts.end(probe)
        self._answered.append((probe, status))
        self.batch.poke()

    def _timed_out(self, probe: _Probe) -> None:
        if probe.query >= 0:
            self._forget(probe.query)
        self._reply(probe, "timeout")

    def _take_answers(self) -> None:
        """Let rows go on whose probes are answered."""
        answered, self._answered = self._answered, []
        self.count_row_time()
        for probe, status in answered:
            self.stalled -= 1
            probe.row.stalled_ns += self._events.now_ns - probe.deadline_ns + _PROBE_TIMEOUT_NS
            if status == "ok" and self._random.random() < self._workload.probe_hit:
                self._append(probe.row)
            self._go_on_after_probe(probe.row)

    def _append(self, row: SimRequest) -> None:
        """New passages: a chunk that goes through the model with the row's next step."""
        tokens = self._limits.probe_tokens
        left = row.arrival.output_tokens - row.generated
        if self.kv is not None and row.context + tokens + left > self.kv.most_tokens:
            return
        self._extra_s += self._times.prefill_s(row.context, tokens)
        row.context += tokens

    def _go_on_after_probe(self, row: SimRequest) -> None:
        if row.ended:
            self._end(row)
        else:
            self._join(row)

    # ---- what others see

    def count_row_time(self) -> None:
        now = self._events.now_ns
        passed = now - self._counted_ns
        if passed:
            self.row_ns += self.rows * passed
            self.stall_ns += self.stalled * passed
            self._counted_ns = now

    def _tell(self) -> None:
        free_blocks = self.kv.available if self.kv is not None else 0
        self._report(Report(self.name, 1, 1, len(self.offers), self.rows, self.free, free_blocks=free_blocks))
