"""The overview dashboard of a node, its rows in the order of an on-call investigation.

SLOs, health, queues, saturation, KV cache, latency, control loop, collections, workers and GPUs.
"""

from collections.abc import Mapping

from dashboards import queries as q
from dashboards.grafana import Json, Panel, Query, Row, dashboard, label_variable
from dashboards.overview_panels import HERE, OF_WORKER, WORKER, burn_rates, here, lines, nixl, percentiles, tile
from dashboards.overview_requests import latency, searches
from runtime.node.metrics.worker_metrics import (
    DecodeMetrics,
    FrontendMetrics,
    KvMetrics,
    PoolMetrics,
    PrefillMetrics,
)
from runtime.node.supervisor_metrics import ControlMetrics, GpuMetrics, NamedMetric, NodeMetrics, ProcessMetrics

UID = "trinity-overview"
_SLO = f'{HERE},slo="$slo"'


def overview() -> Json:
    variables = [
        label_variable("node", "Node", NodeMetrics.INFO, "node"),
        label_variable("model", "Model", NodeMetrics.INFO, "model_name"),
        label_variable("slo", "SLO", FrontendMetrics.SLO_REQUESTS, "slo", only="all"),
    ]
    rows = (_slos, _health, _queues, _saturation, _kv, latency, searches, _control_loop, _collections, _workers)
    return dashboard(UID, "Trinity: overview", [row() for row in rows], variables)


def _slos() -> Row:
    burning = ((0, "green"), (6, "orange"), (14.4, "red"))
    colors = ((0, "red"), (0.95, "orange"), (0.99, "green"))
    attainment = Query(f"1 - ({q.violation_ratio(HERE)})", "{{node}} {{slo}}")
    return Row(
        "SLOs",
        tile(
            "SLO attainment",
            "Share of requests that met the SLO $slo, over the last hour",
            f"1 - ({q.violation_ratio(_SLO, '1h')})",
            "percentunit",
            thresholds=colors,
        ),
        tile(
            "Burn rate, 1 h",
            "Error budget burn rate over one hour; 1 spends the budget exactly",
            q.burn_rate(_SLO, "1h"),
            "short",
            thresholds=burning,
        ),
        tile(
            "Burn rate, 5 m",
            "Error budget burn rate over five minutes: whether the burn continues",
            q.burn_rate(_SLO, "5m"),
            "short",
            thresholds=burning,
        ),
        lines("Attainment", "Share of requests that met their SLO", [attainment], "percentunit", height=4),
        burn_rates(height=4),
    )


def _health() -> Row:
    ended = q.rate(here(FrontendMetrics.REQUESTS))
    alarm = ((0, "green"), (0.001, "orange"), (0.01, "red"))
    colors = ((0, "green"), (1, "red"))
    return Row(
        "Health",
        tile(
            "Workers not ready",
            "Workers of the plan that do not serve",
            f"sum(1 - {here(ProcessMetrics.UP)})",
            "short",
            thresholds=colors,
        ),
        tile(
            "Oldest heartbeat",
            "Longest time since a worker's loop last ran",
            f"max({here(ProcessMetrics.HEARTBEAT_AGE)})",
            "s",
            thresholds=((0, "green"), (5, "orange"), (15, "red")),
        ),
        tile(
            "Restarts, 15 m",
            "Worker restarts over the last 15 minutes",
            f"sum(increase({here(ProcessMetrics.RESTARTS)}[15m]))",
            "short",
            thresholds=colors,
        ),
        tile("Requests", "Completed generations per second", ended, "reqps"),
        tile(
            "Errors",
            "Share of generations that failed or were refused",
            q.failure_ratio(HERE),
            "percentunit",
            thresholds=alarm,
        ),
        tile(
            "HTTP 5xx",
            "Share of HTTP responses with status 5xx",
            f"{q.rate(here(FrontendMetrics.HTTP_RESPONSES, status='5xx'))}"
            f" / {q.rate(here(FrontendMetrics.HTTP_RESPONSES))}",
            "percentunit",
            thresholds=alarm,
        ),
    )


def _queues() -> Row:
    depth = [Query(f"sum by (stage) ({here(PoolMetrics.QUEUE_DEPTH)})", "Q_{{stage}}")]
    waits = [
        Query(q.quantile(0.95, PoolMetrics.WAIT, HERE, ("stage",)), "{{stage}} p95"),
        Query(f"max({here(ControlMetrics.WAIT_TARGET)})", "prefill target"),
    ]
    requests = [
        Query(f"sum({here(PrefillMetrics.WAITING)})", "waiting for prefill"),
        Query(f"sum({here(PrefillMetrics.RUNNING)})", "in prefill"),
        Query(f"sum({here(DecodeMetrics.WAITING)})", "waiting for decode"),
        Query(f"sum({here(DecodeMetrics.RUNNING)})", "decoding"),
    ]
    received = [Query(q.rate(here(PoolMetrics.QUERIES), ("stage",)), "{{stage}}")]
    return Row(
        "Queues",
        lines("Pool queues", "Queries that wait for a slot, by queue: Q_pre and Q_dec", depth, "short"),
        lines("Pool wait", "Time from enqueue to slot, p95", waits, "s"),
        lines("Requests", "Requests by stage", requests, "short"),
        lines("Pool queries", "Queries received per second", received, "reqps"),
    )


def _saturation() -> Row:
    real, padded = (q.rate(here(steps)) for steps in (PoolMetrics.SLOT_STEPS, PoolMetrics.PADDED_SLOT_STEPS))
    steps = q.rate(here(PoolMetrics.EXTENDS))
    slots = [
        Query(f"{real} / {steps}", "active per step"),
        Query(f"({real} + {padded}) / {steps}", "padded per step"),
        Query(f"sum({here(PoolMetrics.ACTIVE_SLOTS)} + {here(PoolMetrics.PADDED_SLOTS)})", "padded now"),
        Query(f"sum({here(PoolMetrics.SLOTS)})", "limit"),
        Query(f"sum({here(PoolMetrics.PAUSED_SLOTS)})", "paused"),
    ]
    extending, looping = (
        q.rate(here(seconds), WORKER) for seconds in (PoolMetrics.EXTEND_SECONDS, PoolMetrics.LOOP_SECONDS)
    )
    # Extends and loop are summed here: a stacked panel would stack the workers on each other.
    busy = [
        Query(extending, f"{OF_WORKER} extends"),
        Query(f"{extending} + {looping}", f"{OF_WORKER} extends and loop"),
    ]
    blocks = [Query(here(DecodeMetrics.KV_USED), OF_WORKER)]
    link = [
        Query(q.rate(here(DecodeMetrics.LINK_BUSY_SECONDS), WORKER), OF_WORKER),
        Query(q.rate(nixl("xfer_time_seconds_sum"), WORKER), f"{OF_WORKER}, NIXL"),
        Query(f"max({here(ControlMetrics.LINK_TARGET)})", "target"),
    ]
    bandwidth = [
        Query(here(GpuMetrics.MEMORY_BUSY), "{{node}} GPU {{gpu}}"),
        Query(f"sum({here(GpuMetrics.NVML_UP)})", "NVML available"),
    ]
    return Row(
        "Saturation",
        lines(
            "Pool slots",
            "Active slots per step (mean), and the CUDA graph size that the step is padded to",
            slots,
            "short",
        ),
        lines("Pool busy", "Share of time in extends, and in extends plus the rest of the loop", busy, "percentunit"),
        lines("KV in use", "Share of a decode worker's KV blocks in use", blocks, "percentunit", 4),
        lines("KV link", "Share of time in which KV is transferred", link, "percentunit", 4),
        lines(
            "GPU memory bandwidth", "Share of time in which GPU memory is read or written", bandwidth, "percentunit", 4
        ),
    )


def _kv() -> Row:
    hits = [
        Query(f"{q.rate(here(role.PREFIX_HIT_TOKENS))} / {q.rate(here(role.PREFIX_QUERY_TOKENS))}", name)
        for name, role in (("prefill", PrefillMetrics), ("decode", DecodeMetrics))
    ]
    tier_bytes = [
        Query(f"sum by (tier) (max by (node, tier) ({here(metric)}))", f"{{{{tier}}}}{label}")
        for metric, label in ((KvMetrics.TIER_BYTES, ""), (KvMetrics.TIER_HELD, ", held"))
    ]
    moved = {"loaded": KvMetrics.TIER_LOADED, "stored": KvMetrics.TIER_STORED}
    lost = {"evicted": KvMetrics.TIER_EVICTED, "damaged": KvMetrics.TIER_DAMAGED, "not stored": KvMetrics.TIER_FAILED}
    evicted = [
        Query(q.rate(here(role.KV_EVICTIONS)), f"{name} KV, evicted")
        for name, role in (("prefill", PrefillMetrics), ("decode", DecodeMetrics))
    ]

    def by_tier(metrics: Mapping[str, NamedMetric]) -> list[Query]:
        return [Query(q.rate(here(metric), ("tier",)), f"{{{{tier}}}}, {name}") for name, metric in metrics.items()]

    return Row(
        "KV cache",
        lines(
            "KV in tiers",
            "Bytes of KV blocks in the host and disk tiers, and of those held for sequences that return to them",
            tier_bytes,
            "bytes",
        ),
        lines("Prefix hits", "Share of looked-up tokens found in the worker's own KV blocks", hits, "percentunit"),
        lines(
            "Tier transfers", "KV blocks loaded instead of computed, and stored, per second", by_tier(moved), "short"
        ),
        lines("Blocks lost", "KV blocks per second: evicted, damaged, not stored", by_tier(lost) + evicted, "short"),
    )


def _control_loop() -> Row:
    reserve = [
        Query(here(ControlMetrics.RESERVE), "{{node}} target"),
        Query(here(PoolMetrics.RESERVE), OF_WORKER),
    ]
    flush = [Query(here(ControlMetrics.FLUSH_PREFILL), "{{node}} τ_pre")]
    stall = [
        Query(f"{q.rate(here(DecodeMetrics.STALL_SECONDS))} / {q.rate(here(DecodeMetrics.ROW_SECONDS))}", "stalled"),
        Query(f"max({here(ControlMetrics.STALL_TARGET)})", "target"),
    ]
    events = [
        Query(q.rate(here(PoolMetrics.PREEMPTIONS)), "preemptions"),
        Query(q.rate(here(PoolMetrics.DEADLINE_MISSES), ("stage",)), "{{stage}} deadlines missed"),
        Query(q.rate(here(ControlMetrics.CHANGES)), "control changes"),
    ]
    loads = [Query(here(ControlMetrics.ROLE_LOAD), "{{node}} {{role}}")]
    moves = [Query(q.rate(here(ControlMetrics.MOVES), ("role",)), "{{role}}")]
    return Row(
        "Control loop",
        lines("Reserve r", "Share of slots reserved for prefill queries", reserve, "percentunit"),
        lines("Flush τ_pre", "Time for which prefill queries leave the slots to decode", flush, "s"),
        lines("Decode stalled", "Share of the rows' time spent waiting for probes", stall, "percentunit"),
        lines("Events", "Scheduler and control events per second", events, "short"),
        lines(
            "Load of prefill and decode",
            "Load relative to the capacity within the SLOs; with a planner only",
            loads,
            "short",
        ),
        lines("Role changes", "Workers that change roles per second, by previous role", moves, "short"),
    )


def _collections() -> Row:
    segments = [
        Query(f"sum({here(FrontendMetrics.COLLECTION_SEGMENTS)})", "segments"),
        Query(f"sum({here(FrontendMetrics.COLLECTION_BUILDING)})", "building"),
    ]
    merges = [
        Query(q.rate(here(FrontendMetrics.COLLECTION_SEALED), window="1h") + " * 3600", "sealed per hour"),
        Query(q.rate(here(FrontendMetrics.COLLECTION_MERGED), window="1h") + " * 3600", "merged per hour"),
    ]
    rows = [
        Query(f"sum({here(FrontendMetrics.COLLECTION_DOCUMENTS)})", "documents"),
        Query(f"sum({here(FrontendMetrics.COLLECTION_GROWING)})", "growing"),
        Query(f"sum({here(FrontendMetrics.COLLECTION_TOMBSTONES)})", "tombstones"),
    ]
    log = [Query(f"sum({here(FrontendMetrics.COLLECTION_LOG_BYTES)})", "log")]
    return Row(
        "Collections",
        percentiles("Writes", "Time until a write to a collection is acknowledged", FrontendMetrics.WRITE_TIME),
        lines("Documents", "Documents, growing rows, and tombstones not yet merged away", rows, "short", 8),
        lines("Log", "Bytes of the write-ahead log that a restart replays", log, "bytes", 8),
        lines("Segments", "Segments of the collections, and segments being built", segments, "short", 8),
        lines("Seals and merges", "Segments built from the log, and by merges, per hour", merges, "short", 8),
    )


def _workers() -> Row:
    by = "by (node, role, worker, device, uuid)"
    placed = f"max {by} ({here(ProcessMetrics.INFO)})"

    def column(metric: NamedMetric, name: str, unit: str = "") -> Query:
        joined = f"{placed} * on (node, worker) group_left () max by (node, worker) ({here(metric)})"
        return Query(joined, name, unit)

    workers = [
        column(ProcessMetrics.UP, "up"),
        column(ProcessMetrics.RESTARTS, "restarts"),
        column(ProcessMetrics.HEARTBEAT_AGE, "heartbeat", "s"),
        column(ProcessMetrics.RESIDENT, "memory", "bytes"),
        column(ProcessMetrics.OPEN_FDS, "fds"),
    ]
    gpus = [
        Query(_gpu(GpuMetrics.BUSY), "busy", "percentunit"),
        Query(_gpu(GpuMetrics.MEMORY_BUSY), "bandwidth", "percentunit"),
        Query(_gpu(GpuMetrics.MEMORY_USED), "used", "bytes"),
        Query(_gpu(GpuMetrics.MEMORY), "memory", "bytes"),
        Query(_gpu(GpuMetrics.POWER), "power", "watt"),
    ]
    return Row(
        "Workers and GPUs",
        Panel(
            "table",
            "Workers by role",
            "State, restarts, heartbeat, memory and file descriptors of each worker",
            workers,
            width=12,
            height=9,
        ),
        Panel("table", "GPUs", "Utilization, memory and power by GPU, from NVML", gpus, width=12, height=9),
    )


def _gpu(metric: NamedMetric) -> str:
    return f"max by (node, gpu, uuid) ({here(metric)})"
