"""The compiled loop's memory, made once; its turns, and what Python asks of the loop and its policy.

A turn is rounds of the loop, and sleeps between them, until only Python can go on:

    rounds ──▶ nothing to do ──▶ spin ──▶ sleep ──▶ a client rings ──▶ rounds …
      └─ every 10 ms: does a session message wait, or has a client died?

So a pool that queries wake, however often, enters Python no oftener than one that is busy.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.engine import Backend
from ipc import SessionServer
from ipc.memory import instructions
from ipc.memory.instructions import words
from ipc.ring import exchange
from ipc.ring.doorbell import SpinBudget, learn_wait, spin_ns
from runtime.errors import Overloaded, TrinityError
from runtime.node.metrics.table import WorkerTable
from runtime.pool import loop_words as of
from runtime.pool import tables as at
from runtime.pool.collections.scopes import InUse, Scopes
from runtime.pool.compiled import compiled
from runtime.pool.loop import forget_client, run_loop, take_in
from runtime.pool.policy import held_until
from runtime.pool.settings import Policy
from runtime.pool.sizing import Measured
from runtime.pool.tables import handle_of, learn_cost, new_tables, tables_at

_LOOK_NS = 50_000  # how often vectors are looked for that are on their way out of the arena
_LEARNT = 8  # times that a calibration is learnt: as much as so many extends
_ROWS = 4096  # of clients, at most, that are to be evicted at a time

CALLED = of.NEW_FILTER + 1
"""Why `turn` returned, beside why `run_loop` does: the server's descriptor is readable, and not for a query."""

# Words of a rest. DESCRIPTOR: readable when the server is wanted. BELL: the eventfd that clients ring, a part of what
# makes it readable. BUDGET: address of the spin budget.
(DESCRIPTOR, BELL, BUDGET) = range(3)
_HOUSEKEEPING_NS = 10_000_000  # how often session messages and clients that have died are looked for
_MS = 1_000_000


class PoolLoop:
    """One pool's loop over a server's desk, an engine and a worker's table. All three must outlive it.

    max_dim: of the longest vector; max_width: a query's widest search; spin_ns: how long it looks at the rings at most
    before it sleeps; clock: the address of a word with the time in ns, 0 for the machine's own; scopes: what filters
    stand for, none without.
    """

    def __init__(
        self,
        policy: Policy,
        server: SessionServer,
        backend: Backend,
        table: WorkerTable,
        *,
        max_dim: int,
        max_width: int,
        spin_ns: int = 0,
        clock: int = 0,
        scopes: Scopes | None = None,
    ) -> None:
        self.tables = new_tables(policy)
        self._server, self._backend, self._scopes = server, backend, scopes or Scopes()
        self._handle = handle_of(self.tables)
        entries, slots = len(self.tables.entries), int(self.tables.words[at.ENGINE_SLOTS])
        edges = [np.array(table.edges(histogram)) for histogram in of.HISTOGRAMS]
        scratch = [np.zeros(count, np.int64) for count in (2 + 2 * slots, slots, _ROWS, 2 * slots)]
        self._edges, self._scratch = edges, scratch
        self._vectors = np.zeros((0, 0), np.float32)
        self._spin = SpinBudget(spin_ns)
        self._rest = np.array([server.fileno(), server.bell_fileno, self._spin.address], np.int64)
        self.words = np.zeros(of.LOOP_WORDS, np.int64)
        self.words[of.DESK] = server.desk.address
        self.words[of.ADMIT : of.HANDLE + 1] = backend[:5]
        self.words[of.CLOCK], self.words[of.MAX_WIDTH] = clock, max_width
        self.words[of.RESTRICT], self.words[of.SCOPES] = backend.set_filter, self._scopes.address
        self.words[of.HURRY] = backend.prioritize
        for word, array in zip((of.REPORT, of.OWNERS, of.EVICTED, of.STATIC_DONE), scratch, strict=True):
            self.words[word] = array.ctypes.data
        for number, counter in enumerate(of.COUNTERS):
            self.words[of.METRICS + number] = table.address(counter)
        for number, (histogram, edge) in enumerate(zip(of.HISTOGRAMS, edges, strict=True)):
            place = of.METRICS + len(of.COUNTERS) + 3 * number
            self.words[place : place + 3] = table.address(histogram), edge.ctypes.data, len(edge)
        self._entries = entries
        most_k = int(server.desk.words[exchange.MAX_K])
        # As large as results can be, but memory is only what queries over several parts touch.
        self._held, self._spare = np.zeros((entries, most_k, 3), np.int32), np.zeros((2, most_k, 3), np.int32)
        self.words[of.HELD], self.words[of.SPARE] = self._held.ctypes.data, self._spare.ctypes.data
        self.words[of.HELD_BYTES] = self._held.strides[0]
        self.make_room(max_dim)

    def make_room(self, max_dim: int) -> None:
        """Let vectors be as long as this. What waits keeps its vector."""
        stride = -(-max_dim // 16) * 16
        if stride <= self._vectors.shape[1]:
            return
        vectors = np.zeros((self._entries, stride), np.float32)
        if self._vectors.size:
            vectors[:, : self._vectors.shape[1]] = self._vectors
        self._vectors = vectors
        self.words[of.VECTORS], self.words[of.VECTOR_BYTES] = vectors.ctypes.data, vectors.strides[0]

    # ---- state

    @property
    def waiting(self) -> tuple[int, int]:
        """Queries of prefill and of decode that wait for a slot."""
        prefill, decode = self.tables.words[at.QUEUED : at.QUEUED + 2].tolist()
        return prefill, decode

    @property
    def active(self) -> int:
        """Queries in the next extend."""
        return int(self.tables.words[at.LISTED : at.LISTED + 2].sum())

    @property
    def paused(self) -> int:
        return int(self.tables.words[at.LISTED + at.HELD_BACK])

    @property
    def busy(self) -> bool:
        """Whether a query is in the pool."""
        return bool(self.tables.words[at.FREE_ENTRIES] < self._entries)

    @property
    def padded(self) -> int:
        """Slots beyond the active ones that the last extend covered."""
        return int(self.words[of.PADDED])

    def set_knobs(self, reserve: float, flush_prefill_ns: int) -> None:
        """Set r and τ_pre."""
        self.tables.floats[at.RESERVE] = reserve
        self.tables.words[at.FLUSH_PREFILL_NS] = flush_prefill_ns

    def learn(self, measured: Sequence[Measured]) -> None:
        """What extends cost, as it was measured."""
        for _ in range(_LEARNT):
            for one in measured:
                self.learn_one(one.active, one.extend_ns)

    def learn_one(self, active: int, extend_ns: float) -> None:
        """An extend of so many took so long."""
        _learn_cost(self._handle, float(active), float(extend_ns))

    def compile(self) -> None:
        """Have everything compiled: that belongs to the start, and not to a user's query."""
        self.run(0, 0)
        turn(self.words, self._handle, np.array([-1, -1, self._spin.address], np.int64), 0)
        forget_client(self.words, self._handle, -1)
        _take_in.compile("void(int64[::1], int64[:, ::1], float32[::1], int64)")

    # ---- running

    def run(self, until_ns: int, spin_ns: int) -> int:
        """Go round until then, at most; see `run_loop`. Takes care of all but IDLE and TIME, which it returns.

        Raises what the engine raises when it fails.
        """
        self.forget_gone()
        if self._server.reading:
            self._take_arrived()
            until_ns = min(until_ns, time.monotonic_ns() + _LOOK_NS)
        return self._go_on(int(run_loop(self.words, self._handle, until_ns, spin_ns)), until_ns, spin_ns)

    def serve(self, until_ns: int) -> int:
        """`run` until then, asleep while there is nothing to do; see `turn`. Returns TIME, IDLE or CALLED."""
        self.forget_gone()
        if self._server.reading:
            return self.run(until_ns, self._spin.ns)
        return self._go_on(int(turn(self.words, self._handle, self._rest, until_ns)), until_ns, self._spin.ns)

    def _go_on(self, stopped: int, until_ns: int, spin_ns: int) -> int:
        """After what stopped the loop."""
        while True:
            if stopped == of.IN_ARENA:
                self._server.take_from_arena()
                self.forget_gone()
                until_ns, spin_ns = min(until_ns, time.monotonic_ns() + _LOOK_NS), 0  # the rest goes on meanwhile
            elif stopped == of.TO_EVICT:
                self._evict()
            elif stopped == of.NEW_FILTER:
                self._look_at_filter()
            elif stopped == of.ENGINE_FAILED:
                self._backend.check()
                raise RuntimeError("the engine has failed and does not say why")
            elif not (self._server.reading and self._take_arrived()):
                self._server.desk.ring_bells()
                return stopped
            stopped = int(run_loop(self.words, self._handle, until_ns, spin_ns))

    def _look_at_filter(self) -> None:
        """The request found has a filter that is not known by number yet."""
        wanted = self._server.filter_of_request()
        if wanted is None:
            self.forget_gone()
            return
        try:
            number, gone = self._scopes.number_of(
                int(self._server.desk.words[exchange.NUMBER]), wanted, self.parts_in_use()
            )
        except TrinityError as error:
            self._server.refuse("overloaded" if isinstance(error, Overloaded) else "invalid_request")
            self.forget_gone()
            return
        self.forget_scopes(gone)
        self._server.know_filter(number)

    def forget_scopes(self, gone: Iterable[int]) -> None:
        """Clients' filters are looked at anew that were known by these numbers."""
        for number in gone:
            self._server.forget_filter(number)

    def parts_in_use(self) -> InUse:
        """Whether queries in the pool search the parts of a scope at an address."""
        if self._server.reading:  # queries whose vectors are on their way have no entries yet
            return lambda _: True
        used = self.tables.entries[:, at.STATE] != at.FREE
        return set(self.tables.entries[used, of.PARTS].tolist()).__contains__

    def _take_arrived(self) -> bool:
        """What was asked with vectors in the arena that are out of it by now. Whether there was any."""
        any_came = False
        for vector in self._server.arrived():
            _take_in(self.words, self._handle, vector, time.monotonic_ns())
            any_came = True
        self.forget_gone()
        return any_came

    def _evict(self) -> None:
        count = int(self.words[of.EVICT])
        self.words[of.EVICT] = 0
        for row in self._scratch[2][:count].tolist():
            self._server.evict(row)
        self.forget_gone()

    def forget_gone(self) -> int:
        """Drop what clients have asked that are gone; how many queries that were. After each housekeeping."""
        desk = self._server.desk
        if not desk.vacant:
            return 0
        return sum(int(forget_client(self.words, self._handle, row)) for row in desk.take_vacated())


@compiled
def _take_in(
    loop: npt.NDArray[np.int64], handle: npt.NDArray[np.int64], vector: npt.NDArray[np.float32], now: int
) -> None:
    desk = words(loop[of.DESK], exchange.DESK_WORDS)
    take_in(loop, tables_at(handle), desk, vector.ctypes.data, now)


@compiled
def _learn_cost(handle: npt.NDArray[np.int64], active: float, took_ns: float) -> None:
    learn_cost(tables_at(handle), active, took_ns)


@compiled
def turn(loop: Any, handle: Any, rest: Any, until: int) -> Any:
    """Serve until `until`, or until Python is needed for something else; it sleeps at least once before it is IDLE.

    A query that ends a sleep is answered first, if that takes no longer than 1 ms.
    """
    t, desk = tables_at(handle), words(loop[of.DESK], exchange.DESK_WORDS)
    now, rounds_until, slept = instructions.monotonic_ns(), until, False
    while True:
        stopped = run_loop(loop, handle, min(now + _HOUSEKEEPING_NS, rounds_until), spin_ns(rest[BUDGET]))
        now = instructions.monotonic_ns()
        if stopped == of.TIME and now < rounds_until and not desk[exchange.BELLS]:
            if instructions.wait_readable(rest[DESCRIPTOR], 0) > 0:
                return CALLED
            continue
        if stopped != of.IDLE or desk[exchange.BELLS] or (slept and now >= until):
            return stopped
        held = held_until(t, now)
        if held <= now:
            continue
        at_most = min(max(until - now, _MS), held - now)
        asked = exchange.sleep(desk, rest[DESCRIPTOR], -(-at_most // _MS))
        begin, now, slept = now, instructions.monotonic_ns(), True
        learn_wait(rest[BUDGET], now - begin)
        if asked:
            instructions.read_word(rest[BELL])  # what was rung for has been seen; other calls are heard every `until`
            rounds_until = max(until, now + _MS)
        elif now < held:
            return CALLED if now < until else of.TIME
