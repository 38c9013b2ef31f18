"""Simulated decode worker. Like `runtime.serving.decode`: pull → probe → decode; rows join and leave between steps.

Its loop acts between two steps only, as the real one does: a hand-over, a probe's vector or its passages that arrive
during a step are processed after the step. On CPUs the loop itself copies KV in slices between steps; on GPUs copies
run concurrently over a link of their own. One hand-over is pulled at a time and, unlike in production, not before its
row has a slot. Of a prompt of several passes only the last one's KV is pulled then: the others' is assumed to have been
pulled while the rest was computed. Where `[decode] kv_blocks` is set, a row holds blocks for its prompt and half of
its answer, its mean length, and waits for them; production gives it more as it grows, and preempts when they run out.
Prompt blocks are reused if the trace contains shared prefixes; rows are counted as if they shared none. A prompt
without KV is computed in chunks during other rows' steps.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from runtime.node.engine_config import BLOCK_TOKENS
from runtime.node.worker_config import DecodeSection
from runtime.serving.decode.handover_queue import SLICE_NS
from runtime.serving.kv.tiers import BUSY_SHARE
from runtime.serving.messages import Report
from runtime.simulator.kv.prompt_blocks import PromptBlocks
from runtime.simulator.stages.decode_batches import Batches
from runtime.simulator.stages.events import Events, ns
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival


@dataclass(slots=True, eq=False)
class Pull:
    """A pull: `left_ns` of copying remain, until `end_ns` once it runs uninterrupted."""

    request: SimRequest
    pulled: Callable[[], None]
    left_ns: int
    end_ns: int = 0


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
        prompts: PromptBlocks | None,
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
        self.blocks = self.free_blocks = limits.kv_blocks  # for rows; 0: not counted
        self.prompts = prompts
        self.batch = batches.add(self._between_runs)
        self._requests: dict[int, SimRequest] = {}  # by row
        self.rows = 0
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
        if self._slice_ns or self._pulling:
            self.batch.interrupt()
        else:  # the loop sees it after the current step, and only has to start the copy
            self._admit()
            if self._pulling:
                self._schedule_end(self._pulling[0], self.batch.boundary_ns())
            if self._computing or self._pulling:
                self.batch.interrupt()
        self._send_report()

    def _pull(self) -> None:
        """Admit offers and pull KV."""
        self._admit()
        while self._pulling and self._copy(self._pulling[0]):
            self._finish_pull(self._pulling.popleft())
            self._admit()
            if self._slice_ns and self._batch_runs:
                return  # one between two steps

    @property
    def _batch_runs(self) -> bool:
        """Whether there is a batch that a copy would delay."""
        return bool(len(self.batch) or self.batch.joining)

    def _copy(self, pull: Pull) -> bool:
        """Continue a pull. Return whether it is complete."""
        now = self._events.now_ns
        if not pull.end_ns and self._slice_ns and self._batch_runs:
            copied = min(pull.left_ns, SLICE_NS, self.batch.step_ns() // BUSY_SHARE)
            pull.left_ns -= copied
            self.batch.delay_next_step(copied / 1e9)
            return pull.left_ns == 0
        if not pull.end_ns:
            self._schedule_end(pull, now)
        return pull.end_ns <= now

    def _schedule_end(self, pull: Pull, at_ns: int) -> None:
        """Let the rest of a pull run uninterrupted from `at_ns`."""
        pull.end_ns = at_ns + pull.left_ns
        if pull.end_ns > self._events.now_ns:
            self._events.at(pull.end_ns, self.batch.interrupt)
        else:
            self.batch.interrupt()

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
            self.free_blocks -= self._row_blocks(request.arrival)
            cached_tokens = self.prompts.take(request) if self.prompts is not None else 0
            if request.by_decode:
                request.done_tokens = request.found_tokens = cached_tokens
                self._computing.append(Pull(request, pulled, 0))
            else:
                copied = request.arrival.prompt_tokens - cached_tokens
                self.link_busy_ns += ns(self._times.copy_s(copied))
                took_ns = ns(self._times.copy_s(min(copied, request.last_pass_tokens)))
                self._pulling.append(Pull(request, pulled, took_ns))

    def _row_blocks(self, arrival: Arrival) -> int:
        """Return the blocks of a row of mean length; 0 if they are not counted."""
        return -(-(arrival.prompt_tokens + arrival.output_tokens // 2) // BLOCK_TOKENS) if self.blocks else 0

    def _has_room(self, arrival: Arrival) -> bool:
        """Return whether there are blocks for a row."""
        if self._row_blocks(arrival) > self.free_blocks:
            return False
        return self.prompts is None or self.prompts.has_room(arrival)

    def _compute(self) -> None:
        """Add a chunk of prompts that decode computes to the next step; a prompt that it completes has its first token
        after it. Without other rows a chunk is a pass of its own."""
        now, budget = self._events.now_ns, self._chunk_tokens
        if self._batch_runs:  # else the rows with new passages have ended
            budget -= self.batch.worker.appended
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
            if not self._batch_runs:
                prompt.left_ns = ns(seconds) + self.batch.step_ns()
                self._schedule_end(prompt, now)
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
        arrival = request.arrival
        request.row = self.batch.add_row(arrival.prompt_tokens, arrival.output_tokens, expired=request.ended)
        if request.row < 0:
            self._end(request)
        else:
            self._requests[request.row] = request

    # ---- rows

    def _between_runs(self, over: list[int]) -> None:
        """Process Python's part between two runs of steps; `over`: rows that have ended."""
        for row in over:
            self._end(self._requests[row])
        if self.offers or self._pulling or self._computing or self._computed:
            self._pull()
            self._compute()
        pending = bool(self.offers or self._pulling or self._computing or self._computed)
        self.batch.call_between_runs(pending)
        sliced = self._pulling and self._slice_ns
        self.batch.resume(1 if self._computing or self._computed or sliced else self.batch.most_steps)

    def expire(self, request: SimRequest) -> None:
        """End a request that is past its deadline."""
        if request.row >= 0:
            self.batch.expire(request.row)

    def _end(self, request: SimRequest) -> None:
        self._count_row_time()
        if self.prompts is not None:
            self.prompts.release(request)
        if request.row >= 0:
            del self._requests[request.row]
            request.stalled_ns = self.batch.free(request.row)
            request.row = -1
        self.rows -= 1
        self.free += 1
        self.free_blocks += self._row_blocks(request.arrival)
        self._finish(request)
        self._send_report()

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
        rows = self.rows + len(self._computing) + len(self._computed)
        report = Report(
            self.name,
            1,
            1,
            len(self.offers),
            rows,
            self.free,
            free_blocks=self.free_blocks,
            step_ns=self.batch.step_ns(),
        )
        self._report(report)
