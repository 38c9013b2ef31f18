"""Batches of all simulated decode workers: runs the compiled events (`decode_core`) and calls each worker's Python
code."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from ipc.native.records import address_of
from runtime.node.config import DecodeSection
from runtime.simulator.events import Events, ns
from runtime.simulator.stages import decode_core as core
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.stages.pool import Pools
from runtime.simulator.stages.pool_core import handle_of
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.workload import Workload

MOST_STEPS = 64  # in one run, since the time of a step grows with the contexts
_PROBE_TIMEOUT_NS = 2_000_000_000  # as in runtime.serving.decode
_RANDOM_BATCH = 1 << 12  # drawn at a time


class Batches:
    """Batches of all decode workers, and the pools that they query: an `EventSource`.

    `workers`: for each its GPU, its group of pools, and the random generator of probe hits.
    """

    def __init__(
        self,
        events: Events,
        times: ServiceTimes,
        limits: DecodeSection,
        workload: Workload,
        pools: Pools,
        workers: Sequence[tuple[Gpu, int, Random]],
        most_steps: int = MOST_STEPS,
    ) -> None:
        self._events, self._pools, self._most_steps = events, pools, most_steps
        self._randoms = [random for _, _, random in workers]
        self._callbacks: list[Callable[[list[int]], None]] = []
        count, slots = len(workers), limits.slots
        rows = count * slots
        self._state = at.State(
            clock=np.frombuffer(events.clock, np.int64),
            words=np.zeros(at.WORDS, np.int64),
            costs=np.array(
                [
                    times.decode_step_s * 1e9, times.decode_row_s * 1e9, times.decode_context_s * 1e9,
                    times.prefill_token_s, times.prefill_behind_s, times.prefill_pair_s, workload.probe_hit,
                    times.embed_core_s, times.probe_s, times.decode_beside,
                ]
            ),
            workers=np.zeros((count, at.WORKER_WORDS), np.int64),
            extra_s=np.zeros(count),
            lists=np.zeros((5 * count, slots), np.int64),
            rows=np.zeros((rows, at.ROW_WORDS), np.int64),
            free=np.arange(rows, dtype=np.int64)[::-1].copy(),
            drawn=np.zeros((count, _RANDOM_BATCH + 2 * slots)),
            events=np.zeros((4 * (rows + 2 * count + 64), at.EVENT_WORDS), np.int64),
        )  # fmt: skip
        for column, value in {
            at.FREE_ROWS: rows,
            at.PROBE_INTERVAL: workload.probe_every_tokens,
            at.PROBES_ENABLED: workload.retrieval,
            at.MOST_STEPS: most_steps,
            at.PROBE_TOKENS: limits.probe_tokens,
            at.TOP_M: pools.top_m,
            at.EMBED_NS: ns(times.embed_s),
            at.WAIT_NS: ns(times.probe_wait_s),
            at.TIMEOUT_NS: _PROBE_TIMEOUT_NS,
        }.items():
            self._state.words[column] = value
        self._slots = slots
        self._state.workers[:, [at.DUE_FIRST, at.DUE_LAST, at.END]] = -1
        self._state.workers[:, at.IDLE] = 1
        self._state.workers[:, at.DRAWN] = self._state.drawn.shape[1]
        for worker, (gpu, group, _) in zip(self._state.workers, workers, strict=True):
            worker[at.GPU] = address_of(gpu.share) if gpu.slowdown > 1.0 else 0
            worker[at.GROUP] = group
        self.handle = handle_of(self._state)
        self._ensure_capacity()
        events.source = self

    def add(self, between: Callable[[list[int]], None], most_tokens: int) -> "Batch":
        """Create the batch of the next worker. `between` is called between two runs with the rows that have ended, when
        necessary (see `Batch.call_between_runs`), and calls `resume` at its end. A row has at most `most_tokens`."""
        number = len(self._callbacks)
        self._callbacks.append(between)
        self._state.workers[number, at.MOST_TOKENS] = most_tokens
        return Batch(self._events, self._pools, self.handle, self._state, number, self._most_steps)

    @property
    def at_work(self) -> bool:
        """Whether a worker has a step in progress."""
        return bool(self._state.workers[:, at.STEPS].any())

    def add_busy_prefills(self, prefills: int) -> None:
        """Change the number of busy prefill workers, which slow down later steps."""
        words = self._state.words
        before = words[at.PREFILLS]
        words[at.PREFILLS] += prefills
        if self._state.costs[at.BUSY_FACTOR] > 1.0 and (before == 0) != (words[at.PREFILLS] == 0):
            for number, worker in enumerate(self._state.workers):
                if worker[at.STEPS] > 1:
                    core.interrupt(self.handle, number, self._events.now_ns)

    def run(self, until_ns: int, planned: int) -> bool:
        """See `EventSource`."""
        reason, now, what, status = core.run(self.handle, self._pools.handle, until_ns, planned)
        if reason == core.NO_EVENT:
            return False
        if reason == core.OUT_OF_CAPACITY:
            self._ensure_capacity()
            return True
        self._events.now_ns = now
        self._events.processed += 1
        if reason == core.QUERY_ANSWERED:
            self._pools.reply(what, status)
        else:
            worker = self._state.workers[what]
            count = worker[at.LISTS + at.FINISHED]
            worker[at.LISTS + at.FINISHED] = 0
            self._callbacks[what](self._state.lists[5 * what + at.FINISHED, :count].tolist() if count else [])
        return True

    def _ensure_capacity(self) -> None:
        """Provide capacity for the queries, events and random numbers of one event."""
        self._pools.ensure_capacity(self._slots)
        state = self._state
        if state.words[at.EVENTS] > len(state.events) // 2:
            more = np.zeros_like(state.events)
            self._state = state._replace(events=np.concatenate([state.events, more]))
            self.handle[:] = handle_of(self._state)
        for worker, drawn, random in zip(state.workers, state.drawn, self._randoms, strict=True):
            used = int(worker[at.DRAWN])
            if used + self._slots > len(drawn):
                drawn[: len(drawn) - used] = drawn[used:].copy()
                drawn[len(drawn) - used :] = [random.random() for _ in range(used)]
                worker[at.DRAWN] = 0


class Batch:
    """The batch of one decode worker. `decode_core` implements its rows."""

    def __init__(
        self, events: Events, pools: Pools, handle: Any, state: at.State, number: int, most_steps: int
    ) -> None:
        self._events, self._pools, self._handle, self._number = events, pools, handle, number
        self.most_steps = most_steps  # in one run
        self._worker, self._rows, self._extra_s = state.workers[number], state.rows, state.extra_s

    def call_between_runs(self, always: bool) -> None:
        """Set whether `between` is called between every two runs, not only when rows have ended."""
        self._worker[at.CALLBACK] = always

    def add_row(self, prompt: int, output: int, *, expired: bool, holds: bool) -> int:
        """Add a row with its KV and first token. Return the row, or -1 if it has ended. `holds`: it has KV blocks."""
        row: int = core.add_row(self._handle, self._number, prompt, output, expired, holds, self._events.now_ns)
        return row

    def expire(self, row: int) -> None:
        """Mark a row as expired: it ends at its next step."""
        self._rows[row, at.EXPIRED] = 1

    def free(self, row: int) -> int:
        """Free a row that has ended. Return its stall time in ns."""
        core.free(self._handle, row)
        return int(self._rows[row, at.STALL])

    def interrupt(self) -> None:
        """End the current run with the step in progress, so that `between` is called."""
        core.interrupt(self._handle, self._number, self._events.now_ns)

    def resume(self, most: int) -> None:
        """Start the next run of at most `most` steps. Only between runs."""
        core.resume(self._handle, self._pools.handle, self._number, self._events.now_ns, most)

    def join_pending(self) -> None:
        """Let pending rows join the batch, before `resume`."""
        core.join_pending(self._handle, self._number)

    def boundary_ns(self) -> int:
        """Return the end of the step in progress; now without one."""
        when: int = core.boundary_ns(self._handle, self._number, self._events.now_ns)
        return when

    def step_ns(self) -> int:
        """Return the time of the next step, without the contexts of pending rows."""
        step_ns: int = core.next_step_ns(self._handle, self._number, len(self) + self.joining)
        return step_ns

    def delay_next_step(self, seconds: float) -> None:
        """Add time to the next step."""
        self._extra_s[self._number] += seconds

    @property
    def appended(self) -> int:
        """Passage tokens in the next step."""
        return int(self._worker[at.APPENDED])

    def __len__(self) -> int:
        return int(self._worker[at.LISTS + at.MEMBERS])

    @property
    def joining(self) -> int:
        """Number of pending rows."""
        return int(self._worker[at.LISTS + at.JOINING])

    # ---- a row's KV blocks

    def contains(self, row: int) -> bool:
        """Return whether a row (-1: none) is in the batch."""
        return row >= 0 and bool(self._rows[row, at.ENDS] >= 0)

    def context(self, row: int) -> int:
        """Return the tokens of a row; for one in the batch, as of when it joined."""
        return int(self._rows[row, at.ROW_CONTEXT])

    def context_after(self, row: int, steps: int) -> int:
        """Return the tokens that a row of the batch will have after `steps` more steps."""
        one = self._rows[row]
        left = one[at.ENDS] - self._worker[at.TAKEN]
        return int(one[at.ROW_CONTEXT] + one[at.ROW_STEPS] - left + min(steps, left))

    def preempt(self, row: int) -> None:
        """Remove a row's KV blocks; it leaves the batch until it has blocks again."""
        core.preempt(self._handle, row)

    def is_preempted(self, row: int) -> bool:
        """Return whether a row (-1: none) is preempted."""
        return row >= 0 and bool(self._rows[row, at.PREEMPTED])

    @property
    def preempted(self) -> int:
        """Number of preempted rows."""
        return int(self._worker[at.PREEMPTED_ROWS])

    def restore(self, row: int, *, over: bool) -> None:
        """Return blocks to a preempted row; it joins the batch unless it has ended (`over`)."""
        core.restore(self._handle, row, over)

    # ---- counters

    @property
    def busy_ns(self) -> int:
        return int(self._worker[at.BUSY])

    @property
    def steps(self) -> int:
        """Steps of finished runs."""
        return int(self._worker[at.TAKEN])

    @property
    def tokens(self) -> int:
        return int(self._worker[at.TOKENS])

    @property
    def probes(self) -> int:
        return int(self._worker[at.PROBES])

    @property
    def stalled(self) -> int:
        """Number of rows that wait for a probe."""
        return int(self._worker[at.STALLED])

    @property
    def stall_ns(self) -> int:
        """Total time of stalled rows up to now."""
        core.update_stall_time(self._handle, self._number, self._events.now_ns)
        return int(self._worker[at.STALL_NS])
