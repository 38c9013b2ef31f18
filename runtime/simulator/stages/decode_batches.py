"""Batches of all simulated decode workers: runs the compiled events (`decode_core`) and calls each worker's Python
code."""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from ipc.native.records import address_of, array_from, array_over, new_array
from runtime.node.worker_config import DecodeSection
from runtime.simulator.stages import decode_core as core
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages import step_batch as batch
from runtime.simulator.stages.events import Events, ns
from runtime.simulator.stages.pool import Pools
from runtime.simulator.stages.pool_tables import Gpu
from runtime.simulator.stages.schedule import BETWEEN_STEPS, OUT_OF_CAPACITY
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.workload import Workload

MOST_STEPS = 64  # in one run, since the time of a step grows with the contexts
_PROBE_TIMEOUT_NS = 2_000_000_000  # as in runtime.serving.decode
_RANDOM_BATCH = 1 << 12  # drawn at a time
_LISTS = ("members", "joining", "probing", "answered", "finished")


class Batches:
    """Batches of all decode workers, and the pools that they query.

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
        self._drawn = np.zeros((count, _RANDOM_BATCH + 2 * slots))
        self._state = at.State(
            schedule=events.schedule,
            costs=at.Costs(
                step_ns=times.decode_step_s * 1e9,
                row_ns=times.decode_row_s * 1e9,
                context_token_ns=times.decode_context_s * 1e9,
                chunk_token_s=times.prefill_token_s,
                chunk_behind_s=times.prefill_behind_s,
                chunk_pair_s=times.prefill_pair_s,
            ),
            worker_count=count,
            workers=new_array(at.Worker, count),
            slots=slots,
            rows=new_array(at.Row, rows),
            free_count=rows,
            free=array_over(int, np.arange(rows, dtype=np.int64)[::-1].copy()),
            drawn_count=self._drawn.shape[1],
            probe_interval=workload.probe_every_tokens,
            probes_enabled=workload.retrieval,
            probe_hit=workload.probe_hit,
            probe_tokens=workload.probe_tokens,
            top_m=pools.top_m,
            most_steps=most_steps,
            embed_ns=ns(times.embed_s),
            timeout_ns=_PROBE_TIMEOUT_NS,
        )
        self._workers = [
            at.Worker(
                number=number,
                end_ns=-1,
                idle=True,
                group=group,
                drawn=array_over(float, self._drawn[number]),
                drawn_used=self._state.drawn_count,
                **{name: at.RowList(rows=new_array(int, slots)) for name in _LISTS},
            )
            for number, (_, group, _) in enumerate(workers)
        ]  # own the arrays
        for number, (gpu, _, _) in enumerate(workers):
            self._state.workers[number] = self._workers[number]
            if gpu.slowdown > 1.0:
                self._state.workers[number].gpu = array_from(Gpu, address_of(gpu))
        self.handle = address_of(self._state)
        self._ensure_capacity()
        events.decodes = self.handle
        events.handlers[BETWEEN_STEPS] = self._between_runs
        events.handlers[OUT_OF_CAPACITY] = lambda subject, status: self._ensure_capacity()
        events.ensure_capacity(2 * (rows + 2 * count + 64))

    def add(self, between: Callable[[list[int]], None]) -> "Batch":
        """Create the batch of the next worker. `between` is called between two runs with the rows that have ended, when
        necessary (see `Batch.call_between_runs`), and calls `resume` at its end."""
        number = len(self._callbacks)
        self._callbacks.append(between)
        return Batch(self._events, self._pools, self.handle, self._state, number, self._most_steps)

    def _between_runs(self, worker: int, _: int) -> None:
        finished = self._state.workers[worker].finished
        rows = [finished.rows[i] for i in range(finished.count)]
        finished.count = 0
        self._callbacks[worker](rows)

    def _ensure_capacity(self) -> None:
        """Provide capacity for the events, queries and random numbers of one event."""
        state = self._state
        self._pools.ensure_capacity(state.slots)
        for number, (drawn, random) in enumerate(zip(self._drawn, self._randoms, strict=True)):
            used = state.workers[number].drawn_used
            if used + state.slots > len(drawn):
                drawn[: len(drawn) - used] = drawn[used:].copy()
                drawn[len(drawn) - used :] = [random.random() for _ in range(used)]
                state.workers[number].drawn_used = 0


class Batch:
    """The batch of one decode worker, with its counters. `decode_core` implements its rows."""

    def __init__(
        self, events: Events, pools: Pools, handle: int, state: at.State, number: int, most_steps: int
    ) -> None:
        self._events, self._pools, self._handle, self._number = events, pools, handle, number
        self.most_steps = most_steps  # in one run
        self.worker, self._rows = state.workers[number], state.rows

    def call_between_runs(self, always: bool) -> None:
        """Set whether `between` is called between every two runs, not only when rows have ended."""
        self.worker.callback = always

    def add_row(self, prompt: int, output: int, *, expired: bool) -> int:
        """Add a row with its KV and first token. Return the row, or -1 if it has ended."""
        return core.add_row(self._handle, self._number, prompt, output, expired, self._events.now_ns)

    def expire(self, row: int) -> None:
        """Mark a row as expired: it ends at its next step."""
        self._rows[row].expired = True

    def free(self, row: int) -> int:
        """Free a row that has ended. Return its stall time in ns."""
        core.free(self._handle, row)
        return self._rows[row].stall_ns

    def interrupt(self) -> None:
        """End the current run with the step in progress, so that `between` is called."""
        batch.interrupt(self._handle, self._number)

    def resume(self, most: int) -> None:
        """Start the next run of at most `most` steps. Only between runs."""
        core.resume(self._handle, self._pools.handle, self._number, self._events.now_ns, most)

    def boundary_ns(self) -> int:
        """Return the end of the step in progress; now without one."""
        return batch.boundary_ns(self._handle, self._number)

    def step_ns(self) -> int:
        """Return the time of the next step, without the contexts of pending rows."""
        return core.step_ns(self._handle, self._number, len(self) + self.joining)

    def delay_next_step(self, seconds: float) -> None:
        """Add time to the next step."""
        self.worker.extra_s += seconds

    def __len__(self) -> int:
        return self.worker.members.count

    @property
    def joining(self) -> int:
        """Number of pending rows."""
        return self.worker.joining.count

    @property
    def stall_ns(self) -> int:
        """Total time of stalled rows up to now."""
        worker = self.worker
        return worker.stall_ns + worker.stalled * (self._events.now_ns - worker.counted_ns)
