"""The arrays of all simulated decode workers, which compiled functions work on (`step_batch`, `decode_core`)."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ipc.memory.intrinsics import floats, words
from runtime.simulator.stages.pool_core import compiled

# Of all workers. EVERY: tokens between probes (0: none). MOST_STEPS: in one run. PREFILLS: prefill workers at work.
# WAIT_NS: of a probe's row alone.
(
    EVENTS,
    FREE_ROWS,
    ASKED,
    EVERY,
    ASKS,
    MOST_STEPS,
    PROBE_TOKENS,
    TOP_M,
    EMBED_NS,
    TIMEOUT_NS,
    PREFILLS,
    WAIT_NS,
) = range(12)
WORDS = 12
# Costs in ns; of a chunk, a text beside a step and a probe in s; BESIDE is a factor.
(STEP, ROW, CONTEXT_TOKEN, CHUNK_TOKEN, CHUNK_BEHIND, CHUNK_PAIR, HIT, EMBED_CORE, A_PROBE, BESIDE) = range(10)
COSTS = 10

# Of a worker. END: of the run under way, of STEPS steps from BEGIN on, the first of which takes FIRST ns, the others
# EACH; TAKEN before it. HOLD: TOKENS of all rows in the batch. PYTHON: whether the worker's own code is to be called
# between two runs (`decode`). DUE_FIRST, DUE_LAST: rows whose probes end by their timeouts, as a list. APPENDED: tokens
# of passages that go through the model with the next step.
(
    END,
    STEPS,
    BEGIN,
    FIRST,
    EACH,
    TAKEN,
    RESTING,
    JOINED,
    BUSY,
    CONTEXT,
    TOKENS,
    PROBES,
    STALLED,
    STALL_NS,
    COUNTED,
    EMBEDDED,
    DUE_FIRST,
    DUE_LAST,
    LOOKS,
    PYTHON,
    MOST_TOKENS,
    OUT_ROWS,
    GPU,
    GROUP,
    DRAWN,
    APPENDED,
) = range(26)
LISTS = 26  # and from here on how long each list is
MEMBERS, JOINING, ASKING, ANSWERED, OVER = range(5)  # of rows: in the batch, to join it, with a probe to ask, …
WORKER_WORDS = LISTS + 5

# Of a row. ENDS: TAKEN when its STEPS are over, -1 outside of the batch; ORDER: in which it joined. OUT: it has no KV
# blocks (HOLDS), so it cannot join. ASKS: the number of its probe, 0 if it has none; QUERY: the pool's, or -1.
(
    WORKER,
    ENDS,
    ORDER,
    OUTPUT,
    GENERATED,
    ROW_STEPS,
    ROW_CONTEXT,
    WAITED,
    EXPIRED,
    HOLDS,
    OUT,
    PROBE,
    DEADLINE,
    QUERY,
    STATUS,
    DUE_BEFORE,
    DUE_AFTER,
) = range(17)
ROW_WORDS = 17

(WHEN, PLANNED, KIND, WHAT, OF_PROBE) = range(5)  # of an event
EVENT_WORDS = 5
RUN_ENDS, VECTOR, LOOK = range(3)  # kinds of events: of a worker, a row, a worker
CLOCK_PLANNED, CLOCK_NEXT = range(2)


class State(NamedTuple):
    """`clock` is what `Events` shares with those beside it."""

    clock: npt.NDArray[np.int64]  # [2]
    words: npt.NDArray[np.int64]  # [WORDS]
    costs: npt.NDArray[np.float64]  # [COSTS]
    workers: npt.NDArray[np.int64]  # [workers, WORKER_WORDS]
    extra_s: npt.NDArray[np.float64]  # [workers]: what the next step takes longer
    lists: npt.NDArray[np.int64]  # [workers · 5, slots]: of rows
    rows: npt.NDArray[np.int64]  # [workers · slots, ROW_WORDS]
    free: npt.NDArray[np.int64]  # [workers · slots]: a stack of rows
    drawn: npt.NDArray[np.float64]  # [workers, draws]: whether a probe finds something
    events: npt.NDArray[np.int64]  # [events, EVENT_WORDS]: a heap


@partial(compiled, returns_array=True)
def state_at(handle: Any) -> Any:
    """The arrays that `handle_of` described."""
    return State(
        words(handle[0, 0], handle[0, 1]),
        words(handle[1, 0], handle[1, 1]),
        floats(handle[2, 0], handle[2, 1]),
        words(handle[3, 0], (handle[3, 1], handle[3, 2])),
        floats(handle[4, 0], handle[4, 1]),
        words(handle[5, 0], (handle[5, 1], handle[5, 2])),
        words(handle[6, 0], (handle[6, 1], handle[6, 2])),
        words(handle[7, 0], handle[7, 1]),
        floats(handle[8, 0], (handle[8, 1], handle[8, 2])),
        words(handle[9, 0], (handle[9, 1], handle[9, 2])),
    )


@compiled
def append(s: Any, d: int, kind: int, row: int) -> None:
    """To the end of one of a worker's lists."""
    s.lists[5 * d + kind, s.workers[d, LISTS + kind]] = row
    s.workers[d, LISTS + kind] += 1


@compiled
def plan(s: Any, when: int, kind: int, what: int, probe: int) -> None:
    """Something happens then: into the heap of events."""
    s.clock[CLOCK_PLANNED] += 1
    order = s.clock[CLOCK_PLANNED]
    s.clock[CLOCK_NEXT] = min(s.clock[CLOCK_NEXT], when)
    place = s.words[EVENTS]
    s.words[EVENTS] += 1
    while place:
        above = (place - 1) >> 1
        if s.events[above, WHEN] <= when:  # planned before, so it comes before
            break
        _move(s, above, place)
        place = above
    one = s.events[place]
    one[WHEN], one[PLANNED], one[KIND], one[WHAT], one[OF_PROBE] = when, order, kind, what, probe


@compiled
def pop(s: Any) -> Any:
    """The next event: (kind, what, probe)."""
    found = s.events[0, KIND], s.events[0, WHAT], s.events[0, OF_PROBE]
    s.words[EVENTS] -= 1
    count = s.words[EVENTS]
    last = s.events[count]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= count:
            break
        if below + 1 < count and _before(s.events[below + 1], s.events[below]):
            below += 1
        if not _before(s.events[below], last):
            break
        _move(s, below, place)
        place = below
    _move(s, count, place)
    return found


@compiled
def _before(one: Any, other: Any) -> Any:
    return one[WHEN] < other[WHEN] or (one[WHEN] == other[WHEN] and one[PLANNED] < other[PLANNED])


@compiled
def _move(s: Any, place: int, to: int) -> None:
    for column in range(EVENT_WORDS):
        s.events[to, column] = s.events[place, column]
