"""The metrics of a node: what each role writes into its table (`exporter.py` gives them to Prometheus).

Names follow vLLM's where it has one (time to first token, inter-token latency …) with the prefix `trinity_`; seconds
and bytes; buckets of waits begin at 50 µs, since a pool answers in less than a millisecond. What differs by stage,
reason or outcome alone is one family with a label; labels have a handful of values, fixed here.

An SLO is judged by buckets too, so each limit of the configuration is an edge of its histogram (`metrics_of`).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from runtime.node.config import Role, SloSection

WAIT = (
    50e-6,
    100e-6,
    250e-6,
    500e-6,
    1e-3,
    2.5e-3,
    5e-3,
    10e-3,
    25e-3,
    50e-3,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
EXTENDS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0)


Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Series:
    """One place in a worker's table. `family` and `labels` are what Prometheus sees; without, its name alone."""

    name: str
    help: str
    family: str = ""
    labels: Labels = ()
    words: ClassVar[int] = 1

    @property
    def exported(self) -> str:
        return self.family or self.name


@dataclass(frozen=True)
class Counter(_Series):
    kind: ClassVar[str] = "counter"


@dataclass(frozen=True)
class Gauge(_Series):
    kind: ClassVar[str] = "gauge"


@dataclass(frozen=True)
class Histogram:
    name: str
    help: str
    buckets: tuple[float, ...]
    family: str = ""
    labels: Labels = ()
    kind: ClassVar[str] = "histogram"

    @property
    def exported(self) -> str:
        return self.family or self.name

    @property
    def words(self) -> int:
        return len(self.buckets) + 2  # the last bucket is +Inf; then the sum


Metric = Counter | Gauge | Histogram

_POOL_WAIT = ("Queries by stage: from enqueue to slot", WAIT, "trinity_pool_wait_seconds")
POOL_WAIT_PREFILL = Histogram("trinity_pool_wait_prefill_seconds", *_POOL_WAIT, (("stage", "prefill"),))
POOL_WAIT_DECODE = Histogram("trinity_pool_wait_decode_seconds", *_POOL_WAIT, (("stage", "decode"),))
POOL_LATENCY = Histogram("trinity_pool_query_seconds", "All queries: from enqueue to result", WAIT)
POOL_EXTENDS = Histogram("trinity_pool_query_extends", "Extends a query took", EXTENDS)
QUEUE_TIME = Histogram("trinity_request_queue_time_seconds", "From the frontend to a prefill worker's hands", WAIT)
EMBED_TIME = Histogram("trinity_request_embed_time_seconds", "Embedding a prompt's query", WAIT)
RETRIEVAL_TIME = Histogram("trinity_request_retrieval_time_seconds", "From the query vector to its passages", WAIT)
ADMISSION_TIME = Histogram("trinity_request_admission_time_seconds", "Until prefill has KV blocks for a prompt", WAIT)
PREFILL_TIME = Histogram("trinity_request_prefill_time_seconds", "From the first chunk to the first token", TTFT)
HANDOVER_TIME = Histogram("trinity_request_handover_time_seconds", "From prefill's end until decode has the KV", WAIT)
ROOM_TIME = Histogram("trinity_request_room_time_seconds", "From prefill's end until decode has room", WAIT)
PULL_TIME = Histogram("trinity_request_pull_time_seconds", "Pulling a prompt's KV blocks, between decode's steps", WAIT)
DECODE_TIME = Histogram("trinity_request_decode_time_seconds", "From the first token to the last", TTFT)
PROBE_TIME = Histogram("trinity_decode_probe_seconds", "From asking a probe to its end", WAIT)
TTFT_TIME = Histogram("trinity_time_to_first_token_seconds", "From the frontend to the first token", TTFT)
TPOT_TIME = Histogram("trinity_request_time_per_output_token_seconds", "A request's mean time per output token", TPOT)
ITL_TIME = Histogram("trinity_inter_token_latency_seconds", "Between two tokens of a request", TPOT)
E2E_TIME = Histogram("trinity_e2e_request_latency_seconds", "From the frontend to the last token", TTFT)
PROBE_STALL = Histogram("trinity_decode_probe_stall_seconds", "How long a probe held its row", WAIT)
SEARCH_TIME = Histogram("trinity_search_request_seconds", "Answered requests for a search alone", WAIT)

WITHOUT_DOCUMENTS = Gauge(
    "trinity_collections_without_documents",
    "Collections of which no pool is asked: the documents of the build that they serve are not there",
)
PROMPT_TOKENS = Counter("trinity_prompt_tokens_total", "Prompt tokens run through prefill")
GENERATION_TOKENS = Counter("trinity_generation_tokens_total", "Tokens generated")
LOG_LINES_LOST = Counter("trinity_log_lines_lost_total", "Lines that the log file of a worker has not got")
MALFORMED_MESSAGES = Counter("trinity_malformed_messages_total", "Messages that were dropped: none of the protocol's")
_OF_ALL = (LOG_LINES_LOST, MALFORMED_MESSAGES)


def _by(
    label: str, family: str, text: str, names: Mapping[str, str], kind: type[Counter] | type[Gauge] = Counter
) -> tuple[Counter | Gauge, ...]:
    """One family's series: `names` are places in the table by the label's value."""
    return tuple(kind(name, text, family, ((label, value),)) for value, name in names.items())


def _by_stage(
    family: str, text: str, pattern: str, kind: type[Counter] | type[Gauge] = Counter
) -> tuple[Counter | Gauge, ...]:
    return _by("stage", family, text, {stage: pattern.format(stage) for stage in ("prefill", "decode")}, kind)


SLOS = ("ttft", "tpot", "search", "all")
"""What is promised: the first token, each later token, a search alone; "all": every promise to a generation."""

METRICS: dict[Role, tuple[Metric, ...]] = {
    "pool": (
        *_by_stage("trinity_pool_queries_total", "Queries received", "trinity_pool_queries_{}_total"),
        Counter("trinity_pool_queries_refused_total", "Queries answered with an error"),
        *_by(
            "reason",
            "trinity_pool_refused_total",
            "Queries refused: the queue was full, the deadline could not be met, or what was asked cannot be",
            {
                reason: f"trinity_pool_refused_{reason}_total"
                for reason in ("overloaded", "deadline_exceeded", "invalid_request")
            },
        ),
        *_by_stage(
            "trinity_pool_deadline_misses_total", "Answers after the deadline or target", "trinity_pool_missed_{}_total"
        ),
        Counter("trinity_pool_preemptions_total", "Decode queries paused for prefill queries"),
        Counter("trinity_pool_loop_seconds_total", "What the pool's loop took between engine steps"),
        Counter("trinity_pool_extend_seconds_total", "What engine steps took"),
        Counter("trinity_pool_extends_total", "Engine steps"),
        Counter("trinity_pool_slot_steps_total", "Active slots summed over engine steps"),
        Counter("trinity_pool_padded_slot_steps_total", "Padded slots summed over engine steps"),
        *_by_stage("trinity_pool_queue_depth", "Queries waiting for a slot", "trinity_pool_queue_{}", Gauge),
        Gauge("trinity_pool_active_slots", "Slots that the next extend advances"),
        Gauge("trinity_pool_padded_slots", "Slots that a step covers without a query: a GPU's graphs have fixed sizes"),
        Gauge("trinity_pool_paused_slots", "Slots of paused decode queries"),
        Gauge("trinity_pool_slots", "Active slots at most"),
        Gauge("trinity_pool_reserve_ratio", "Share of the slots owed to prefill queries now, 0 to 1"),
        Gauge("trinity_pool_flush_prefill_seconds", "How long a prefill query waits for company now"),
        Gauge("trinity_pool_clients", "Attached clients"),
        Gauge("trinity_pool_collections_unavailable", "Collections that this worker cannot serve"),
        Gauge("trinity_pool_checksums_compared_ratio", "Share of the bytes to be checked that were, 0 to 1"),
        Gauge("trinity_pool_reload", "The last reload of collections that is over, by its number"),
        Gauge("trinity_pool_reload_refused", "1 if a collection was not replaced by it: what lies there is damaged"),
        POOL_WAIT_PREFILL,
        POOL_WAIT_DECODE,
        POOL_LATENCY,
        POOL_EXTENDS,
    ),
    "prefill": (
        PROMPT_TOKENS,
        Counter("trinity_prefill_failed_total", "Requests that ended with an error in prefill"),
        Counter("trinity_prefill_prefix_query_tokens_total", "Prompt tokens looked up among the cached KV blocks"),
        Counter("trinity_prefill_prefix_hit_tokens_total", "The part of these that was found, and not computed again"),
        Counter("trinity_prefill_kv_evictions_total", "Cached KV blocks given up for new ones"),
        Gauge("trinity_prefill_kv_blocks", "KV blocks"),
        Gauge("trinity_prefill_kv_blocks_held", "KV blocks that prompts hold"),
        Gauge("trinity_prefill_kv_blocks_cached", "KV blocks kept for prompts to come"),
        Gauge("trinity_prefill_waiting", "Requests waiting for a prefill slot"),
        Gauge("trinity_prefill_running", "Requests in prefill or waiting for their hand-over"),
        QUEUE_TIME,
        EMBED_TIME,
        RETRIEVAL_TIME,
        ADMISSION_TIME,
        PREFILL_TIME,
    ),
    "decode": (
        GENERATION_TOKENS,
        Counter("trinity_decode_failed_total", "Requests that ended with an error in decode"),
        Counter("trinity_decode_probes_total", "Probes asked"),
        Counter("trinity_decode_cancelled_total", "Requests cancelled while decoding"),
        Counter("trinity_kv_handover_bytes_total", "KV bytes pulled from prefill"),
        Counter("trinity_kv_link_busy_seconds_total", "Time in which KV was being pulled"),
        Counter("trinity_decode_row_seconds_total", "Time of all rows in the running batch, summed"),
        Counter("trinity_decode_stall_seconds_total", "The part of the rows' time in which they waited for a probe"),
        Counter("trinity_decode_prefix_query_tokens_total", "Handed over tokens looked up among the KV blocks here"),
        Counter("trinity_decode_prefix_hit_tokens_total", "The part of these that was found, and not pulled again"),
        Counter("trinity_decode_kv_evictions_total", "Cached KV blocks given up for new ones"),
        Counter("trinity_decode_preemptions_swap_total", "Rows that made room: their KV went to swap space"),
        Counter("trinity_decode_preemptions_recompute_total", "Rows that made room: their KV is computed again"),
        Counter("trinity_decode_swap_out_blocks_total", "KV blocks copied to swap space"),
        Counter("trinity_decode_swap_in_blocks_total", "KV blocks copied back from swap space"),
        Gauge("trinity_decode_kv_blocks", "KV blocks"),
        Gauge("trinity_decode_kv_blocks_held", "KV blocks that rows and hand-overs hold"),
        Gauge("trinity_decode_kv_blocks_cached", "KV blocks kept for prompts to come"),
        Gauge("trinity_decode_swap_blocks_used", "Blocks of swap space in use"),
        Gauge("trinity_num_requests_waiting", "Hand-overs and rows waiting for blocks or for a place in the batch"),
        Gauge("trinity_num_requests_running", "Rows of the running batch"),
        Gauge("trinity_kv_cache_usage_perc", "Share of decode's KV blocks that rows and hand-overs hold, 0 to 1"),
        HANDOVER_TIME,
        ROOM_TIME,
        PULL_TIME,
        DECODE_TIME,
        TTFT_TIME,
        TPOT_TIME,
        ITL_TIME,
        E2E_TIME,
        PROBE_STALL,
        PROBE_TIME,
    ),
    "frontend": (
        Counter("trinity_requests_restarted_total", "Times that a request was started again: a worker of its had died"),
        *_by(
            "outcome",
            "trinity_requests_total",
            "Generations that ended: with a whole answer, with a client that went away, with an error, or refused",
            {how: f"trinity_requests_{how}_total" for how in ("finished", "cancelled", "failed", "refused")},
        ),
        *_by(
            "status",
            "trinity_http_responses_total",
            "HTTP answers by the class of their status",
            {status: f"trinity_http_responses_{status}_total" for status in ("2xx", "4xx", "5xx")},
        ),
        *_by(
            "slo",
            "trinity_slo_requests_total",
            "Requests to which the SLO applies; not those whose client went away or asked for what cannot be",
            {slo: f"trinity_slo_requests_{slo}_total" for slo in SLOS},
        ),
        *_by(
            "slo",
            "trinity_slo_violations_total",
            "Of these: answered after the limit, failed or refused",
            {slo: f"trinity_slo_violations_{slo}_total" for slo in SLOS},
        ),
        *_by(
            "event",
            "trinity_answer_cache_events_total",
            "Prompts looked up among stored answers: found or not; answers stored, expired, gone to make room",
            {event: f"trinity_answer_cache_{event}_total" for event in ("hit", "miss", "stored", "expired", "evicted")},
        ),
        SEARCH_TIME,
        Gauge("trinity_requests_in_flight", "Requests accepted and not yet ended"),
    ),
}

RELAYED: tuple[Metric, ...] = (
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    EMBED_TIME,
    RETRIEVAL_TIME,
    DECODE_TIME,
    TTFT_TIME,
    TPOT_TIME,
    E2E_TIME,
)
"""What the frontend says of answers that others' servers write; of the node's own the workers say it."""

_SHARED: dict[Role, tuple[Metric, ...]] = {
    "prefill": (WITHOUT_DOCUMENTS,),
    "decode": (WITHOUT_DOCUMENTS,),
    "frontend": (WITHOUT_DOCUMENTS, *RELAYED),
}

KNOBS: dict[Role, tuple[str, ...]] = {
    "pool": (
        "reserve",  # share of the slots owed to prefill queries, 0 to 1
        "flush_prefill_s",  # how long a prefill query may wait for company in an idle pool
        "reload_of",  # which collection by its place in the configuration, or -1 for all,
        "reload",  # is to be reloaded; another number asks once more
    ),
    "prefill": (),
    "decode": (),
    "frontend": (),
}
"""What the supervisor sets in a worker at run time, through its table."""


def metrics_of(role: Role, slo: SloSection) -> tuple[Metric, ...]:
    """All metrics of a role's worker, with the SLO limits among the edges of the histograms that they judge."""
    limits = {
        TTFT_TIME.name: slo.ttft_s,
        TPOT_TIME.name: slo.tpot_s,
        ITL_TIME.name: slo.tpot_s,
        SEARCH_TIME.name: slo.search_s,
    }
    return tuple(
        dataclasses.replace(metric, buckets=tuple(sorted({*metric.buckets, limits[metric.name]})))
        if isinstance(metric, Histogram) and metric.name in limits
        else metric
        for metric in (*METRICS[role], *_OF_ALL, *_SHARED.get(role, ()))
    )
