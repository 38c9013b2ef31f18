"""Declarations of the metrics that workers write into their tables, by role (`exporter.py` exports them to Prometheus).

Code refers to metrics by the objects declared here, so that a misspelt one fails at import; `str()` of one is its name
in Prometheus. Metrics that do not come from workers' tables are in `runtime/node/supervisor_metrics.py`.

Names follow vLLM's where it has the metric (time to first token, inter-token latency …) with the prefix `trinity_`.
Units are seconds and bytes; buckets of waits start at 50 µs, because a pool answers in less than a millisecond. Metrics
that differ only by stage, reason or outcome share one name with a label; labels have few values, fixed here.
"""

from typing import ClassVar, Literal

from runtime.node.config import HandoverMode, Role
from runtime.node.metrics.kinds import ByLabel, Counter, Gauge, Histogram, Label, Metric

_WAITS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_FIRST_TOKENS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_EXTENDS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0)

Stage = Literal["prefill", "decode"]
OfferOutcome = Literal["accepted", "rejected", "withdrawn", "lost", "expired"]
"""How an offer of a hand-over ends: "lost" with the decode process, "expired" without a reply from it."""
Slo = Literal["ttft", "tpot", "search", "all"]
"""SLOs: time to first token, time per output token, search; "all": all SLOs of a generation."""
Refusal = Literal["overloaded", "deadline_exceeded", "invalid_request"]
Outcome = Literal["finished", "cancelled", "failed", "refused", "invalid"]
"""How a generation ends; "invalid": an error of the client, found before admission or by a worker."""
StatusClass = Literal["2xx", "4xx", "5xx"]
Tier = Literal["host", "disk"]
"""Tiers of KV blocks besides a worker's own memory."""
RerankOutcome = Literal["reranked", "late", "failed"]
CacheEvent = Literal["hit", "miss", "stored", "expired", "evicted"]

STAGE, COMPUTED_BY, ROLE = Label[Stage]("stage", Stage), Label[Stage]("by", Stage), Label[Stage]("role", Stage)
SLO, TIER = Label[Slo]("slo", Slo), Label[Tier]("tier", Tier)


class WorkerMetrics:
    """Metrics of every worker."""

    LOG_LINES_LOST = Counter("trinity_log_lines_lost_total", "Log lines that were not written to the worker's log file")
    MALFORMED = Counter("trinity_malformed_messages_total", "Messages dropped because they do not follow the protocol")


class PoolMetrics(WorkerMetrics):
    QUERIES = Counter.by("trinity_pool_queries_total", "Queries received", STAGE)
    QUERIES_REFUSED = Counter("trinity_pool_queries_refused_total", "Queries answered with an error")
    REFUSED = Counter.by(
        "trinity_pool_refused_total",
        "Queries refused: the queue was full, the deadline could not be met, or the query was invalid",
        Label[Refusal]("reason", Refusal),
    )
    DEADLINE_MISSES = Counter.by("trinity_pool_deadline_misses_total", "Answers after the deadline or target", STAGE)
    PREEMPTIONS = Counter("trinity_pool_preemptions_total", "Decode queries paused for prefill queries")
    LOOP_SECONDS = Counter("trinity_pool_loop_seconds_total", "Time of the pool's loop outside engine steps")
    EXTEND_SECONDS = Counter("trinity_pool_extend_seconds_total", "Time in engine steps")
    EXTENDS = Counter("trinity_pool_extends_total", "Engine steps")
    SLOT_STEPS = Counter("trinity_pool_slot_steps_total", "Active slots summed over engine steps")
    PADDED_SLOT_STEPS = Counter("trinity_pool_padded_slot_steps_total", "Padded slots summed over engine steps")
    QUEUE_DEPTH = Gauge.by("trinity_pool_queue_depth", "Queries that wait for a slot", STAGE)
    ACTIVE_SLOTS = Gauge("trinity_pool_active_slots", "Slots that the next extend processes")
    PADDED_SLOTS = Gauge("trinity_pool_padded_slots", "Slots of a step without a query: CUDA graphs have fixed sizes")
    PAUSED_SLOTS = Gauge("trinity_pool_paused_slots", "Slots of paused decode queries")
    SLOTS = Gauge("trinity_pool_slots", "Maximum number of active slots")
    RESERVE = Gauge("trinity_pool_reserve_ratio", "Share of the slots that is reserved for prefill queries, 0 to 1")
    FLUSH_PREFILL = Gauge("trinity_pool_flush_prefill_seconds", "How long a prefill query leaves free slots to decode")
    CLIENTS = Gauge("trinity_pool_clients", "Attached client sessions")
    UNAVAILABLE = Gauge("trinity_pool_collections_unavailable", "Collections that this worker cannot serve")
    CHECKSUMS = Gauge(
        "trinity_pool_checksums_compared_ratio", "Share of the bytes whose checksums have been compared, 0 to 1"
    )
    RELOAD = Gauge("trinity_pool_reload", "Number of the last finished reload of collections")
    RELOAD_REFUSED = Gauge(
        "trinity_pool_reload_refused",
        "1 if that reload did not replace a collection, because the new files are damaged",
    )
    WAIT = Histogram.by("trinity_pool_wait_seconds", "Time from a query's enqueue to its slot, by stage", STAGE, _WAITS)
    LATENCY = Histogram("trinity_pool_query_seconds", "Time from a query's enqueue to its result", _WAITS)
    QUERY_EXTENDS = Histogram("trinity_pool_query_extends", "Extends per query", _EXTENDS)


class RetrievingMetrics(WorkerMetrics):
    """Metrics of the workers that query the pool."""

    WITHOUT_DOCUMENTS = Gauge(
        "trinity_collections_without_documents",
        "Collections that are not queried, because the documents of the served build are missing",
    )
    RELOAD = Gauge("trinity_documents_reload", "Number of the last finished reload of documents")
    RELOAD_REFUSED = Gauge("trinity_documents_reload_refused", "1 if that reload found documents that cannot be used")
    RERANKS = Counter.by(
        "trinity_reranks_total",
        "Lists of texts that were to be reranked, by outcome; late: not in time",
        Label[RerankOutcome]("outcome", RerankOutcome),
    )
    RERANK_PAIRS = Counter("trinity_rerank_pairs_total", "Texts in these lists, each of which is paired with a query")
    RERANK_TIME = Histogram("trinity_rerank_seconds", "Time of reranking a list, also if it was late or failed", _WAITS)
    TEXTS_EMBEDDED = Counter("trinity_embedding_texts_total", "Texts embedded")
    TEXTS_REUSED = Counter(
        "trinity_embedding_reused_total", "Queries whose text had been embedded lately, or was being embedded"
    )
    EMBEDDING_BATCHES = Counter("trinity_embedding_batches_total", "Batches of texts that were embedded together")
    EMBEDDING_SECONDS = Counter("trinity_embedding_seconds_total", "Time of the threads that embed, in batches")
    EMBEDDING_WAIT_SECONDS = Counter(
        "trinity_embedding_wait_seconds_total", "Time for which texts waited for their batch, summed over texts"
    )
    TEXTS_WAITING = Gauge("trinity_embedding_waiting", "Texts that wait to be embedded")
    EMBEDDING_CACHE_BYTES = Gauge("trinity_embedding_cache_bytes", "Bytes of texts and vectors that are kept")


class KvMetrics(RetrievingMetrics):
    UNCOMPILED = Gauge(
        "trinity_model_uncompiled",
        "1 while the model on a GPU runs uncompiled, several times slower: it is being compiled, or cannot be",
    )
    TIER_LOADED = Counter.by(
        "trinity_kv_tier_loaded_blocks_total", "KV blocks loaded from a tier instead of computed", TIER
    )
    TIER_STORED = Counter.by("trinity_kv_tier_stored_blocks_total", "KV blocks written to a tier", TIER)
    TIER_EVICTED = Counter.by(
        "trinity_kv_tier_evicted_blocks_total", "Least recently used blocks of a tier, evicted to make room", TIER
    )
    TIER_DAMAGED = Counter.by(
        "trinity_kv_tier_damaged_blocks_total",
        "Damaged or foreign files of a tier that were removed; their blocks are recomputed",
        TIER,
    )
    TIER_FAILED = Counter.by(
        "trinity_kv_tier_failed_writes_total",
        "KV blocks that could not be written to a tier, mostly for lack of space",
        TIER,
    )
    TIER_BYTES = Gauge.by(
        "trinity_kv_tier_bytes", "Bytes in a tier, which all workers share, as last seen by this one", TIER
    )
    TIER_HELD = Gauge.by(
        "trinity_kv_tier_held_bytes",
        "Bytes in a tier that are kept for sequences which return to them, as last seen by this worker",
        TIER,
    )
    TIER_BLOCKS: ClassVar[dict[str, ByLabel[Tier, Counter]]] = {
        "loaded": TIER_LOADED, "stored": TIER_STORED, "evicted": TIER_EVICTED, "damaged": TIER_DAMAGED,
        "failed": TIER_FAILED,
    }  # fmt: skip


class PrefillMetrics(KvMetrics):
    PROMPTS = Counter.by("trinity_prompts_total", "Prompts by the role that computes them", COMPUTED_BY)
    PROMPT_TOKENS = Counter("trinity_prompt_tokens_total", "Prompt tokens computed by prefill")
    NEW_TOKENS = Counter.by(
        "trinity_prompt_new_tokens_total",
        "Tokens to compute of the prompts that arrived, by the role that computes them",
        COMPUTED_BY,
    )
    PASS_SECONDS = Counter("trinity_prefill_pass_seconds_total", "Time in forward passes")
    OFFERS = Counter.by(
        "trinity_kv_offers_total",
        "Offers of KV and of prompts without KV, by outcome",
        Label[OfferOutcome]("outcome", OfferOutcome),
    )
    HANDOVERS = Counter.by(
        "trinity_kv_handovers_total",
        "Prompts whose KV was handed over, by way",
        Label[HandoverMode]("mode", HandoverMode),
    )
    PREFIX_QUERY_TOKENS = Counter(
        "trinity_prefill_prefix_query_tokens_total", "Prompt tokens looked up among the cached KV blocks"
    )
    PREFIX_HIT_TOKENS = Counter(
        "trinity_prefill_prefix_hit_tokens_total", "Those of them that were found and not recomputed"
    )
    KV_EVICTIONS = Counter("trinity_prefill_kv_evictions_total", "Cached KV blocks evicted for new ones")
    WAITING = Gauge("trinity_prefill_waiting", "Requests that wait for a prefill slot")
    RUNNING = Gauge("trinity_prefill_running", "Requests in prefill or waiting for their hand-over")
    QUEUE_TIME = Histogram(
        "trinity_request_queue_time_seconds",
        "Time from the frontend to the start in a prefill worker, or from a search's arrival to its start",
        _WAITS,
    )
    BATCH_TIME = Histogram(
        "trinity_request_batch_time_seconds", "Time until a query's text goes into a batch of texts", _WAITS
    )
    EMBED_TIME = Histogram("trinity_request_embed_time_seconds", "Time of embedding a query's batch", _WAITS)
    RETRIEVAL_TIME = Histogram(
        "trinity_request_retrieval_time_seconds", "Time from the query vector to the pool's result", _WAITS
    )
    PASSAGES_TIME = Histogram(
        "trinity_request_passages_time_seconds", "Time of reading the passages of a result", _WAITS
    )
    ADMISSION_TIME = Histogram(
        "trinity_request_admission_time_seconds", "Time until KV blocks are allocated for a prompt", _WAITS
    )
    PREFILL_TIME = Histogram(
        "trinity_request_prefill_time_seconds", "Time from the first chunk to the first token", _FIRST_TOKENS
    )


class DecodeMetrics(KvMetrics):
    GENERATION_TOKENS = Counter("trinity_generation_tokens_total", "Tokens generated")
    PROBES = Counter("trinity_decode_probes_total", "Probes sent")
    HANDOVER_BYTES = Counter("trinity_kv_handover_bytes_total", "KV bytes pulled from prefill")
    LINK_BUSY_SECONDS = Counter("trinity_kv_link_busy_seconds_total", "Time in which KV was pulled")
    ROW_SECONDS = Counter("trinity_decode_row_seconds_total", "Time in the running batch, summed over rows")
    STALL_SECONDS = Counter(
        "trinity_decode_stall_seconds_total", "Time in which rows waited for a probe, summed over rows"
    )
    PREFIX_QUERY_TOKENS = Counter(
        "trinity_decode_prefix_query_tokens_total", "Handed over tokens looked up among decode's KV blocks"
    )
    PREFIX_HIT_TOKENS = Counter(
        "trinity_decode_prefix_hit_tokens_total", "Those of them that were found and not pulled"
    )
    KV_EVICTIONS = Counter("trinity_decode_kv_evictions_total", "Cached KV blocks evicted for new ones")
    PREEMPTIONS = Counter("trinity_decode_preemptions_total", "Rows preempted to make room for others")
    SWAPPED = Counter("trinity_decode_swapped_total", "Those of them that were written to a tier, not recomputed")
    WAITING = Gauge(
        "trinity_num_requests_waiting", "Hand-overs and rows that wait for KV blocks or for the running batch"
    )
    RUNNING = Gauge("trinity_num_requests_running", "Rows of the running batch")
    KV_USED = Gauge("trinity_kv_cache_usage_perc", "Share of decode's KV blocks held by rows and hand-overs, 0 to 1")
    HANDOVER_TIME = Histogram(
        "trinity_request_handover_time_seconds", "Time from the end of prefill until decode has the KV", _WAITS
    )
    ROOM_TIME = Histogram(
        "trinity_request_room_time_seconds", "Time from the end of prefill until decode has room", _WAITS
    )
    PULL_TIME = Histogram(
        "trinity_request_pull_time_seconds", "Time of pulling a prompt's KV blocks, between decode's steps", _WAITS
    )
    ADMISSION_TIME = PrefillMetrics.ADMISSION_TIME  # of prompts that decode computes itself
    PREFILL_TIME = PrefillMetrics.PREFILL_TIME
    DECODE_TIME = Histogram(
        "trinity_request_decode_time_seconds", "Time from the first token to the last", _FIRST_TOKENS
    )
    TTFT = Histogram(
        "trinity_time_to_first_token_seconds",
        "Time from the frontend to the first token",
        _FIRST_TOKENS,
        limit=lambda slo: slo.ttft_s,
    )
    TPOT = Histogram(
        "trinity_request_time_per_output_token_seconds",
        "Mean time per output token of a request",
        _TOKENS,
        limit=lambda slo: slo.tpot_s,
    )
    INTER_TOKEN = Histogram(
        "trinity_inter_token_latency_seconds",
        "Time between two tokens of a request",
        _TOKENS,
        limit=lambda slo: slo.tpot_s,
    )
    E2E = Histogram("trinity_e2e_request_latency_seconds", "Time from the frontend to the last token", _FIRST_TOKENS)
    PROBE_STALL = Histogram("trinity_decode_probe_stall_seconds", "Time for which a probe stalled its row", _WAITS)
    PROBE_TIME = Histogram("trinity_decode_probe_seconds", "Time from sending a probe to its result", _WAITS)


class FrontendMetrics(RetrievingMetrics):
    RESTARTED = Counter("trinity_requests_restarted_total", "Restarts of requests whose worker died")
    REQUESTS = Counter.by(
        "trinity_requests_total",
        "Generations by outcome: finished, cancelled by the client, failed, refused, invalid",
        Label[Outcome]("outcome", Outcome),
    )
    HTTP_RESPONSES = Counter.by(
        "trinity_http_responses_total",
        "HTTP responses by class of status, without /health and /ready",
        Label[StatusClass]("status", StatusClass),
    )
    FORWARDED = Counter("trinity_http_forwarded_total", "Requests that an HTTP worker has passed to the frontend")
    SLO_REQUESTS = Counter.by(
        "trinity_slo_requests_total", "Requests to which the SLO applies: not cancelled or invalid ones", SLO
    )
    SLO_VIOLATIONS = Counter.by(
        "trinity_slo_violations_total", "Those of them that were answered after the limit, failed or refused", SLO
    )
    ANSWER_CACHE = Counter.by(
        "trinity_answer_cache_events_total",
        "Lookups in the answer cache (hit, miss), and answers stored, expired and evicted",
        Label[CacheEvent]("event", CacheEvent),
    )
    SEARCH_TIME = Histogram(
        "trinity_search_request_seconds", "Time of answered search requests", _WAITS, limit=lambda slo: slo.search_s
    )
    WRITE_TIME = Histogram(
        "trinity_collection_write_seconds", "Time of writes to collections until they are acknowledged", _WAITS
    )
    COLLECTION_DOCUMENTS = Gauge("trinity_collection_documents", "Documents of the collections that the node writes to")
    COLLECTION_SEGMENTS = Gauge("trinity_collection_segments", "Sealed segments of these collections")
    COLLECTION_GROWING = Gauge("trinity_collection_growing_rows", "Rows of these collections that are not sealed yet")
    COLLECTION_TOMBSTONES = Gauge("trinity_collection_tombstones", "Deleted rows in segments of these collections")
    COLLECTION_LOG_BYTES = Gauge("trinity_collection_log_bytes", "Bytes of these collections' logs")
    COLLECTION_SEALED = Counter("trinity_collection_sealed_total", "Segments sealed from logs")
    COLLECTION_MERGED = Counter("trinity_collection_merged_total", "Segments merged from others")
    COLLECTION_BUILDING = Gauge(
        "trinity_collection_builds_running", "Segments that are being sealed or merged in the background"
    )
    IN_FLIGHT = Gauge("trinity_requests_in_flight", "Requests accepted and not yet finished")
    RESPOND_TIME = Histogram(
        "trinity_request_respond_time_seconds", "Time from a search's passages to its response", _WAITS
    )
    SERVERS = Gauge.by("trinity_engine_servers", "Servers of another engine for one role that are up", ROLE)
    SERVERS_WAITING = Gauge.by(
        "trinity_engine_servers_waiting", "Requests that wait in these servers, as they report", ROLE
    )
    KV_LINKS = Gauge("trinity_kv_links", "KV links of another engine's servers that report their transfers")
    # Of answers that other engines' servers generate; of the node's own engine the workers write these.
    PROMPTS = PrefillMetrics.PROMPTS
    NEW_TOKENS = PrefillMetrics.NEW_TOKENS
    PASS_SECONDS = PrefillMetrics.PASS_SECONDS
    LINK_BUSY_SECONDS = DecodeMetrics.LINK_BUSY_SECONDS
    ROW_SECONDS = DecodeMetrics.ROW_SECONDS
    STALL_SECONDS = DecodeMetrics.STALL_SECONDS
    PROMPT_TOKENS = PrefillMetrics.PROMPT_TOKENS
    GENERATION_TOKENS = DecodeMetrics.GENERATION_TOKENS
    QUEUE_TIME = PrefillMetrics.QUEUE_TIME
    BATCH_TIME = PrefillMetrics.BATCH_TIME
    EMBED_TIME = PrefillMetrics.EMBED_TIME
    RETRIEVAL_TIME = PrefillMetrics.RETRIEVAL_TIME
    PASSAGES_TIME = PrefillMetrics.PASSAGES_TIME
    DECODE_TIME = DecodeMetrics.DECODE_TIME
    TTFT = DecodeMetrics.TTFT
    TPOT = DecodeMetrics.TPOT
    E2E = DecodeMetrics.E2E


def _of(owner: type) -> tuple[Metric, ...]:
    """Return the metrics that a class and its bases declare, in that order."""
    declared = [value for cls in owner.__mro__ for value in vars(cls).values()]
    metrics: list[Metric] = []
    for value in declared:
        metrics += [value] if isinstance(value, Metric) else value.values() if isinstance(value, ByLabel) else ()
    return tuple(metrics)


METRICS: dict[Role, tuple[Metric, ...]] = {
    "pool": _of(PoolMetrics),
    "prefill": _of(PrefillMetrics),
    "decode": _of(DecodeMetrics),
    "engine": _of(WorkerMetrics),  # vLLM exports its own
    "frontend": _of(FrontendMetrics),
    "http": _of(FrontendMetrics),  # of what it answers itself
}
