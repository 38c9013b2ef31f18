"""Simulated prefill worker. Like `runtime.serving.prefill`: receive → retrieve → prefill → offer.

Its loop acts between two passes only, as the real one does: a request, its query's vector or its passages that arrive
during a pass are processed after the pass.
"""

from bisect import insort
from collections.abc import Callable
from functools import partial

from runtime.node.worker_config import PrefillSection
from runtime.serving.messages import Report
from runtime.serving.prefill.job import Disaggregation, virtual_deadline_ns
from runtime.simulator.kv.prompt_blocks import PromptBlocks
from runtime.simulator.stages.events import Events, ns
from runtime.simulator.stages.pool_tables import Gpu
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes

Submit = Callable[[int, int, Callable[[str], None]], int]  # (when, deadline, reply) → the number of a query


class SimPrefill:
    """A request queries the pool before it takes a KV slot, and keeps the slot until decode has pulled its KV."""

    def __init__(
        self,
        name: str,
        events: Events,
        times: ServiceTimes,
        limits: PrefillSection,
        gpu: Gpu,
        submit: Submit | None,
        offer: Callable[[SimRequest, Callable[[], None]], None],
        report: Callable[[Report], None],
        fail: Callable[[SimRequest, str], None],
        disaggregation: Disaggregation,
        prompts: PromptBlocks | None,
    ) -> None:
        self.name = name
        self._events, self._times, self._gpu = events, times, gpu
        self._submit, self._offer, self._report, self._fail = submit, offer, report, fail
        self._disaggregation = disaggregation
        self.prompts = prompts
        self._queued_tokens = 0  # tokens of prompts that wait or run
        self._embed_ns = ns(times.embed_s)  # per text
        self._embedded_ns = 0  # when the embedding thread, which processes one text at a time, is done
        self._arrived: list[SimRequest] = []
        self._answered: list[tuple[SimRequest, str]] = []
        self.retrieving = 0  # arrived and not waiting yet
        self.waiting: list[SimRequest] = []  # by descending virtual deadline
        self._running: list[SimRequest] = []
        self._chunk_tokens = limits.pass_tokens
        self.slots = self.free = limits.slots
        self._busy = False
        self._pass_end_ns = 0
        self._reported = (-1, -1)
        self.busy_ns = 0
        self.tokens = 0  # computed here
        self.arrived_tokens = self.decode_prompt_tokens = (
            0  # not known here: of all prompts, and of those that decode computes
        )

    def receive(self, request: SimRequest) -> None:
        self.retrieving += 1
        self._arrived.append(request)
        self._wake()

    def _wake(self) -> None:
        """Run the loop now, or after the pass in progress."""
        if not self._busy:
            self._run_loop()
        self._send_report()

    def _run_loop(self) -> None:
        """Process arrivals and answers between two passes, and start the next pass."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            for request in arrived:
                request.taken_ns = self._events.now_ns
                if self._submit is None:
                    self._enqueue(request)
                else:
                    self._embedded_ns = max(self._embedded_ns, self._events.now_ns) + self._embed_ns
                    self._events.at(self._embedded_ns, partial(self._send_query, request))
        if self._answered:
            answered, self._answered = self._answered, []
            for request, status in answered:
                if status == "ok" or request.ended:
                    self._enqueue(request)
                else:
                    self.retrieving -= 1
                    self._fail(request, status)
        self._start_pass()

    def _send_query(self, request: SimRequest) -> None:
        """Query the pool now, or after the pass in progress."""
        now = request.embedded_ns = self._events.now_ns
        assert self._submit is not None
        self._submit(max(self._pass_end_ns, now), request.deadline_ns, partial(self._reply, request))

    def _reply(self, request: SimRequest, status: str) -> None:
        self._answered.append((request, status))
        self._wake()

    def _enqueue(self, request: SimRequest) -> None:
        request.searched_ns = self._events.now_ns
        self.retrieving -= 1
        placement, tokens = request.placement, request.arrival.prompt_tokens
        own = tokens - self.prompts.cached_tokens(request.arrival) if self.prompts is not None else tokens
        self.arrived_tokens += own
        now_ns = self._events.now_ns
        if self._disaggregation.route_to_decode(
            now_ns, placement.decode, own, self._queued_tokens, placement.decode_load
        ):
            request.by_decode = True
            self.decode_prompt_tokens += own
            self._events.after(0, partial(self._offer, request, lambda: None))
            return
        self._queued_tokens += tokens
        request.virtual_deadline_ns = virtual_deadline_ns(request.received_ns, own, self._disaggregation.token_s)
        insort(self.waiting, request, key=lambda one: -one.virtual_deadline_ns)

    def _admit(self) -> bool:
        """Give slots and blocks to waiting prompts by virtual deadline. Return whether any was admitted."""
        admitted = False
        while self.free and self.waiting:
            request = self.waiting[-1]
            if not request.ended and self.prompts is not None and not self.prompts.has_room(request.arrival):
                break
            self.waiting.pop()
            if request.ended:
                self._queued_tokens -= request.arrival.prompt_tokens
                continue
            admitted = True
            self.free -= 1
            if self.prompts is not None:
                request.done_tokens = request.found_tokens = self.prompts.take(request)
                self._queued_tokens -= request.found_tokens
            request.begun_ns = self._events.now_ns
            self._running.append(request)
        return admitted

    def _start_pass(self) -> None:
        """Start a pass if there are prompts to compute."""
        admitted = self._admit()
        if admitted:
            self._running.sort(key=lambda one: one.virtual_deadline_ns)
        self._set_busy(bool(self._running))
        if not self._running:
            return
        budget, seconds = self._chunk_tokens, 0.0
        chunks: list[tuple[SimRequest, int]] = []
        for request in self._running:
            tokens = min(request.arrival.prompt_tokens - request.done_tokens, budget)
            if budget == 0:
                break
            chunks.append((request, tokens))
            seconds += self._times.prefill_s(request.done_tokens, tokens)
            budget -= tokens
        seconds += self._times.prefill_pass_s
        self._disaggregation.record_pass(self._chunk_tokens - budget, seconds)
        took, self._gpu.debt_ns = ns(seconds) + self._gpu.debt_ns, 0
        self.busy_ns += took
        self._pass_end_ns = self._events.now_ns + took
        self._events.after(took, partial(self._finish_pass, chunks))

    def _set_busy(self, busy: bool) -> None:
        self._busy = self._gpu.model_busy = busy

    def _finish_pass(self, chunks: list[tuple[SimRequest, int]]) -> None:
        for request, tokens in chunks:
            request.done_tokens += tokens
            request.last_pass_tokens = tokens
            self.tokens += tokens
            self._queued_tokens -= tokens
            if self.prompts is not None:
                self.prompts.fill(request, request.done_tokens)
            if request.ended:
                self._queued_tokens -= request.arrival.prompt_tokens - request.done_tokens
                self._running.remove(request)
                self._release(request)
            elif request.done_tokens == request.arrival.prompt_tokens:
                self._running.remove(request)
                request.prefilled_ns = self._events.now_ns
                self._offer(request, partial(self._pulled, request))
        self._run_loop()
        self._send_report()

    def _pulled(self, request: SimRequest) -> None:
        """Release a prompt that decode has pulled or rejected."""
        self._release(request)
        self._wake()

    def _release(self, request: SimRequest) -> None:
        self.free += 1
        if self.prompts is not None:
            self.prompts.release(request)

    @property
    def idle(self) -> bool:
        """Whether it has no work."""
        return not self.queued and self.free == self.slots

    @property
    def queued(self) -> int:
        return self.retrieving + len(self.waiting)

    def _send_report(self) -> None:
        state = self.retrieving + len(self.waiting), self.free
        if state != self._reported:
            self._reported = state
            free_blocks = self.prompts.available if self.prompts is not None else 0
            running = self.slots - self.free
            self._report(Report(self.name, 1, 1, state[0], running, self.free, free_blocks=free_blocks))
