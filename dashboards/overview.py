"""The overview dashboard of a node, its rows in the order of an on-call investigation.

SLOs, health, queues, saturation, KV cache, latency, control loop, collections, workers and GPUs.
"""

from collections.abc import Mapping
from typing import Any

from dashboards import queries as q
from dashboards.grafana import Json, Panel, Query, Row, dashboard, label_variable
from runtime.node.metrics.worker_metrics import (
    DecodeMetrics,
    FrontendMetrics,
    KvMetrics,
    PoolMetrics,
    PrefillMetrics,
    RetrievingMetrics,
)
from runtime.node.supervisor_metrics import ControlMetrics, GpuMetrics, NamedMetric, NodeMetrics, ProcessMetrics
from runtime.serving.stages import TO_FIRST_TOKEN

UID = "trinity-overview"
HERE = 'node=~"$node",model_name=~"$model"'
_WORKER = ("node", "worker")  # worker names repeat across nodes
_OF_WORKER = "{{node}} {{worker}}"
_NIXL_FAILURES = {"failed_transfers": "lost", "failed_notifications": "not notified", "kv_expired_reqs": "expired"}
_SLO = f'{HERE},slo="$slo"'


def overview() -> Json:
    """Return the overview dashboard."""
    variables = [
        label_variable("node", "Node", NodeMetrics.INFO, "node"),
        label_variable("model", "Model", NodeMetrics.INFO, "model_name"),
        label_variable("slo", "SLO", FrontendMetrics.SLO_REQUESTS, "slo", only="all"),
    ]
    rows = (_slos, _health, _queues, _saturation, _kv, _latency, _control_loop, _collections, _workers_and_gpus)
    return dashboard(UID, "Trinity: overview", [row() for row in rows], variables)


def _s(metric: NamedMetric, **labels: str) -> str:
    return q.series(metric, HERE, **labels)


def _nixl(name: str) -> str:
    """Return a series of vLLM's NIXL connector: the queries of these have no result without it."""
    return q.series(f"vllm:nixl_{name}", HERE)


def _lines(title: str, description: str, queries: list[Query], unit: str, width: int = 6, **look: Any) -> Panel:
    return Panel("timeseries", title, description, queries, unit, width, **look)


def _tile(title: str, description: str, expr: str, unit: str, **look: Any) -> Panel:
    return Panel("stat", title, description, [Query(expr)], unit, width=4, height=4, **look)


def _percentiles(title: str, description: str, histogram: NamedMetric) -> Panel:
    queries = [Query(q.quantile(p, histogram, HERE), f"p{round(100 * p)}") for p in (0.5, 0.95, 0.99)]
    return _lines(title, description, queries, "s", 8)


def _slos() -> Row:
    burning = ((0, "green"), (6, "orange"), (14.4, "red"))
    kept = ((0, "red"), (0.95, "orange"), (0.99, "green"))
    attainment = Query(f"1 - ({q.violation_ratio(HERE)})", "{{node}} {{slo}}")
    return Row(
        "SLOs",
        [
            _tile(
                "SLO attainment",
                "Share of requests that met the SLO $slo, over the last hour",
                f"1 - ({q.violation_ratio(_SLO, '1h')})",
                "percentunit",
                thresholds=kept,
            ),
            _tile(
                "Burn rate, 1 h",
                "Error budget burn rate over one hour; 1 spends the budget exactly",
                q.burn_rate(_SLO, "1h"),
                "short",
                thresholds=burning,
            ),
            _tile(
                "Burn rate, 5 m",
                "Error budget burn rate over five minutes: whether the burn continues",
                q.burn_rate(_SLO, "5m"),
                "short",
                thresholds=burning,
            ),
            _lines("Attainment", "Share of requests that met their SLO", [attainment], "percentunit", height=4),
            _lines(
                "Burn rate",
                "Error budget burn rate; alerts page at 14.4 and at 6",
                [Query(q.burn_rate(HERE), "{{node}} {{slo}}")],
                "short",
                height=4,
            ),
        ],
    )


def _health() -> Row:
    ended = q.rate(_s(FrontendMetrics.REQUESTS))
    alarm = ((0, "green"), (0.001, "orange"), (0.01, "red"))
    one = ((0, "green"), (1, "red"))
    return Row(
        "Health",
        [
            _tile(
                "Workers not ready",
                "Workers of the plan that do not serve",
                f"sum(1 - {_s(ProcessMetrics.UP)})",
                "short",
                thresholds=one,
            ),
            _tile(
                "Oldest heartbeat",
                "Longest time since a worker's loop last ran",
                f"max({_s(ProcessMetrics.HEARTBEAT_AGE)})",
                "s",
                thresholds=((0, "green"), (5, "orange"), (15, "red")),
            ),
            _tile(
                "Restarts, 15 m",
                "Worker restarts over the last 15 minutes",
                f"sum(increase({_s(ProcessMetrics.RESTARTS)}[15m]))",
                "short",
                thresholds=one,
            ),
            _tile("Requests", "Completed generations per second", ended, "reqps"),
            _tile(
                "Errors",
                "Share of generations that failed or were refused",
                q.failure_ratio(HERE),
                "percentunit",
                thresholds=alarm,
            ),
            _tile(
                "HTTP 5xx",
                "Share of HTTP responses with status 5xx",
                f"{q.rate(_s(FrontendMetrics.HTTP_RESPONSES, status='5xx'))}"
                f" / {q.rate(_s(FrontendMetrics.HTTP_RESPONSES))}",
                "percentunit",
                thresholds=alarm,
            ),
        ],
    )


def _queues() -> Row:
    depth = [Query(f"sum by (stage) ({_s(PoolMetrics.QUEUE_DEPTH)})", "Q_{{stage}}")]
    waits = [
        Query(q.quantile(0.95, PoolMetrics.WAIT, HERE, ("stage",)), "{{stage}} p95"),
        Query(f"max({_s(ControlMetrics.WAIT_TARGET)})", "prefill target"),
    ]
    requests = [
        Query(f"sum({_s(PrefillMetrics.WAITING)})", "waiting for prefill"),
        Query(f"sum({_s(PrefillMetrics.RUNNING)})", "in prefill"),
        Query(f"sum({_s(DecodeMetrics.WAITING)})", "waiting for decode"),
        Query(f"sum({_s(DecodeMetrics.RUNNING)})", "decoding"),
    ]
    received = [Query(q.rate(_s(PoolMetrics.QUERIES), ("stage",)), "{{stage}}")]
    return Row(
        "Queues",
        [
            _lines("Pool queues", "Queries that wait for a slot, by queue: Q_pre and Q_dec", depth, "short"),
            _lines("Pool wait", "Time from enqueue to slot, p95", waits, "s"),
            _lines("Requests", "Requests by stage", requests, "short"),
            _lines("Pool queries", "Queries received per second", received, "reqps"),
        ],
    )


def _saturation() -> Row:
    real, padded = (q.rate(_s(steps)) for steps in (PoolMetrics.SLOT_STEPS, PoolMetrics.PADDED_SLOT_STEPS))
    steps = q.rate(_s(PoolMetrics.EXTENDS))
    slots = [
        Query(f"{real} / {steps}", "active per step"),
        Query(f"({real} + {padded}) / {steps}", "padded per step"),
        Query(f"sum({_s(PoolMetrics.ACTIVE_SLOTS)} + {_s(PoolMetrics.PADDED_SLOTS)})", "padded now"),
        Query(f"sum({_s(PoolMetrics.SLOTS)})", "limit"),
        Query(f"sum({_s(PoolMetrics.PAUSED_SLOTS)})", "paused"),
    ]
    extending, looping = (
        q.rate(_s(seconds), _WORKER) for seconds in (PoolMetrics.EXTEND_SECONDS, PoolMetrics.LOOP_SECONDS)
    )
    # Extends and loop are summed here: a stacked panel would stack the workers on each other.
    busy = [
        Query(extending, f"{_OF_WORKER} extends"),
        Query(f"{extending} + {looping}", f"{_OF_WORKER} extends and loop"),
    ]
    blocks = [Query(_s(DecodeMetrics.KV_USED), _OF_WORKER)]
    link = [
        Query(q.rate(_s(DecodeMetrics.LINK_BUSY_SECONDS), _WORKER), _OF_WORKER),
        Query(q.rate(_nixl("xfer_time_seconds_sum"), _WORKER), f"{_OF_WORKER}, NIXL"),
        Query(f"max({_s(ControlMetrics.LINK_TARGET)})", "target"),
    ]
    bandwidth = [
        Query(_s(GpuMetrics.MEMORY_BUSY), "{{node}} GPU {{gpu}}"),
        Query(f"sum({_s(GpuMetrics.NVML_UP)})", "NVML available"),
    ]
    return Row(
        "Saturation",
        [
            _lines(
                "Pool slots",
                "Active slots per step (mean), and the CUDA graph size that the step is padded to",
                slots,
                "short",
            ),
            _lines(
                "Pool busy",
                "Share of time in extends, and in extends plus the rest of the loop",
                busy,
                "percentunit",
            ),
            _lines("KV in use", "Share of a decode worker's KV blocks in use", blocks, "percentunit", 4),
            _lines("KV link", "Share of time in which KV is transferred", link, "percentunit", 4),
            _lines(
                "GPU memory bandwidth",
                "Share of time in which GPU memory is read or written",
                bandwidth,
                "percentunit",
                4,
            ),
        ],
    )


def _kv() -> Row:
    hits = [
        Query(f"{q.rate(_s(role.PREFIX_HIT_TOKENS))} / {q.rate(_s(role.PREFIX_QUERY_TOKENS))}", name)
        for name, role in (("prefill", PrefillMetrics), ("decode", DecodeMetrics))
    ]
    tier_bytes = [
        Query(f"sum by (tier) (max by (node, tier) ({_s(metric)}))", f"{{{{tier}}}}{label}")
        for metric, label in ((KvMetrics.TIER_BYTES, ""), (KvMetrics.TIER_HELD, ", held"))
    ]
    moved = {"loaded": KvMetrics.TIER_LOADED, "stored": KvMetrics.TIER_STORED}
    lost = {"evicted": KvMetrics.TIER_EVICTED, "damaged": KvMetrics.TIER_DAMAGED, "not stored": KvMetrics.TIER_FAILED}
    evicted = [
        Query(q.rate(_s(role.KV_EVICTIONS)), f"{name} KV, evicted")
        for name, role in (("prefill", PrefillMetrics), ("decode", DecodeMetrics))
    ]

    def by_tier(metrics: Mapping[str, NamedMetric]) -> list[Query]:
        return [Query(q.rate(_s(metric), ("tier",)), f"{{{{tier}}}}, {name}") for name, metric in metrics.items()]

    return Row(
        "KV cache",
        [
            _lines(
                "KV in tiers",
                "Bytes of KV blocks in the host and disk tiers, and of those held for sequences that return to them",
                tier_bytes,
                "bytes",
            ),
            _lines("Prefix hits", "Share of looked-up tokens found in the worker's own KV blocks", hits, "percentunit"),
            _lines(
                "Tier transfers",
                "KV blocks loaded instead of computed, and stored, per second",
                by_tier(moved),
                "short",
            ),
            _lines(
                "Blocks lost", "KV blocks per second: evicted, damaged, not stored", by_tier(lost) + evicted, "short"
            ),
        ],
    )


def _latency() -> Row:
    means = [Query(q.mean(stage.time, HERE), stage.name) for stage in TO_FIRST_TOKEN]
    computed = [Query(q.rate(_s(PrefillMetrics.PROMPTS), ("by",)), "by {{by}}")]
    handed_over = [
        Query(q.rate(_s(DecodeMetrics.HANDOVER_BYTES), _WORKER), _OF_WORKER),
        Query(q.rate(_nixl("bytes_transferred_sum"), _WORKER), f"{_OF_WORKER}, NIXL"),
    ]
    causes = ("rejected", "lost", "expired")
    failed = [Query(q.rate(_s(PrefillMetrics.OFFERS, outcome=cause)), cause) for cause in causes]
    failed += [Query(q.rate(_nixl(f"num_{what}_total")), f"NIXL, {name}") for what, name in _NIXL_FAILURES.items()]
    reranks = [
        Query(q.rate(_s(RetrievingMetrics.RERANKS), ("outcome",)), "{{outcome}}"),
        Query(q.rate(_s(RetrievingMetrics.RERANK_PAIRS)), "pairs"),
    ]
    return Row(
        "Latency",
        [
            _lines(
                "TTFT by stage (mean)", "Mean time of each stage before the first token", means, "s", 8, stacked=True
            ),
            _percentiles(
                "Time to first token", "Time from the request's arrival to its first token", DecodeMetrics.TTFT
            ),
            _percentiles("Inter-token latency", "Time between two consecutive tokens", DecodeMetrics.INTER_TOKEN),
            _lines("Prompts", "Prompts computed per second, by role", computed, "reqps", 8),
            _lines("KV handed over", "Bytes of KV that decode received per second", handed_over, "bytes", 8),
            _lines("Failed hand-overs", "Failed KV hand-overs per second, by cause", failed, "reqps", 8),
            _percentiles("Reranking", "Time of reranking a search's passages", RetrievingMetrics.RERANK_TIME),
            _lines("Reranks", "Lists reranked per second by outcome, and their texts", reranks, "reqps", 16),
        ],
    )


def _control_loop() -> Row:
    reserve = [
        Query(_s(ControlMetrics.RESERVE), "{{node}} target"),
        Query(_s(PoolMetrics.RESERVE), _OF_WORKER),
    ]
    flush = [Query(_s(ControlMetrics.FLUSH_PREFILL), "{{node}} τ_pre")]
    stall = [
        Query(
            f"{q.rate(_s(DecodeMetrics.STALL_SECONDS))} / {q.rate(_s(DecodeMetrics.ROW_SECONDS))}",
            "stalled",
        ),
        Query(f"max({_s(ControlMetrics.STALL_TARGET)})", "target"),
    ]
    events = [
        Query(q.rate(_s(PoolMetrics.PREEMPTIONS)), "preemptions"),
        Query(q.rate(_s(PoolMetrics.DEADLINE_MISSES), ("stage",)), "{{stage}} deadlines missed"),
        Query(q.rate(_s(ControlMetrics.CHANGES)), "control changes"),
    ]
    loads = [Query(_s(ControlMetrics.ROLE_LOAD), "{{node}} {{role}}")]
    moves = [Query(q.rate(_s(ControlMetrics.MOVES), ("role",)), "{{role}}")]
    return Row(
        "Control loop",
        [
            _lines("Reserve r", "Share of slots reserved for prefill queries", reserve, "percentunit"),
            _lines("Flush τ_pre", "Time for which prefill queries leave the slots to decode", flush, "s"),
            _lines("Decode stalled", "Share of the rows' time spent waiting for probes", stall, "percentunit"),
            _lines("Events", "Scheduler and control events per second", events, "short"),
            _lines(
                "Load of prefill and decode",
                "Load relative to the capacity within the SLOs; with a planner only",
                loads,
                "short",
            ),
            _lines("Role changes", "Workers that change roles per second, by previous role", moves, "short"),
        ],
    )


def _collections() -> Row:
    segments = [
        Query(f"sum({_s(FrontendMetrics.COLLECTION_SEGMENTS)})", "segments"),
        Query(f"sum({_s(FrontendMetrics.COLLECTION_BUILDING)})", "building"),
    ]
    merges = [
        Query(q.rate(_s(FrontendMetrics.COLLECTION_SEALED), window="1h") + " * 3600", "sealed per hour"),
        Query(q.rate(_s(FrontendMetrics.COLLECTION_MERGED), window="1h") + " * 3600", "merged per hour"),
    ]
    rows = [
        Query(f"sum({_s(FrontendMetrics.COLLECTION_DOCUMENTS)})", "documents"),
        Query(f"sum({_s(FrontendMetrics.COLLECTION_GROWING)})", "growing"),
        Query(f"sum({_s(FrontendMetrics.COLLECTION_TOMBSTONES)})", "tombstones"),
    ]
    log = [Query(f"sum({_s(FrontendMetrics.COLLECTION_LOG_BYTES)})", "log")]
    return Row(
        "Collections",
        [
            _percentiles("Writes", "Time until a write to a collection is acknowledged", FrontendMetrics.WRITE_TIME),
            _lines("Documents", "Documents, growing rows, and tombstones not yet merged away", rows, "short", 8),
            _lines("Log", "Bytes of the write-ahead log that a restart replays", log, "bytes", 8),
            _lines("Segments", "Segments of the collections, and segments being built", segments, "short", 8),
            _lines("Seals and merges", "Segments built from the log, and by merges, per hour", merges, "short", 8),
        ],
    )


def _workers_and_gpus() -> Row:
    by = "by (node, role, worker, device, uuid)"
    placed = f"max {by} ({_s(ProcessMetrics.INFO)})"

    def column(metric: NamedMetric, name: str, unit: str = "") -> Query:
        joined = f"{placed} * on (node, worker) group_left () max by (node, worker) ({_s(metric)})"
        return Query(joined, name, unit)

    workers = [
        column(ProcessMetrics.UP, "up"),
        column(ProcessMetrics.RESTARTS, "restarts"),
        column(ProcessMetrics.HEARTBEAT_AGE, "heartbeat", "s"),
        column(ProcessMetrics.RESIDENT, "memory", "bytes"),
        column(ProcessMetrics.THREADS, "threads"),
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
        [
            Panel(
                "table",
                "Workers by role",
                "State, restarts, heartbeat, memory, threads and file descriptors of each worker",
                workers,
                width=12,
                height=9,
            ),
            Panel("table", "GPUs", "Utilization, memory and power by GPU, from NVML", gpus, width=12, height=9),
        ],
    )


def _gpu(metric: NamedMetric) -> str:
    return f"max by (node, gpu, uuid) ({_s(metric)})"
