"""A simulated decode worker. As `runtime.serving.decode`: pull → probe → decode, rows join and leave between steps.

Unlike there, KV is pulled beside the running batch, over a link of its own, one hand-over at a time, and not before its
row has a slot. Where `[decode] kv_blocks` says how many KV blocks there are, they are counted: when they run out, the
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
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.stages.kv_rows import KvRows
from runtime.simulator.stages.prefill import Ask
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.stages.step_batch import StepBatch
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.workload import Workload

_MOST_STEPS = 64  # in one run: contexts grow, and the time of a step with them
_PROBE_TIMEOUT_NS = 2_000_000_000  # as in runtime.serving.decode


@dataclass(slots=True, eq=False)
class _Probe:
    """A row's question to the pool."""

    row: SimRequest
    query: int = -1


class SimDecode:
    """Offers → rows. A row leaves the batch while a probe of its runs, two seconds at most."""

    def __init__(
        self,
        name: str,
        events: Events,
        times: ServiceTimes,
        limits: DecodeSection,
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
        self._gpu, self._random = gpu, random
        self._ask, self._forget, self._report, self._finish = ask, forget, report, finish
        self._timeouts: Timeouts[_Probe] = Timeouts(events, _PROBE_TIMEOUT_NS, self._timed_out)
        self.offers: deque[tuple[SimRequest, Callable[[], None]]] = deque()
        self.slots = self.free = limits.slots
        self.rows = 0
        self.stalled = 0
        self.batch: StepBatch[SimRequest] = StepBatch(events, self._between, self._step_ns, self._extra_ns)
        self._joining: list[SimRequest] = []
        self.kv = kv
        self._out: set[SimRequest] = set()  # have made room, and wait for blocks
        self.preemptions = 0
        self._context = 0  # cached tokens of all rows in the batch
        self._extra_s = 0.0
        self._link_free_ns = 0
        self._counted_ns = 0
        self.link_busy_ns = 0
        self.row_ns = 0
        self.stall_ns = 0
        self.tokens = 0
        self.probes = 0

    # ---- hand-over

    def offer(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        self.offers.append((request, pulled))
        self._pull()
        self._tell()

    def _pull(self) -> None:
        while self.free and self.offers:
            request, pulled = self.offers[0]
            tokens = request.arrival.prompt_tokens
            if not request.ended and self.kv is not None:
                if self._out or not self.kv.has_room(tokens, len(self.batch)):
                    return  # who was here before comes first
                self.kv.take(request, tokens)
            self.offers.popleft()
            if request.ended:
                self._events.after(0, pulled)
                continue
            self.free -= 1
            took = ns(self._times.handover_s(tokens))
            self._link_free_ns = max(self._link_free_ns, self._events.now_ns) + took
            self.link_busy_ns += took
            self._events.at(self._link_free_ns, partial(self._arrived, request, pulled))

    def _arrived(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        pulled()
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
        if self.kv is not None and not self.kv.holds(row):
            self._out.add(row)  # it has made room while it waited for its probe
        else:
            self._joining.append(row)
        self.batch.poke()

    def _steps(self, row: SimRequest) -> int:
        """Tokens until the row's end or next probe."""
        left = row.arrival.output_tokens - row.generated
        every = self._workload.probe_every_tokens
        return min(left, every - row.generated % every) if every else left

    def _between(self, done: list[SimRequest], steps: int) -> int:
        taken = steps * (len(self.batch) + len(done))
        self._context += taken
        self.tokens += taken
        for row in done:
            taken = self._steps(row)
            row.generated += taken
            row.context += taken
            self._context -= row.context
            self._go_on(row)
        if self._out:
            self._bring_back()
        if self._joining:
            for row in self._joining:
                self.batch.join(row, self._steps(row))
                self._context += row.context
            self._joining.clear()
        most = self._secure() if self.kv is not None else _MOST_STEPS
        self._gpu.model_busy = bool(self.batch)
        return most

    def _step_ns(self) -> int:
        return ns(self._times.decode_s(len(self.batch), self._context))

    def _extra_ns(self) -> int:
        debt_ns = self._gpu.take_debt_ns()
        if not self._extra_s:
            return debt_ns
        extra, self._extra_s = self._extra_s, 0.0
        return ns(extra) + debt_ns

    def _end(self, row: SimRequest) -> None:
        self.count_row_time()
        if self.kv is not None:
            self.kv.end(row)
            if self._out:
                self.batch.poke()
        self.rows -= 1
        self.free += 1
        self._finish(row)
        self._pull()
        self._tell()

    # ---- KV blocks

    def _bring_back(self) -> None:
        """Rows that made room get blocks again, the oldest first, and are computed anew with the batch's next step."""
        assert self.kv is not None
        for row in [row for row in self.kv if row in self._out]:
            if not row.ended and not self.kv.has_room(row.context, len(self.batch) + len(self._joining)):
                break
            self._out.remove(row)
            if row.ended:
                self._end(row)
                continue
            self.kv.take(row, row.context)
            self._extra_s += self._times.prefill_s(0, row.context)
            self._joining.append(row)
        self._pull()

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
                found.append((row, row.context + self._steps(row) - left + min(steps, left)))
        return found

    def _preempt(self, row: SimRequest) -> None:
        assert self.kv is not None
        self.preemptions += 1
        self.kv.give_up(row)
        if row in self.batch:  # else it waits for a probe, or for its hand-over to end
            taken = self._steps(row) - self.batch.leave(row)
            row.generated += taken
            row.context += taken
            self._context -= row.context
            self._out.add(row)

    # ---- probes

    def _probe(self, row: SimRequest) -> None:
        self.count_row_time()
        self.stalled += 1
        self.probes += 1
        assert self._ask is not None
        probe = _Probe(row)
        probe.query = self._ask(self._timeouts.begin(probe), partial(self._probed, probe))

    def _timed_out(self, probe: "_Probe") -> None:
        self._forget(probe.query)
        self._probed(probe, "timeout")

    def _probed(self, probe: "_Probe", status: str) -> None:
        self._timeouts.end(probe)
        self.count_row_time()
        self.stalled -= 1
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
