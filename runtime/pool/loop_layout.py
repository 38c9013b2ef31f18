"""Memory layout of the compiled loop: its own columns of a policy's entry, its words, and its exit reasons."""

from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool import tables

# The loop's columns of an entry: the client's row and request id, times of enqueueing, receipt and admission, the
# engine's slot, and the search parameters. PARTS: address of a scope's parts (`scopes.py`), of which there are
# PART_COUNT and PART is being searched; 0: no scope. KEPT results of the parts before are kept, which took SPENT
# extends. VECTOR: address of a vector in the arena; 0: it is in the entry's row of VECTORS.
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
    PART_COUNT,
    PART,
    KEPT,
    SPENT,
    VECTOR,
) = range(tables.CALLER, tables.CALLER + 17)
assert tables.CALLER_WORDS >= 17

# Words of the loop.
# CLIENTS: address of the client table (`ipc.ring.exchange`).
# ADMIT … HANDLE, SET_FILTER, PRIORITIZE, ADMIT_IN_PLACE: the engine's functions and handle (`gpu.engine`), 0 for one
# that it lacks.
# CLOCK: address of a word with the time in ns, 0 for the machine's clock. MAX_WIDTH: limit of a query's search_width.
# VECTORS: address of a row of VECTOR_BYTES for each entry. REPORT: buffer for the report of `extend`.
# OWNERS: the entry in each slot. EVICTED: rows of the EVICT clients to be evicted.
# STATIC_DONE: pairs (entry, extends) of the DONE_COUNT queries that wait for the rest of their batch under `static`.
# LAST_END_NS: end of the last extend, 0 after a sleep. PADDED: slots beyond the active ones in the last extend.
# UNREPORTED_NS: time spent since the engine last reported completed extends. SCOPES: address of their table.
# PART_RESULTS: for each entry PART_RESULT_BYTES for the results of the parts searched so far.
# MERGE_BUFFER: room for twice as many. SET_ASIDE: number of requests that wait for their filters in Python; RESOLVED:
# set by another thread once a filter is resolved. METRICS: first word of the metrics, see below.
(
    CLIENTS,
    ADMIT,
    EXTEND,
    READ_RESULT,
    CHANGE_STATE,
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
    LAST_END_NS,
    PADDED,
    SET_FILTER,
    PRIORITIZE,
    UNREPORTED_NS,
    SCOPES,
    PART_RESULTS,
    PART_RESULT_BYTES,
    MERGE_BUFFER,
    SET_ASIDE,
    RESOLVED,
    ADMIT_IN_PLACE,
    METRICS,
) = range(29)
# Addresses of counters in the worker's metrics table; a histogram has three words: the address of its first bucket, the
# address of its edges, and the number of edges.
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
    DEADLINE_MISSES,
    _,
    REFUSED,
    OVERLOADED,
    LATE,
    INVALID,
    PREEMPTIONS,
    LOOP_S,
    EXTEND_S,
    EXTENDS,
    SLOT_STEPS,
    PADDED_STEPS,
) = range(METRICS, METRICS + len(COUNTERS))
HISTOGRAMS = (*PoolMetrics.WAIT.values(), PoolMetrics.LATENCY, PoolMetrics.QUERY_EXTENDS)
(WAIT, _, LATENCY, QUERY_EXTENDS) = range(METRICS + len(COUNTERS), METRICS + len(COUNTERS) + 3 * len(HISTOGRAMS), 3)
LOOP_WORDS = METRICS + len(COUNTERS) + 3 * len(HISTOGRAMS)

IDLE, TIME_UP, EVICTIONS, ENGINE_FAILED, UNKNOWN_FILTER, FILTERS_RESOLVED, CANCEL = range(7)
"""Exit reasons of `run_loop`: no query is active; `until` has passed; clients are to be evicted; the engine failed; the
current request's filter has no number yet; RESOLVED is set; a request that may have been set aside is cancelled."""
