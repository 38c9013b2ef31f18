"""Memory of the compiled loop: its records, and its exit reasons."""

from typing import Annotated

import numpy as np

from gpu.engine import Backend, Report
from ipc.native.records import Array, Record, Shared, array_from, array_over, record, record_at
from ipc.ring.exchange import ClientTable
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool.collections.scopes import Scope, ScopePart
from runtime.pool.tables import Tables

IDLE, TIME_UP, EVICTIONS, ENGINE_FAILED, UNKNOWN_FILTER, FILTERS_RESOLVED, CANCEL = range(7)
"""Exit reasons of `run_loop`: no query is active; `until` has passed; clients are to be evicted; the engine failed; the
current request's filter has no number yet; `resolved` is set; a request that may have been set aside is cancelled."""
OVERLOADED, LATE, INVALID = range(3)  # reasons to refuse a query


@record
class Search(Record):
    """The search of a policy's entry of the same number: whose it is, and where it is in the engine."""

    row: int  # its client's
    request_id: int
    enqueued_ns: int  # by the client
    received_ns: int
    begun_ns: int  # when it was admitted
    slot: int
    k: int
    vector: int  # its address in the arena; 0: it is in the entry's row of `vectors`
    parts: Array[ScopePart]  # of its scope
    part_count: int
    part: int  # the one that is being searched
    kept: int  # results of the parts before
    spent: int  # extends that they took


@record
class EngineFunctions(Record):
    """An engine's functions and handle (`gpu.engine.Backend`)."""

    admit: int
    extend: int
    read_result: int
    change_state: int
    handle: int
    set_filter: int
    prioritize: int  # 0 for an engine that lacks it
    admit_in_place: int  # `admit` where the engine has none

    @classmethod
    def of(cls, backend: Backend) -> "EngineFunctions":
        made = cls(**{name: getattr(backend, name) for name in cls.dtype.names or ()})
        made.admit_in_place = made.admit_in_place or made.admit
        return made


@record
class Histogram(Record):
    """A histogram in the worker's metrics table."""

    buckets: Array[float]  # and behind them the sum
    edges: Array[float]
    edge_count: int


@record
class Metrics(Record):
    """Metrics in the worker's table; counters by address."""

    queries: Annotated[Array[Array[float]], 2]  # by stage
    deadline_misses: Annotated[Array[Array[float]], 2]
    refused: Array[float]
    refused_for: Annotated[Array[Array[float]], 3]  # OVERLOADED, LATE, INVALID
    preemptions: Array[float]
    loop_s: Array[float]
    extend_s: Array[float]
    extends: Array[float]
    slot_steps: Array[float]
    padded_steps: Array[float]
    waits: Annotated[Array[Histogram], 2]
    latency: Histogram
    query_extends: Histogram


@record
class Loop(Record):
    """All that the loop works on."""

    tables: Tables
    searches: Array[Search]  # by entry
    clients: Array[ClientTable]  # one
    engine: EngineFunctions
    metrics: Metrics
    clock: Array[int]  # the time in ns; 0: the machine's clock
    max_width: int  # limit of a query's search_width
    vectors: int  # address of a row of `vector_bytes` for each entry
    vector_bytes: int
    report: Array[Report]
    owners: Array[int]  # the entry in each slot
    evicted: Array[int]  # rows of clients that are to be evicted
    evict_count: int
    last_end_ns: int  # of the last extend, 0 after a sleep
    padded: int  # slots beyond the active ones in the last extend
    unreported_ns: int  # time since the engine last reported completed extends
    scopes: Array[Scope]
    part_results: int  # address of `part_result_bytes` for each entry: results of the parts searched so far
    part_result_bytes: int
    merge_buffer: int  # address of twice as many
    set_aside: int  # requests that wait for their filters in Python
    resolved: Shared  # set by another thread once a filter is resolved


loop_at = record_at(Loop)


def fill_metrics(metrics: Metrics, table: WorkerTable) -> None:
    """Store where the metrics are in a worker's table, which must be kept while they are used."""
    by_index = (
        (metrics.queries, PoolMetrics.QUERIES),
        (metrics.deadline_misses, PoolMetrics.DEADLINE_MISSES),
        (metrics.refused_for, PoolMetrics.REFUSED),
    )
    for counters, labelled in by_index:
        for index, counter in enumerate(labelled.values()):
            counters[index] = array_from(float, table.address(counter))
    metrics.refused = array_from(float, table.address(PoolMetrics.QUERIES_REFUSED))
    metrics.preemptions = array_from(float, table.address(PoolMetrics.PREEMPTIONS))
    metrics.loop_s = array_from(float, table.address(PoolMetrics.LOOP_SECONDS))
    metrics.extend_s = array_from(float, table.address(PoolMetrics.EXTEND_SECONDS))
    metrics.extends = array_from(float, table.address(PoolMetrics.EXTENDS))
    metrics.slot_steps = array_from(float, table.address(PoolMetrics.SLOT_STEPS))
    metrics.padded_steps = array_from(float, table.address(PoolMetrics.PADDED_SLOT_STEPS))
    histograms = (metrics.waits[0], metrics.waits[1], metrics.latency, metrics.query_extends)
    measured = (*PoolMetrics.WAIT.values(), PoolMetrics.LATENCY, PoolMetrics.QUERY_EXTENDS)
    for histogram, metric in zip(histograms, measured, strict=True):
        edges = np.array(table.edges(metric))
        histogram.buckets = array_from(float, table.address(metric))
        histogram.edges, histogram.edge_count = array_over(float, edges), len(edges)
