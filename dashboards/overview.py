"""The first screen, in the order in which somebody on call asks.

Are promises kept? Is it up? Who waits? What is full? What is kept of KV? Where does the time go? What does the
controller do? What is written? Which GPU?
"""

from collections.abc import Mapping
from typing import Any, get_args

from dashboards import queries as q
from dashboards.grafana import Json, Panel, Query, Row, dashboard, label_variable
from runtime.node.metrics.worker_metrics import (
    BuildPart,
    DecodeMetrics,
    FrontendMetrics,
    KvMetrics,
    PoolMetrics,
    PrefillMetrics,
)
from runtime.node.supervisor_metrics import ControlMetrics, GpuMetrics, NamedMetric, NodeMetrics, ProcessMetrics
from runtime.serving.stages import TO_FIRST_TOKEN

UID = "trinity-overview"
HERE = 'node=~"$node",model_name=~"$model"'
_WORKER = ("node", "worker")  # workers of different nodes are called alike
_OF_WORKER = "{{node}} {{worker}}"
_SLO = f'{HERE},slo="$slo"'


def overview() -> Json:
    """The overview dashboard, from the metrics that a node exports."""
    variables = [
        label_variable("node", "Node", NodeMetrics.INFO, "node"),
        label_variable("model", "Model", NodeMetrics.INFO, "model_name"),
        label_variable("slo", "SLO", FrontendMetrics.SLO_REQUESTS, "slo", only="all"),
    ]
    rows = [_promises(), _up(), _queues(), _saturation(), _kv(), _latency(), _controller(), _live(), _places()]
    return dashboard(UID, "Trinity: overview", rows, variables)


def _s(metric: NamedMetric, **labels: str) -> str:
    return q.series(metric, HERE, **labels)


def _lines(title: str, description: str, queries: list[Query], unit: str, width: int = 6, **look: Any) -> Panel:
    return Panel("timeseries", title, description, queries, unit, width, **look)


def _tile(title: str, description: str, expr: str, unit: str, **look: Any) -> Panel:
    return Panel("stat", title, description, [Query(expr)], unit, width=4, height=4, **look)


def _percentiles(title: str, description: str, histogram: NamedMetric) -> Panel:
    queries = [Query(q.quantile(p, histogram, HERE), f"p{round(100 * p)}") for p in (0.5, 0.95, 0.99)]
    return _lines(title, description, queries, "s", 8)


def _promises() -> Row:
    burning = ((0, "green"), (6, "orange"), (14.4, "red"))
    kept = ((0, "red"), (0.95, "orange"), (0.99, "green"))
    attainment = Query(f"1 - ({q.broken(HERE)})", "{{node}} {{slo}}")
    return Row(
        "Are promises kept?",
        [
            _tile(
                "SLO attainment",
                "Share of sent requests that kept $slo, in the last hour",
                f"1 - ({q.broken(_SLO, '1h')})",
                "percentunit",
                thresholds=kept,
            ),
            _tile("Burn rate, 1 h", "1 uses the budget up exactly", q.burn(_SLO, "1h"), "short", thresholds=burning),
            _tile("Burn rate, 5 m", "Is it still going on?", q.burn(_SLO, "5m"), "short", thresholds=burning),
            _lines("Attainment", "Share of sent requests that kept their limit", [attainment], "percentunit", height=4),
            _lines("Burn rate", "Pages at 14.4 and 6", [Query(q.burn(HERE), "{{node}} {{slo}}")], "short", height=4),
        ],
    )


def _up() -> Row:
    ended = q.rate(_s(FrontendMetrics.REQUESTS))
    alarm = ((0, "green"), (0.001, "orange"), (0.01, "red"))
    one = ((0, "green"), (1, "red"))
    return Row(
        "Is it up?",
        [
            _tile("Workers not ready", "Of the plan", f"sum(1 - {_s(ProcessMetrics.UP)})", "short", thresholds=one),
            _tile(
                "Oldest heartbeat",
                "Since a loop last ran",
                f"max({_s(ProcessMetrics.HEARTBEAT_AGE)})",
                "s",
                thresholds=((0, "green"), (5, "orange"), (15, "red")),
            ),
            _tile(
                "Restarts, 15 m",
                "Workers that died",
                f"sum(increase({_s(ProcessMetrics.RESTARTS)}[15m]))",
                "short",
                thresholds=one,
            ),
            _tile("Requests", "Generations that ended, a second", ended, "reqps"),
            _tile("Errors", "Share that failed or was refused", q.failing(HERE), "percentunit", thresholds=alarm),
            _tile(
                "HTTP 5xx",
                "Of all answers",
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
        "Who waits?",
        [
            _lines("Pool queues", "Queries that wait for a slot: Q_pre and Q_dec", depth, "short"),
            _lines("Pool wait", "From enqueue to slot", waits, "s"),
            _lines("Requests", "By where they are", requests, "short"),
            _lines("Pool queries", "Received, a second", received, "reqps"),
        ],
    )


def _saturation() -> Row:
    real, padded = (q.rate(_s(steps)) for steps in (PoolMetrics.SLOT_STEPS, PoolMetrics.PADDED_SLOT_STEPS))
    steps = q.rate(_s(PoolMetrics.EXTENDS))
    slots = [
        Query(f"{real} / {steps}", "real a step"),
        Query(f"({real} + {padded}) / {steps}", "padded to"),
        Query(f"sum({_s(PoolMetrics.ACTIVE_SLOTS)} + {_s(PoolMetrics.PADDED_SLOTS)})", "padded now"),
        Query(f"sum({_s(PoolMetrics.SLOTS)})", "at most"),
        Query(f"sum({_s(PoolMetrics.PAUSED_SLOTS)})", "paused"),
    ]
    extending, looping = (
        q.rate(_s(seconds), _WORKER) for seconds in (PoolMetrics.EXTEND_SECONDS, PoolMetrics.LOOP_SECONDS)
    )
    # Each worker's loop is stacked on its own extends by a sum: a stacked panel would stack the workers on one another.
    busy = [
        Query(extending, f"{_OF_WORKER} extends"),
        Query(f"{extending} + {looping}", f"{_OF_WORKER} with its loop"),
    ]
    blocks = [Query(_s(DecodeMetrics.KV_USED), _OF_WORKER)]
    link = [
        Query(q.rate(_s(DecodeMetrics.LINK_BUSY_SECONDS), _WORKER), _OF_WORKER),
        Query(f"max({_s(ControlMetrics.LINK_TARGET)})", "target"),
    ]
    bandwidth = [
        Query(_s(GpuMetrics.MEMORY_BUSY), "{{node}} GPU {{gpu}}", needs_gpu=True),
        Query(f"sum({_s(GpuMetrics.NVML_UP)})", "NVML works"),
    ]
    return Row(
        "What is full?",
        [
            _lines(
                "Pool slots",
                "Mean of the real ones in a step, and of the size of the GPU's graph that it is padded to",
                slots,
                "short",
            ),
            _lines(
                "Pool busy",
                "Share of time in engine steps, and with what the loop does beside them stacked on it",
                busy,
                "percentunit",
            ),
            _lines("KV in use", "Share of a decode worker's KV", blocks, "percentunit", 4),
            _lines("KV link", "Share of time in which KV is pulled", link, "percentunit", 4),
            _lines(
                "GPU memory bandwidth", "Share of time in which memory is read or written", bandwidth, "percentunit", 4
            ),
        ],
    )


def _kv() -> Row:
    hits = [
        Query(f"{q.rate(_s(role.PREFIX_HIT_TOKENS))} / {q.rate(_s(role.PREFIX_QUERY_TOKENS))}", name)
        for name, role in (("prefill", PrefillMetrics), ("decode", DecodeMetrics))
    ]
    kept = [Query(f"sum by (tier) (max by (node, tier) ({_s(KvMetrics.TIER_BYTES)}))", "{{tier}}")]
    moved = {"fetched": KvMetrics.TIER_LOADED, "written": KvMetrics.TIER_STORED}
    lost = {"evicted": KvMetrics.TIER_EVICTED, "damaged": KvMetrics.TIER_DAMAGED, "not written": KvMetrics.TIER_FAILED}
    evicted = [
        Query(q.rate(_s(role.KV_EVICTIONS)), f"{name}'s own, evicted")
        for name, role in (("prefill", PrefillMetrics), ("decode", DecodeMetrics))
    ]

    def by_tier(metrics: Mapping[str, NamedMetric]) -> list[Query]:
        return [Query(q.rate(_s(metric), ("tier",)), f"{{{{tier}}}}, {name}") for name, metric in metrics.items()]

    return Row(
        "What is kept of KV?",
        [
            _lines("KV in tiers", "Bytes of the host's and the disk's blocks", kept, "bytes"),
            _lines("Prefix hits", "Share of the tokens looked up that a worker's own blocks had", hits, "percentunit"),
            _lines(
                "Blocks to and from tiers",
                "Fetched instead of computed, and written, a second",
                by_tier(moved),
                "short",
            ),
            _lines(
                "Blocks lost", "A second: evicted to make room, damaged, not written", by_tier(lost) + evicted, "short"
            ),
        ],
    )


def _latency() -> Row:
    means = [Query(q.mean(stage.time, HERE), stage.name) for stage in TO_FIRST_TOKEN]
    computed = [Query(q.rate(_s(PrefillMetrics.PROMPTS), ("by",)), "by {{by}}")]
    causes = ("rejected", "lost", "expired")
    failed = [Query(q.rate(_s(PrefillMetrics.OFFERS, outcome=cause)), cause) for cause in causes]
    return Row(
        "Where does the time go?",
        [
            _lines("TTFT by stage (mean)", "Stages before the first token", means, "s", 8, stacked=True),
            _percentiles("Time to first token", "Frontend to first token", DecodeMetrics.TTFT),
            _percentiles("Inter-token latency", "Between two tokens", DecodeMetrics.INTER_TOKEN),
            _lines("Prompts", "A second, by the workers that compute them", computed, "reqps", 12),
            _lines("Hand-overs that failed", "A second, by cause", failed, "reqps", 12),
        ],
    )


def _controller() -> Row:
    reserve = [
        Query(_s(ControlMetrics.RESERVE), "{{node}} wanted"),
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
        Query(q.rate(_s(PoolMetrics.DEADLINE_MISSES), ("stage",)), "missed {{stage}} deadlines"),
        Query(q.rate(_s(ControlMetrics.CHANGES)), "changes of mind"),
    ]
    loads = [Query(_s(ControlMetrics.ROLE_LOAD), "{{node}} {{role}}")]
    moves = [Query(q.rate(_s(ControlMetrics.MOVES), ("role",)), "{{role}}")]
    return Row(
        "What does the controller do?",
        [
            _lines("Reserve r", "Share of slots owed to prefill queries", reserve, "percentunit"),
            _lines("Flush τ_pre", "How long prefill leaves the slots to decode", flush, "s"),
            _lines("Decode stalled", "Share of the rows' time in which they wait for a probe", stall, "percentunit"),
            _lines("Events", "A second", events, "short"),
            _lines(
                "Load of prefill and decode", "Over what each can do within the SLOs, with a planner", loads, "short"
            ),
            _lines("Workers that change roles", "A second, by the role that loses one", moves, "short"),
        ],
    )


def _live() -> Row:
    segments = [
        Query(f"sum({_s(FrontendMetrics.LIVE_SEGMENTS)})", "segments"),
        Query(f"sum({_s(FrontendMetrics.LIVE_BUILDING)})", "being built"),
    ]
    merges = [
        Query(q.rate(_s(FrontendMetrics.LIVE_SEALED), window="1h") + " * 3600", "sealed an hour"),
        Query(q.rate(_s(FrontendMetrics.LIVE_MERGED), window="1h") + " * 3600", "merged an hour"),
    ]
    built = [Query(f"max({_s(FrontendMetrics.LIVE_BUILT, part=part)})", part) for part in get_args(BuildPart)]
    rows = [
        Query(f"sum({_s(FrontendMetrics.LIVE_DOCUMENTS)})", "documents"),
        Query(f"sum({_s(FrontendMetrics.LIVE_GROWING)})", "not sealed"),
        Query(f"sum({_s(FrontendMetrics.LIVE_TOMBSTONES)})", "deleted in segments"),
    ]
    log = [Query(f"sum({_s(FrontendMetrics.LIVE_LOG_BYTES)})", "log")]
    return Row(
        "What is written?",
        [
            _percentiles("Writes", "Until a write to a live collection is acknowledged", FrontendMetrics.WRITE_TIME),
            _lines("Documents", "There, not sealed yet, and deleted but not merged away", rows, "short", 8),
            _lines("Log", "Bytes that a restart reads", log, "bytes", 8),
            _lines("Segments", "Of the live collections that are written to", segments, "short", 8),
            _lines("Seals and merges", "Segments built from logs, and from others", merges, "short", 8),
            _lines("Build", "What is done of the segment that is being built", built, "percentunit", 8),
        ],
    )


def _places() -> Row:
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
        Query(_gpu(GpuMetrics.BUSY), "busy", "percentunit", needs_gpu=True),
        Query(_gpu(GpuMetrics.MEMORY_BUSY), "bandwidth", "percentunit", needs_gpu=True),
        Query(_gpu(GpuMetrics.MEMORY_USED), "used", "bytes", needs_gpu=True),
        Query(_gpu(GpuMetrics.MEMORY), "memory", "bytes", needs_gpu=True),
        Query(_gpu(GpuMetrics.POWER), "power", "watt", needs_gpu=True),
    ]
    return Row(
        "Which GPU?",
        [
            Panel("table", "Workers by role", "Where each runs", workers, width=12, height=9),
            Panel("table", "GPUs", "As NVML sees them", gpus, width=12, height=9),
        ],
    )


def _gpu(metric: NamedMetric) -> str:
    return f"max by (node, gpu, uuid) ({_s(metric)})"
