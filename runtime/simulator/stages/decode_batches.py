"""The batches of all simulated decode workers: what compiled code does with their rows (`decode_core`), and when each
worker's own code is called."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from runtime.node.config import DecodeSection
from runtime.pool.tables import handle_of
from runtime.simulator.events import Events, ns
from runtime.simulator.stages import decode_core as core
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.stages.pool import Pools
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.workload import Workload

MOST_STEPS = 64  # in one run: contexts grow, and the time of a step with them
_PROBE_TIMEOUT_NS = 2_000_000_000  # as in runtime.serving.decode
_DRAWS = 1 << 12  # at a time


class Batches:
    """All decode workers' batches, and the pools that they ask: what happens beside `events`.

    `workers`: of each its GPU, the group of pools that it asks, and what draws whether a probe finds something.
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
        self._between: list[Callable[[list[int]], None]] = []
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
            drawn=np.zeros((count, _DRAWS + 2 * slots)),
            events=np.zeros((4 * (rows + 2 * count + 64), at.EVENT_WORDS), np.int64),
        )  # fmt: skip
        for column, value in {
            at.FREE_ROWS: rows,
            at.EVERY: workload.probe_every_tokens,
            at.ASKS: workload.retrieval,
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
        self._state.workers[:, at.RESTING] = 1
        self._state.workers[:, at.DRAWN] = self._state.drawn.shape[1]
        for worker, (gpu, group, _) in zip(self._state.workers, workers, strict=True):
            worker[at.GPU] = gpu.words.ctypes.data if gpu.slowdown > 1.0 else 0
            worker[at.GROUP] = group
        self.handle = handle_of(self._state)
        self._have_room()
        events.beside = self

    def add(self, between: Callable[[list[int]], None], most_tokens: int) -> "Batch":
        """The next worker's: `between` is called between two runs, with the rows that are over, whenever it has to be
        (see `Batch.calls`); it calls `go_on` in the end. A row holds `most_tokens` at most."""
        number = len(self._between)
        self._between.append(between)
        self._state.workers[number, at.MOST_TOKENS] = most_tokens
        return Batch(self._events, self._pools, self.handle, self._state, number, self._most_steps)

    @property
    def at_work(self) -> bool:
        """Whether a worker has a step under way."""
        return bool(self._state.workers[:, at.STEPS].any())

    def beside(self, prefills: int) -> None:
        """So many more (or fewer) prefill workers are at work: steps take longer beside them from the next on."""
        words = self._state.words
        before = words[at.PREFILLS]
        words[at.PREFILLS] += prefills
        if self._state.costs[at.BESIDE] > 1.0 and (before == 0) != (words[at.PREFILLS] == 0):
            for number, worker in enumerate(self._state.workers):
                if worker[at.STEPS] > 1:
                    core.poke(self.handle, number, self._events.now_ns)

    def run(self, until_ns: int, planned: int) -> bool:
        """See `Beside`."""
        why, now, what, status = core.run(self.handle, self._pools.handle, until_ns, planned)
        if why == core.NOTHING:
            return False
        if why == core.ROOM:
            self._have_room()
            return True
        self._events.now_ns = now
        self._events.happened += 1
        if why == core.ANSWERED:
            self._pools.reply(what, status)
        else:
            worker = self._state.workers[what]
            count = worker[at.LISTS + at.OVER]
            worker[at.LISTS + at.OVER] = 0
            self._between[what](self._state.lists[5 * what + at.OVER, :count].tolist() if count else [])
        return True

    def _have_room(self) -> None:
        """For what one event may ask, plan and draw."""
        self._pools.have_room(self._slots)
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
    """One decode worker's: rows, which advance step by step together. See `decode_core` for what they do."""

    def __init__(
        self, events: Events, pools: Pools, handle: Any, state: at.State, number: int, most_steps: int
    ) -> None:
        self._events, self._pools, self._handle, self._number = events, pools, handle, number
        self.most_steps = most_steps  # in one run
        self._worker, self._rows, self._extra_s = state.workers[number], state.rows, state.extra_s

    def calls(self, always: bool) -> None:
        """Whether `between` is to be called between every two runs, not only when rows are over."""
        self._worker[at.PYTHON] = always

    def arrive(self, prompt: int, output: int, *, expired: bool, holds: bool) -> int:
        """A prompt's KV is here, and the first token; its row, or -1 if it is over. holds: it has KV blocks."""
        row: int = core.arrive(self._handle, self._number, prompt, output, expired, holds, self._events.now_ns)
        return row

    def expire(self, row: int) -> None:
        """Nobody waits for the row any more: it is over when it would go on."""
        self._rows[row, at.EXPIRED] = 1

    def free(self, row: int) -> int:
        """A row is over; how long its probes have held it up, in ns."""
        core.free(self._handle, row)
        return int(self._rows[row, at.WAITED])

    def poke(self) -> None:
        """Something has changed: have `between` called as soon as the step under way ends."""
        core.poke(self._handle, self._number, self._events.now_ns)

    def go_on(self, most: int) -> None:
        """The next run, of `most` steps at most. Only between two."""
        core.go_on(self._handle, self._pools.handle, self._number, self._events.now_ns, most)

    def take_in(self) -> None:
        """Let who is to join the batch join it, before `go_on`."""
        core.join_all(self._handle, self._number)

    def boundary_ns(self) -> int:
        """When the step under way ends: now, if there is none."""
        when: int = core.boundary_ns(self._handle, self._number, self._events.now_ns)
        return when

    def step_ns(self) -> int:
        """The next step's time, but for contexts of who is to join."""
        took: int = core.time_of_step(self._handle, self._number, len(self) + self.joining)
        return took

    def lengthen(self, seconds: float) -> None:
        """The next step takes so much longer."""
        self._extra_s[self._number] += seconds

    @property
    def appended(self) -> int:
        """Tokens of passages that go through the model with the next step."""
        return int(self._worker[at.APPENDED])

    def __len__(self) -> int:
        return int(self._worker[at.LISTS + at.MEMBERS])

    @property
    def joining(self) -> int:
        """How many rows are to join it."""
        return int(self._worker[at.LISTS + at.JOINING])

    # ---- a row's KV blocks

    def has(self, row: int) -> bool:
        """Whether a row (-1: none) is in the batch."""
        return row >= 0 and bool(self._rows[row, at.ENDS] >= 0)

    def context(self, row: int) -> int:
        """The tokens that a row holds; of one in the batch as of when it joined."""
        return int(self._rows[row, at.ROW_CONTEXT])

    def context_after(self, row: int, steps: int) -> int:
        """The tokens that a row of the batch will hold so many steps on."""
        one = self._rows[row]
        left = one[at.ENDS] - self._worker[at.TAKEN]
        return int(one[at.ROW_CONTEXT] + one[at.ROW_STEPS] - left + min(steps, left))

    def make_room(self, row: int) -> None:
        """A row loses its KV blocks; if it is in the batch, it leaves it until it has others."""
        core.make_room(self._handle, row)

    def is_out(self, row: int) -> bool:
        """Whether a row (-1: none) waits for KV blocks."""
        return row >= 0 and bool(self._rows[row, at.OUT])

    @property
    def out(self) -> int:
        """Rows that wait for KV blocks."""
        return int(self._worker[at.OUT_ROWS])

    def bring_back(self, row: int, *, over: bool) -> None:
        """A row that waits for blocks has some, and joins the batch, unless it is over."""
        core.bring_back(self._handle, row, over)

    # ---- what it has counted

    @property
    def busy_ns(self) -> int:
        return int(self._worker[at.BUSY])

    @property
    def steps(self) -> int:
        """That it has taken, in runs that are over."""
        return int(self._worker[at.TAKEN])

    @property
    def tokens(self) -> int:
        return int(self._worker[at.TOKENS])

    @property
    def probes(self) -> int:
        return int(self._worker[at.PROBES])

    @property
    def stalled(self) -> int:
        """Rows that wait for a probe's answer."""
        return int(self._worker[at.STALLED])

    @property
    def stall_ns(self) -> int:
        """The time of stalled rows, up to now."""
        core.count(self._handle, self._number, self._events.now_ns)
        return int(self._worker[at.STALL_NS])
