"""Simulated decode worker. Like `runtime.serving.decode`: pull → probe → decode; rows join and leave between steps.

Its loop acts between two steps only, as the real one does: a hand-over, a probe's vector or its passages that arrive
during a step are processed after the step. On CPUs the loop itself copies KV in slices between steps; on GPUs copies
run concurrently over a link of their own. One hand-over is pulled at a time and, unlike in production, not before its
row has a slot. Of a prompt of several passes only the last one's KV is pulled then: the others' is assumed to have been
pulled while the rest was computed. KV blocks are counted if `[decode] kv_blocks` is set: when they run out, the
youngest row is preempted, and its KV is recomputed later. Prompt blocks are reused if the trace contains shared
prefixes; rows are counted as if they shared none. A prompt without KV is computed in chunks during other rows' steps.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from runtime.node.worker_config import DecodeSection
from runtime.serving.decode.handover_queue import SLICE_NS
from runtime.serving.messages import Report
from runtime.simulator.events import NEVER_NS, Events, ns
from runtime.simulator.kv.prompt_blocks import PromptBlocks
from runtime.simulator.kv.rows import KvRows
from runtime.simulator.stages.decode_batches import Batches
from runtime.simulator.stages.pull import Link, Pull
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival


class SimDecode:
    """Offers → rows. A row leaves the batch while its probe is in flight, two seconds at most."""

    def __init__(
        self,
        name: str,
        events: Events,
        times: ServiceTimes,
        limits: DecodeSection,
        batches: Batches,
        report: Callable[[Report], None],
        finish: Callable[[SimRequest], None],
        kv: KvRows | None = None,
        prompts: PromptBlocks | None = None,
    ) -> None:
        self.name = name
        self._events, self._times = events, times
        self._report, self._finish = report, finish
        self.offers: deque[tuple[SimRequest, Callable[[], None]]] = deque()  # with what to call when it is pulled
        self._pulling: deque[Pull] = deque()
        self._computing: deque[Pull] = deque()  # prompts without KV
        self._computed: list[SimRequest] = []  # complete with the current step
        self._chunk_tokens = limits.chunk_tokens
        self._link_ns = ns(times.link_s)
        self._slice_ns = 0 if limits.devices[0] != "cpu" else SLICE_NS  # 0: copies run concurrently with steps
        self.slots = self.free = limits.slots
        self.kv, self.prompts = kv, prompts
        self.batch = batches.add(self._between_runs, kv.most_tokens if kv is not None else NEVER_NS)
        self.batch.call_between_runs(kv is not None)
        self._link = Link(events, self.batch, self._slice_ns)
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
        self.batch.call_between_runs(True)
        if self._slice_ns or self._pulling or self.kv is not None:
            self.batch.interrupt()
        else:  # the loop sees it after the current step, and only has to start the copy
            self._admit()
            if self._pulling:
                self._link.schedule_end(self._pulling[0], self.batch.boundary_ns())
            if self._computing or self._pulling:
                self.batch.interrupt()
        self._send_report()

    def _pull(self) -> None:
        """Admit offers and pull KV."""
        self._admit()
        while self._pulling and self._link.copy(self._pulling[0]):
            self._finish_pull(self._pulling.popleft())
            self._admit()
            if self._slice_ns and self._link.batch_runs:
                return  # one between two steps

    def _admit(self) -> None:
        while self.free and self.offers:
            request, pulled = self.offers[0]
            if not request.ended and not self._has_room(request.arrival):
                break
            self.offers.popleft()
            if request.ended:
                self._events.after(0, pulled)
                continue
            self.free -= 1
            found = self._take_blocks(request)
            if request.by_decode:
                request.done_tokens = request.found_tokens = found
                self._computing.append(Pull(request, pulled, 0))
            else:
                copied = request.arrival.prompt_tokens - found
                self.link_busy_ns += ns(self._times.copy_s(copied))
                took_ns = ns(self._times.copy_s(min(copied, request.last_pass_tokens)))
                self._pulling.append(Pull(request, pulled, took_ns))

    def _take_blocks(self, request: SimRequest) -> int:
        """Allocate blocks for a prompt. Return how many of its tokens are cached."""
        if self.kv is not None:
            self.kv.take(request, request.arrival.prompt_tokens)
        return self.prompts.take(request) if self.prompts is not None else 0

    def _has_room(self, arrival: Arrival) -> bool:
        """Return whether there are blocks for a prompt plus one for each running row; preempted rows have priority."""
        if self.kv is not None and (
            self.batch.preempted or not self.kv.has_room(arrival.prompt_tokens, len(self.batch))
        ):
            return False
        return self.prompts is None or self.prompts.has_room(arrival)

    def _compute(self) -> None:
        """Add a chunk of prompts that decode computes to the next step; a prompt that it completes has its first token
        after it. Without other rows a chunk is a pass of its own."""
        now, budget = self._events.now_ns, self._chunk_tokens - self.batch.appended
        computed, self._computed = self._computed, []
        for request in computed:
            self._join(request)
        while self._computing and budget > 0:
            prompt = self._computing[0]
            request = prompt.request
            left = request.arrival.prompt_tokens - request.done_tokens
            request.begun_ns = request.begun_ns or now
            if prompt.end_ns > now:
                break
            if request.ended or not left:
                self._computing.popleft()
                self._join(request)
                continue
            tokens = min(left, budget)
            seconds = self._times.prefill_s(request.done_tokens, tokens)
            request.done_tokens += tokens
            budget -= tokens
            if not self._link.batch_runs:
                prompt.left_ns = ns(seconds) + self.batch.step_ns()
                self._link.schedule_end(prompt, now)
                break
            self.batch.delay_next_step(seconds)
            if tokens == left:
                self._computed.append(self._computing.popleft().request)

    def _finish_pull(self, pull: Pull) -> None:
        pull.pulled()
        self._join(pull.request)

    def _join(self, request: SimRequest) -> None:
        self._count_row_time()
        if self.prompts is not None:
            self.prompts.fill(request, request.done_tokens)
        self.rows += 1
        request.first_token_ns = self._events.now_ns
        request.row = self.batch.add_row(
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

    def _between_runs(self, over: list[int]) -> None:
        """Process Python's part between two runs of steps; `over`: rows that have ended."""
        for row in over:
            self._end(self._requests[row])
        if self.batch.preempted:
            self._restore_rows()
        if self.offers or self._pulling or self._computing or self._computed:
            self._pull()
            self._compute()
            if self.batch.preempted:  # a row that has just joined may have lost its blocks during the pull
                self._restore_rows()
        pending = bool(self.offers or self._pulling or self._computing or self._computed)
        self.batch.call_between_runs(pending or self.kv is not None)
        most = self.kv.allocate(self.batch, self._preempt) if self.kv is not None else self.batch.most_steps
        sliced = self._pulling and self._slice_ns
        self.batch.resume(1 if self._computing or self._computed or sliced else most)

    def expire(self, request: SimRequest) -> None:
        """End a request that is past its deadline."""
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
        self._send_report()

    # ---- KV blocks

    def _restore_rows(self) -> None:
        """Allocate blocks for preempted rows, oldest first; the next step recomputes them."""
        assert self.kv is not None
        for row in [row for row in self.kv if self.batch.is_preempted(row.row)]:
            context = self.batch.context(row.row)
            if not row.ended and not self.kv.has_room(context, len(self.batch) + self.batch.joining):
                break
            self.batch.restore(row.row, over=row.ended)
            if row.ended:
                self._end(row)
                continue
            self.kv.take(row, context)
            self.batch.delay_next_step(self._times.prefill_s(0, context))

    def _preempt(self) -> None:
        """Preempt the youngest row."""
        assert self.kv is not None
        row = self.kv.youngest()
        self.preemptions += 1
        joined = row.row >= 0  # else it is being pulled
        self.kv.preempt(row)
        if self.prompts is not None:
            self.prompts.release(row)
        if joined:
            self.batch.preempt(row.row)

    # ---- reports

    @property
    def idle(self) -> bool:
        """Whether it has no work."""
        return not self.offers and self.free == self.slots

    @property
    def row_ns(self) -> int:
        """Total time of all rows up to now."""
        self._count_row_time()
        return self._row_ns

    def _count_row_time(self) -> None:
        now = self._events.now_ns
        self._row_ns += self.rows * (now - self._counted_ns)
        self._counted_ns = now

    def _send_report(self) -> None:
        free_blocks = self.kv.available if self.kv is not None else 0
        rows = self.rows + len(self._computing) + len(self._computed)
        self._report(
            Report(
                self.name, 1, 1, len(self.offers), rows, self.free, free_blocks=free_blocks,
                step_ns=self.batch.step_ns(),
            )
        )  # fmt: skip
