"""What the compiled loop works on beside the policy's tables: an entry's own columns, and its words."""

from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool import tables as at

# An entry's own columns: whose query it is, when it was enqueued, received and given a slot, and what it asks.
# PARTS: address of a scope's parts (`scopes.py`), COUNT of them, PART being searched now; 0: it has no scope. Of the
# parts before, KEPT results are kept, and SPENT extends were made.
(
    ROW,
    REQUEST_ID,
    ENQUEUED,
    RECEIVED,
    BEGUN,
    SLOT,
    COLLECTION,
    K,
    TOP_M,
    WIDTH,
    PATIENCE,
    PARTS,
    COUNT,
    PART,
    KEPT,
    SPENT,
) = range(at.OWN, at.OWN + 16)
assert at.OWN_WORDS >= 16

# Words of the loop. DESK: address. ADMIT … HANDLE: the engine's. CLOCK: address of a word with the time in ns, 0 for
# the machine's. MAX_WIDTH: a query's. VECTORS: a row of VECTOR_BYTES for each entry. REPORT: of `extend`. OWNERS: the
# entry in each slot. EVICTED: rows of clients to be evicted, EVICT of them. STATIC_DONE: entries that are done, with
# their extends, whose answers wait for the rest of their batch, DONE_COUNT of them. OWN_NS: when the engine was done
# last, 0 after a sleep. PADDED: slots beyond the active ones in the last extend. RESTRICT, HURRY: the engine's, 0
# where it has none; UNTOLD_NS: spent since it last told of extends; SCOPES: their table. HELD: for each entry
# HELD_BYTES, the results of the parts of its scope before this one; SPARE: room for twice as many. METRICS: where
# they begin, see below.
(
    DESK,
    ADMIT,
    EXTEND,
    HARVEST,
    CHANGE,
    HANDLE,
    CLOCK,
    MAX_WIDTH,
    VECTORS,
    VECTOR_BYTES,
    REPORT,
    OWNERS,
    EVICTED,
    EVICT,
    STATIC_DONE,
    DONE_COUNT,
    OWN_NS,
    PADDED,
    RESTRICT,
    HURRY,
    UNTOLD_NS,
    SCOPES,
    HELD,
    HELD_BYTES,
    SPARE,
    METRICS,
) = range(26)
# Addresses of counters in the worker's table; those of histograms come in threes: the first bucket, the edges, and how
# many edges there are.
COUNTERS = (
    *PoolMetrics.QUERIES.values(),
    *PoolMetrics.DEADLINE_MISSES.values(),
    PoolMetrics.QUERIES_REFUSED,
    *PoolMetrics.REFUSED.values(),
    PoolMetrics.PREEMPTIONS,
    PoolMetrics.LOOP_SECONDS,
    PoolMetrics.EXTEND_SECONDS,
    PoolMetrics.EXTENDS,
    PoolMetrics.SLOT_STEPS,
    PoolMetrics.PADDED_SLOT_STEPS,
)
(
    QUERIES,
    _,
    MISSED,
    _,
    REFUSED,
    OVERLOADED,
    LATE,
    UNFIT,
    PREEMPTIONS,
    LOOP_S,
    EXTEND_S,
    EXTENDS,
    STEPS,
    PADDED_STEPS,
) = range(METRICS, METRICS + len(COUNTERS))
HISTOGRAMS = (*PoolMetrics.WAIT.values(), PoolMetrics.LATENCY, PoolMetrics.QUERY_EXTENDS)
(WAITS, _, TOOK, TOOK_EXTENDS) = range(METRICS + len(COUNTERS), METRICS + len(COUNTERS) + 3 * len(HISTOGRAMS), 3)
LOOP_WORDS = METRICS + len(COUNTERS) + 3 * len(HISTOGRAMS)

IDLE, TIME, IN_ARENA, TO_EVICT, ENGINE_FAILED, NEW_FILTER = range(6)
"""Why `run_loop` returned: nothing is active; its time is over; the request found has its vector in the arena; clients
are to be evicted; the engine has failed; the request found has a filter that is not known yet."""
