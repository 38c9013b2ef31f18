"""The metrics of a node, declared once: what each role writes into its table (`exporter.py` gives it to Prometheus).

Whoever writes or reads a metric names the object declared here, so that a misspelt one fails when it is imported; its
`str()` is its name in Prometheus. What does not come from a worker's table is in `runtime/node/supervisor_metrics.py`.

Names follow vLLM's where it has one (time to first token, inter-token latency …) with the prefix `trinity_`; seconds
and bytes; buckets of waits begin at 50 µs, since a pool answers in less than a millisecond. What differs by stage,
reason or outcome alone is one name with a label; labels have a handful of values, fixed here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args

from runtime.node.config import Role, SloSection
from runtime.node.supervisor_metrics import NamedMetric

_WAITS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_FIRST_TOKENS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_EXTENDS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0)


@dataclass(frozen=True, eq=False)
class Counter(NamedMetric):
    """A number that only grows, also over the worker's restarts."""

    name: str
    help: str
    label: tuple[str, str] | None = None
    kind: ClassVar[str] = "counter"


@dataclass(frozen=True, eq=False)
class Gauge(NamedMetric):
    """A number that a new process begins with 0."""

    name: str
    help: str
    label: tuple[str, str] | None = None
    kind: ClassVar[str] = "gauge"


@dataclass(frozen=True, eq=False)
class Histogram(NamedMetric):
    """Counts by bucket, and the sum. SLOs are judged by buckets too, so a `limit` of the configuration is an edge."""

    name: str
    help: str
    buckets: tuple[float, ...]
    label: tuple[str, str] | None = None
    limit: Callable[[SloSection], float] | None = None
    kind: ClassVar[str] = "histogram"

    def edges(self, slo: SloSection) -> tuple[float, ...]:
        """The upper edges of all buckets but the last, which has none."""
        return tuple(sorted({*self.buckets, self.limit(slo)})) if self.limit else self.buckets


Metric = Counter | Gauge | Histogram
Value = TypeVar("Value", bound=str)
Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class ByLabel(NamedMetric, dict[Value, Kind]):
    """Metrics of one name, by the value of a label: the values of the type `values`, a `Literal`."""

    def __init__(self, kind: Callable[..., Kind], name: str, help: str, label: str, values: Any, *more: Any) -> None:
        super().__init__({value: kind(name, help, *more, label=(label, value)) for value in get_args(values)})
        self.name = name


Stage = Literal["prefill", "decode"]
OfferOutcome = Literal["accepted", "rejected", "withdrawn", "lost", "expired"]
"""How an offer of a hand-over ends: lost with the decode process, or expired without a word from it."""
Slo = Literal["ttft", "tpot", "search", "all"]
"""What is promised: the first token, each later token, a search alone; "all": every promise to a generation."""
Refusal = Literal["overloaded", "deadline_exceeded", "invalid_request"]
Outcome = Literal["finished", "cancelled", "failed", "refused", "invalid"]
"""How a generation ends; "invalid": by the client's mistake, found before it was accepted or in a worker."""
StatusClass = Literal["2xx", "4xx", "5xx"]
Tier = Literal["host", "disk"]
"""Where KV blocks are kept beside a worker's own memory."""
BuildPart = Literal["rows", "graph", "written"]
"""What a segment's build has to do: read its rows, build its graph, write the segment."""
CacheEvent = Literal["hit", "miss", "stored", "expired", "evicted"]


class WorkerMetrics:
    """What every worker writes."""

    LOG_LINES_LOST = Counter("trinity_log_lines_lost_total", "Lines that the log file of a worker has not got")
    MALFORMED = Counter("trinity_malformed_messages_total", "Messages that were dropped: none of the protocol's")


class PoolMetrics(WorkerMetrics):
    QUERIES = ByLabel[Stage, Counter](Counter, "trinity_pool_queries_total", "Queries received", "stage", Stage)
    QUERIES_REFUSED = Counter("trinity_pool_queries_refused_total", "Queries answered with an error")
    REFUSED = ByLabel[Refusal, Counter](
        Counter,
        "trinity_pool_refused_total",
        "Queries refused: the queue was full, the deadline could not be met, or what was asked cannot be",
        "reason",
        Refusal,
    )
    DEADLINE_MISSES = ByLabel[Stage, Counter](
        Counter, "trinity_pool_deadline_misses_total", "Answers after the deadline or target", "stage", Stage
    )
    PREEMPTIONS = Counter("trinity_pool_preemptions_total", "Decode queries paused for prefill queries")
    LOOP_SECONDS = Counter("trinity_pool_loop_seconds_total", "What the pool's loop took between engine steps")
    EXTEND_SECONDS = Counter("trinity_pool_extend_seconds_total", "What engine steps took")
    EXTENDS = Counter("trinity_pool_extends_total", "Engine steps")
    SLOT_STEPS = Counter("trinity_pool_slot_steps_total", "Active slots summed over engine steps")
    PADDED_SLOT_STEPS = Counter("trinity_pool_padded_slot_steps_total", "Padded slots summed over engine steps")
    QUEUE_DEPTH = ByLabel[Stage, Gauge](Gauge, "trinity_pool_queue_depth", "Queries waiting for a slot", "stage", Stage)
    ACTIVE_SLOTS = Gauge("trinity_pool_active_slots", "Slots that the next extend advances")
    PADDED_SLOTS = Gauge(
        "trinity_pool_padded_slots", "Slots that a step covers without a query: a GPU's graphs have fixed sizes"
    )
    PAUSED_SLOTS = Gauge("trinity_pool_paused_slots", "Slots of paused decode queries")
    SLOTS = Gauge("trinity_pool_slots", "Active slots at most")
    RESERVE = Gauge("trinity_pool_reserve_ratio", "Share of the slots owed to prefill queries now, 0 to 1")
    FLUSH_PREFILL = Gauge("trinity_pool_flush_prefill_seconds", "How long prefill leaves the slots to decode now")
    CLIENTS = Gauge("trinity_pool_clients", "Attached clients")
    UNAVAILABLE = Gauge("trinity_pool_collections_unavailable", "Collections that this worker cannot serve")
    CHECKSUMS = Gauge("trinity_pool_checksums_compared_ratio", "Share of the bytes to be checked that were, 0 to 1")
    RELOAD = Gauge("trinity_pool_reload", "The last reload of collections that is over, by its number")
    RELOAD_REFUSED = Gauge(
        "trinity_pool_reload_refused", "1 if a collection was not replaced by it: what lies there is damaged"
    )
    WAIT = ByLabel[Stage, Histogram](
        Histogram, "trinity_pool_wait_seconds", "Queries by stage: from enqueue to slot", "stage", Stage, _WAITS
    )
    LATENCY = Histogram("trinity_pool_query_seconds", "All queries: from enqueue to result", _WAITS)
    QUERY_EXTENDS = Histogram("trinity_pool_query_extends", "Extends a query took", _EXTENDS)


class RetrievingMetrics(WorkerMetrics):
    """What those write that ask the pool."""

    WITHOUT_DOCUMENTS = Gauge(
        "trinity_collections_without_documents",
        "Collections of which no pool is asked: the documents of the build that they serve are not there",
    )
    RELOAD = Gauge("trinity_documents_reload", "The last reload of documents that is over, by its number")
    RELOAD_REFUSED = Gauge("trinity_documents_reload_refused", "1 if documents of it cannot be used here")


def _tier(what: str, help: str) -> "ByLabel[Tier, Counter]":
    return ByLabel(Counter, f"trinity_kv_tier_{what}_total", help, "tier", Tier)


class KvMetrics(RetrievingMetrics):
    TIER_LOADED = _tier("loaded_blocks", "KV blocks found in a tier and loaded, not computed")
    TIER_STORED = _tier("stored_blocks", "KV blocks written to a tier")
    TIER_EVICTED = _tier("evicted_blocks", "The longest unused blocks of a tier, removed to make room")
    TIER_DAMAGED = _tier("damaged_blocks", "Damaged or foreign files of a tier: removed, the blocks computed again")
    TIER_FAILED = _tier("failed_writes", "KV blocks that could not be written to a tier, for want of room mostly")
    TIER_BYTES = ByLabel[Tier, Gauge](
        Gauge,
        "trinity_kv_tier_bytes",
        "Bytes in a tier that all workers share, when this one last looked",
        "tier",
        Tier,
    )
    TIER_BLOCKS: ClassVar[dict[str, ByLabel[Tier, Counter]]] = {
        "loaded": TIER_LOADED, "stored": TIER_STORED, "evicted": TIER_EVICTED, "damaged": TIER_DAMAGED,
        "failed": TIER_FAILED,
    }  # fmt: skip


class PrefillMetrics(KvMetrics):
    PROMPTS = ByLabel[Stage, Counter](
        Counter, "trinity_prompts_total", "Prompts, by the workers that compute them", "by", Stage
    )
    PROMPT_TOKENS = Counter("trinity_prompt_tokens_total", "Prompt tokens run through prefill")
    NEW_TOKENS = ByLabel[Stage, Counter](
        Counter, "trinity_prompt_new_tokens_total", "Tokens to compute of prompts that came, by who is to", "by", Stage
    )
    PASS_SECONDS = Counter("trinity_prefill_pass_seconds_total", "Time in passes through the model")
    OFFERS = ByLabel[OfferOutcome, Counter](
        Counter,
        "trinity_kv_offers_total",
        "Offers of KV, of prompts without KV, and of announcements, by how they ended",
        "outcome",
        OfferOutcome,
    )
    FAILED = Counter("trinity_prefill_failed_total", "Requests that ended with an error in prefill")
    PREFIX_QUERY_TOKENS = Counter(
        "trinity_prefill_prefix_query_tokens_total", "Prompt tokens looked up among the cached KV blocks"
    )
    PREFIX_HIT_TOKENS = Counter(
        "trinity_prefill_prefix_hit_tokens_total", "The part of these that was found, and not computed again"
    )
    KV_EVICTIONS = Counter("trinity_prefill_kv_evictions_total", "Cached KV blocks given up for new ones")
    KV_BLOCKS = Gauge("trinity_prefill_kv_blocks", "KV blocks")
    KV_BLOCKS_HELD = Gauge("trinity_prefill_kv_blocks_held", "KV blocks that prompts hold")
    KV_BLOCKS_CACHED = Gauge("trinity_prefill_kv_blocks_cached", "KV blocks kept for prompts to come")
    WAITING = Gauge("trinity_prefill_waiting", "Requests waiting for a prefill slot")
    RUNNING = Gauge("trinity_prefill_running", "Requests in prefill or waiting for their hand-over")
    QUEUE_TIME = Histogram(
        "trinity_request_queue_time_seconds", "From the frontend to a prefill worker's hands", _WAITS
    )
    EMBED_TIME = Histogram("trinity_request_embed_time_seconds", "Embedding a prompt's query", _WAITS)
    RETRIEVAL_TIME = Histogram(
        "trinity_request_retrieval_time_seconds", "From the query vector to its passages", _WAITS
    )
    ADMISSION_TIME = Histogram(
        "trinity_request_admission_time_seconds", "Until prefill has KV blocks for a prompt", _WAITS
    )
    PREFILL_TIME = Histogram(
        "trinity_request_prefill_time_seconds", "From the first chunk to the first token", _FIRST_TOKENS
    )


class DecodeMetrics(KvMetrics):
    GENERATION_TOKENS = Counter("trinity_generation_tokens_total", "Tokens generated")
    FAILED = Counter("trinity_decode_failed_total", "Requests that ended with an error in decode")
    PROBES = Counter("trinity_decode_probes_total", "Probes asked")
    CANCELLED = Counter("trinity_decode_cancelled_total", "Requests cancelled while decoding")
    HANDOVER_BYTES = Counter("trinity_kv_handover_bytes_total", "KV bytes pulled from prefill")
    LINK_BUSY_SECONDS = Counter("trinity_kv_link_busy_seconds_total", "Time in which KV was being pulled")
    ROW_SECONDS = Counter("trinity_decode_row_seconds_total", "Time of all rows in the running batch, summed")
    STALL_SECONDS = Counter(
        "trinity_decode_stall_seconds_total", "The part of the rows' time in which they waited for a probe"
    )
    PREFIX_QUERY_TOKENS = Counter(
        "trinity_decode_prefix_query_tokens_total", "Handed over tokens looked up among the KV blocks here"
    )
    PREFIX_HIT_TOKENS = Counter(
        "trinity_decode_prefix_hit_tokens_total", "The part of these that was found, and not pulled again"
    )
    KV_EVICTIONS = Counter("trinity_decode_kv_evictions_total", "Cached KV blocks given up for new ones")
    PREEMPTIONS = Counter("trinity_decode_preemptions_total", "Rows that made room for others")
    KV_BLOCKS = Gauge("trinity_decode_kv_blocks", "KV blocks")
    KV_BLOCKS_HELD = Gauge("trinity_decode_kv_blocks_held", "KV blocks that rows and hand-overs hold")
    KV_BLOCKS_CACHED = Gauge("trinity_decode_kv_blocks_cached", "KV blocks kept for prompts to come")
    WAITING = Gauge(
        "trinity_num_requests_waiting", "Hand-overs and rows waiting for blocks or for a place in the batch"
    )
    RUNNING = Gauge("trinity_num_requests_running", "Rows of the running batch")
    KV_USED = Gauge("trinity_kv_cache_usage_perc", "Share of decode's KV blocks that rows and hand-overs hold, 0 to 1")
    HANDOVER_TIME = Histogram(
        "trinity_request_handover_time_seconds", "From prefill's end until decode has the KV", _WAITS
    )
    ROOM_TIME = Histogram("trinity_request_room_time_seconds", "From prefill's end until decode has room", _WAITS)
    PULL_TIME = Histogram(
        "trinity_request_pull_time_seconds", "Pulling a prompt's KV blocks, between decode's steps", _WAITS
    )
    ADMISSION_TIME = PrefillMetrics.ADMISSION_TIME  # of prompts that it computes itself
    PREFILL_TIME = PrefillMetrics.PREFILL_TIME
    DECODE_TIME = Histogram("trinity_request_decode_time_seconds", "From the first token to the last", _FIRST_TOKENS)
    TTFT = Histogram(
        "trinity_time_to_first_token_seconds",
        "From the frontend to the first token",
        _FIRST_TOKENS,
        limit=lambda slo: slo.ttft_s,
    )
    TPOT = Histogram(
        "trinity_request_time_per_output_token_seconds",
        "A request's mean time per output token",
        _TOKENS,
        limit=lambda slo: slo.tpot_s,
    )
    INTER_TOKEN = Histogram(
        "trinity_inter_token_latency_seconds", "Between two tokens of a request", _TOKENS, limit=lambda slo: slo.tpot_s
    )
    E2E = Histogram("trinity_e2e_request_latency_seconds", "From the frontend to the last token", _FIRST_TOKENS)
    PROBE_STALL = Histogram("trinity_decode_probe_stall_seconds", "How long a probe held its row", _WAITS)
    PROBE_TIME = Histogram("trinity_decode_probe_seconds", "From asking a probe to its end", _WAITS)


class FrontendMetrics(RetrievingMetrics):
    RESTARTED = Counter(
        "trinity_requests_restarted_total", "Times that a request was started again: a worker of its had died"
    )
    REQUESTS = ByLabel[Outcome, Counter](
        Counter,
        "trinity_requests_total",
        "Generations that ended: with a whole answer, with a client that went away, with an error, or refused",
        "outcome",
        Outcome,
    )
    HTTP_RESPONSES = ByLabel[StatusClass, Counter](
        Counter,
        "trinity_http_responses_total",
        "HTTP answers by the class of their status, but for /health and /ready",
        "status",
        StatusClass,
    )
    SLO_REQUESTS = ByLabel[Slo, Counter](
        Counter,
        "trinity_slo_requests_total",
        "Requests to which the SLO applies; not those whose client went away or asked for what cannot be",
        "slo",
        Slo,
    )
    SLO_VIOLATIONS = ByLabel[Slo, Counter](
        Counter,
        "trinity_slo_violations_total",
        "Of these: answered after the limit, failed or refused",
        "slo",
        Slo,
    )
    ANSWER_CACHE = ByLabel[CacheEvent, Counter](
        Counter,
        "trinity_answer_cache_events_total",
        "Prompts looked up among stored answers: found or not; answers stored, expired, gone to make room",
        "event",
        CacheEvent,
    )
    SEARCH_TIME = Histogram(
        "trinity_search_request_seconds", "Answered requests for a search alone", _WAITS, limit=lambda slo: slo.search_s
    )
    WRITE_TIME = Histogram(
        "trinity_live_write_seconds", "Writes to live collections, until they are acknowledged", _WAITS
    )
    LIVE_DOCUMENTS = Gauge("trinity_live_documents", "Documents of the live collections that are written to")
    LIVE_SEGMENTS = Gauge("trinity_live_segments", "Their sealed segments")
    LIVE_GROWING = Gauge("trinity_live_growing_rows", "Their rows that are not sealed yet")
    LIVE_TOMBSTONES = Gauge("trinity_live_tombstones", "Deleted rows of their segments")
    LIVE_LOG_BYTES = Gauge("trinity_live_log_bytes", "Bytes of their logs")
    LIVE_SEALED = Counter("trinity_live_sealed_total", "Segments sealed from their logs")
    LIVE_MERGED = Counter("trinity_live_merged_total", "Segments built from others")
    LIVE_BUILDING = Gauge(
        "trinity_live_builds_running", "Segments that are being sealed or merged beside their writers"
    )
    LIVE_BUILT = ByLabel[BuildPart, Gauge](
        Gauge,
        "trinity_live_build_done_ratio",
        "Of the build that runs, or the one that is least far: how much is done of each part, 0 to 1",
        "part",
        BuildPart,
    )
    IN_FLIGHT = Gauge("trinity_requests_in_flight", "Requests accepted and not yet ended")
    # What it says of answers that others' servers write; of the node's own the workers say it.
    PROMPT_TOKENS = PrefillMetrics.PROMPT_TOKENS
    GENERATION_TOKENS = DecodeMetrics.GENERATION_TOKENS
    EMBED_TIME = PrefillMetrics.EMBED_TIME
    RETRIEVAL_TIME = PrefillMetrics.RETRIEVAL_TIME
    DECODE_TIME = DecodeMetrics.DECODE_TIME
    TTFT = DecodeMetrics.TTFT
    TPOT = DecodeMetrics.TPOT
    E2E = DecodeMetrics.E2E


def _of(owner: type) -> tuple[Metric, ...]:
    """What a class and those that it extends declare, in that order."""
    declared = [value for cls in owner.__mro__ for value in vars(cls).values()]
    found: list[Metric] = []
    for value in declared:
        found += [value] if isinstance(value, Metric) else value.values() if isinstance(value, ByLabel) else ()
    return tuple(found)


METRICS: dict[Role, tuple[Metric, ...]] = {
    "pool": _of(PoolMetrics),
    "prefill": _of(PrefillMetrics),
    "decode": _of(DecodeMetrics),
    "engine": _of(WorkerMetrics),  # vLLM has its own
    "frontend": _of(FrontendMetrics),
}

Knob = Literal[
    "reserve",  # share of the slots owed to prefill queries, 0 to 1
    "flush_prefill_s",  # how long a prefill query leaves the slots to decode queries
    "reload_of",  # which collection by its place in the configuration, or -1 for all,
    "reload",  # is to be reloaded; another number asks once more
    "draining",  # 1 while an operator has the node drain
]
_RELOADS: tuple[Knob, ...] = ("reload_of", "reload")
KNOBS: dict[Role, tuple[Knob, ...]] = {
    "pool": ("reserve", "flush_prefill_s", *_RELOADS),
    "prefill": _RELOADS,
    "decode": _RELOADS,
    "engine": (),
    "frontend": (*_RELOADS, "draining"),
}
"""What the supervisor sets in a worker at run time, through its table."""
