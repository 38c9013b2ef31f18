"""A turn of the pool, compiled: rounds of its loop, and sleeps between them, until only Python can go on.

    rounds ──▶ nothing to do ──▶ spin ──▶ sleep ──▶ a client rings ──▶ rounds …
      └─ every 10 ms: does a session message wait, or has a client died?

So a pool that queries wake, however often, enters Python no oftener than one that is busy.
"""

from typing import Any

from ipc.memory import instructions
from ipc.memory.instructions import words
from ipc.ring import exchange
from ipc.ring.doorbell import learn_wait, spin_ns
from ipc.ring.exchange import DESK_WORDS
from runtime.pool.compiled import compiled
from runtime.pool.loop import run_loop
from runtime.pool.loop_words import DESK, IDLE, NEW_FILTER, TIME
from runtime.pool.policy import held_until
from runtime.pool.tables import tables_at

CALLED = NEW_FILTER + 1
"""Why `turn` returned, beside why `run_loop` does: the server's descriptor is readable, and not for a query."""

# Words of a rest. DESCRIPTOR: readable when the server is wanted. BELL: the eventfd that clients ring, a part of what
# makes it readable. BUDGET: address of the spin budget.
(DESCRIPTOR, BELL, BUDGET) = range(3)
_LOOK_NS = 10_000_000
_MS = 1_000_000


@compiled
def turn(loop: Any, handle: Any, rest: Any, until: int) -> Any:
    """Serve until `until`, or until Python is needed for something else; it sleeps at least once before it is IDLE.

    A query that ends a sleep is answered first, if that takes no longer than 1 ms.
    """
    t, desk = tables_at(handle), words(loop[DESK], DESK_WORDS)
    now, rounds_until, slept = instructions.monotonic_ns(), until, False
    while True:
        stopped = run_loop(loop, handle, min(now + _LOOK_NS, rounds_until), spin_ns(rest[BUDGET]))
        now = instructions.monotonic_ns()
        if stopped == TIME and now < rounds_until and not desk[exchange.BELLS]:
            if instructions.wait_readable(rest[DESCRIPTOR], 0) > 0:
                return CALLED
            continue
        if stopped != IDLE or desk[exchange.BELLS] or (slept and now >= until):
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
            return CALLED if now < until else TIME
