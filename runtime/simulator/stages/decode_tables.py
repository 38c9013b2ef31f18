"""State arrays of all simulated decode workers, for compiled code (`step_batch`, `decode_core`)."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ipc.native.intrinsics import floats, words
from runtime.simulator.stages.pool_core import compiled

# Words shared by all workers. PROBE_INTERVAL: tokens between probes (0: none). MOST_STEPS: limit of a run. PREFILLS:
# number of busy prefill workers. WAIT_NS: a probe's wait that delays its own row only.
(
    EVENTS,
    FREE_ROWS,
    PROBES_STARTED,
    PROBE_INTERVAL,
    PROBES_ENABLED,
    MOST_STEPS,
    PROBE_TOKENS,
    TOP_M,
    EMBED_NS,
    TIMEOUT_NS,
    PREFILLS,
    WAIT_NS,
) = range(12)
WORDS = 12
# Costs in ns; of a chunk, a text embedded during a step and a probe in s. BUSY_FACTOR: slowdown while prefill is busy.
(STEP, ROW, CONTEXT_TOKEN, CHUNK_TOKEN, CHUNK_BEHIND, CHUNK_PAIR, HIT, EMBED_CORE, PROBE_COST, BUSY_FACTOR) = range(10)
COSTS = 10

# Words of a worker. END: end of the current run, of STEPS steps from BEGIN on, the first of which takes FIRST ns, the
# others EACH; TAKEN: steps before it. CONTEXT: tokens of all rows in the batch. CALLBACK: whether Python is called
# between every two runs (`decode`). DUE_FIRST, DUE_LAST: linked list of rows by probe timeout. APPENDED: passage tokens
# in the next step.
(
    END,
    STEPS,
    BEGIN,
    FIRST,
    EACH,
    TAKEN,
    IDLE,
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
    TIMEOUT_PLANNED,
    CALLBACK,
    MOST_TOKENS,
    PREEMPTED_ROWS,
    GPU,
    GROUP,
    DRAWN,
    APPENDED,
) = range(26)
LISTS = 26  # the lengths of the lists follow
MEMBERS, JOINING, PROBING, ANSWERED, FINISHED = range(5)  # lists of rows: in the batch, about to join, …
WORKER_WORDS = LISTS + 5

# Words of a row. ENDS: value of TAKEN when its STEPS are done, -1 outside the batch; ORDER: order of joining.
# PREEMPTED: it has no KV blocks (HAS_BLOCKS) and cannot join. PROBE: number of its probe, 0: none; QUERY: the pool's
# query, or -1. STALL: total time stalled by probes.
(
    WORKER,
    ENDS,
    ORDER,
    OUTPUT,
    GENERATED,
    ROW_STEPS,
    ROW_CONTEXT,
    STALL,
    EXPIRED,
    HAS_BLOCKS,
    PREEMPTED,
    PROBE,
    DEADLINE,
    QUERY,
    STATUS,
    DUE_BEFORE,
    DUE_AFTER,
) = range(17)
ROW_WORDS = 17

(WHEN, PLANNED, KIND, SUBJECT, OF_PROBE) = range(5)  # of an event
EVENT_WORDS = 5
RUN_ENDS, VECTOR, TIMEOUT = range(3)  # kinds of events; subject: a worker, a row, a worker
CLOCK_PLANNED, CLOCK_NEXT = range(2)


class State(NamedTuple):
    """`clock` is shared with `Events`."""

    clock: npt.NDArray[np.int64]  # [2]
    words: npt.NDArray[np.int64]  # [WORDS]
    costs: npt.NDArray[np.float64]  # [COSTS]
    workers: npt.NDArray[np.int64]  # [workers, WORKER_WORDS]
    extra_s: npt.NDArray[np.float64]  # [workers]: extra time of the next step
    lists: npt.NDArray[np.int64]  # [workers · 5, slots]: of rows
    rows: npt.NDArray[np.int64]  # [workers · slots, ROW_WORDS]
    free: npt.NDArray[np.int64]  # [workers · slots]: a stack of rows
    drawn: npt.NDArray[np.float64]  # [workers, draws]: random numbers for probe hits
    events: npt.NDArray[np.int64]  # [events, EVENT_WORDS]: a heap


@partial(compiled, returns_array=True)
def state_at(handle: Any) -> Any:
    """Return the arrays that `handle_of` described."""
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
    """Append a row to one of a worker's lists."""
    s.lists[5 * d + kind, s.workers[d, LISTS + kind]] = row
    s.workers[d, LISTS + kind] += 1


@compiled
def plan(s: Any, when: int, kind: int, what: int, probe: int) -> None:
    """Push an event to the heap."""
    s.clock[CLOCK_PLANNED] += 1
    order = s.clock[CLOCK_PLANNED]
    s.clock[CLOCK_NEXT] = min(s.clock[CLOCK_NEXT], when)
    place = s.words[EVENTS]
    s.words[EVENTS] += 1
    while place:
        above = (place - 1) >> 1
        if s.events[above, WHEN] <= when:  # planned earlier, so it stays first
            break
        _move(s, above, place)
        place = above
    one = s.events[place]
    one[WHEN], one[PLANNED], one[KIND], one[SUBJECT], one[OF_PROBE] = when, order, kind, what, probe


@compiled
def pop(s: Any) -> Any:
    """Pop the next event: (kind, subject, probe)."""
    found = s.events[0, KIND], s.events[0, SUBJECT], s.events[0, OF_PROBE]
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
