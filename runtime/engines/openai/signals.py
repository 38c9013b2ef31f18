"""What the control loop and the planner read about the engine, written into the frontend's table.

A *row* is an answer from its first token to its end; it stalls while it waits for the passages of its own probe, not
while a server computes them. These are the metrics that the node's own decode and prefill workers write of themselves.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar, get_args

from runtime.engines.openai.load_balancer import LoadBalancer
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import FrontendMetrics, Stage
from runtime.serving.frontend.requests import Relayed

Result = TypeVar("Result")


class EngineSignals:
    """Counters of all answers. `clock` returns monotonic ns; without a table nothing is written."""

    def __init__(self, balancer: LoadBalancer, clock: Callable[[], int], table: WorkerTable | None = None) -> None:
        self._balancer, self._clock, self._table = balancer, clock, table
        self._rows = self._stalled = 0
        self._row_ns = self._stall_ns = 0
        self._counted_to_ns = clock()
        self.tokens = self.retries = 0

    def change(self, rows: int = 0, stalled: int = 0) -> None:
        """Count the time so far; from now on there are so many rows, and stalled ones, more."""
        now_ns = self._clock()
        self._row_ns += self._rows * (now_ns - self._counted_to_ns)
        self._stall_ns += self._stalled * (now_ns - self._counted_to_ns)
        self._counted_to_ns = now_ns
        self._rows += rows
        self._stalled += stalled

    def count_prompt(self, by: Stage, tokens: int, seconds: float = 0.0) -> None:
        """Count a prompt of which servers of a role computed `tokens` tokens, those of prefill in `seconds`."""
        if self._table is not None:
            self._table.add(FrontendMetrics.PROMPTS[by])
            self._table.add(FrontendMetrics.NEW_TOKENS[by], tokens)
            self._table.add(FrontendMetrics.PASS_SECONDS, seconds)

    def write(self) -> None:
        """Write the table, as of now."""
        self.change()
        if (table := self._table) is None:
            return
        table.total(FrontendMetrics.ROW_SECONDS, self._row_ns / 1e9)
        table.total(FrontendMetrics.STALL_SECONDS, self._stall_ns / 1e9)
        table.total(FrontendMetrics.GENERATION_TOKENS, self.tokens)
        table.total(FrontendMetrics.LINK_BUSY_SECONDS, self._balancer.link_busy_s)
        table.set(FrontendMetrics.KV_LINKS, self._balancer.links)
        for role in get_args(Stage):
            backends = [backend for backend in self._balancer.up if backend.server.stage == role]
            table.set(FrontendMetrics.SERVERS[role], len(backends))
            waiting = sum(backend.reported.waiting for backend in backends if backend.reported)
            table.set(FrontendMetrics.SERVERS_WAITING[role], waiting)


class Row:
    """One answer's part of the signals."""

    def __init__(self, signals: EngineSignals) -> None:
        self._signals = signals
        self._tokens = self._begun = self._stalled = 0

    def counting(self, emit: Callable[[Relayed], object]) -> Callable[[Relayed], None]:
        """Return `emit`, with each piece counted: the first one begins the row."""

        def counted(piece: Relayed) -> None:
            self._signals.tokens += max(piece.completion_tokens - self._tokens, 0)
            self._tokens = max(piece.completion_tokens, self._tokens)
            self._set(1, 0)
            emit(piece)

        return counted

    async def stall(self, wait: Awaitable[Result]) -> Result:
        """Wait while the answer does."""
        self._set(1, 1)
        try:
            return await wait
        finally:
            self._set(1, 0)

    def end(self) -> None:
        """The answer has ended."""
        self._set(0, 0)

    def _set(self, begun: int, stalled: int) -> None:
        if (begun, stalled) != (self._begun, self._stalled):
            self._signals.change(begun - self._begun, stalled - self._stalled)
            self._begun, self._stalled = begun, stalled
