"""Rows of the overview dashboard about requests: times of generations, and searches."""

from dashboards import queries as q
from dashboards.grafana import Query, Row
from dashboards.overview_panels import HERE, OF_WORKER, WORKER, here, lines, nixl, percentiles
from runtime.node.metrics.worker_metrics import (
    METRICS,
    DecodeMetrics,
    FrontendMetrics,
    PrefillMetrics,
    RetrievingMetrics,
)
from runtime.serving.stages import STAGES, TO_FIRST_TOKEN

_NIXL_FAILURES = {"failed_transfers": "lost", "failed_notifications": "not notified", "kv_expired_reqs": "expired"}
_FRONTENDS = "(frontend|http)-.*"  # their stages are those of searches, and of generations by another engine


def latency() -> Row:
    """Return the row of generations' times."""
    elsewhere = f'{HERE},worker!~"{_FRONTENDS}"'  # nowhere, if another engine generates
    means = [
        Query(f"{q.mean(stage.time, elsewhere)} or {q.mean(stage.time, HERE)}", stage.name) for stage in TO_FIRST_TOKEN
    ]
    computed = [Query(q.rate(here(PrefillMetrics.PROMPTS), ("by",)), "by {{by}}")]
    handed_over = [
        Query(q.rate(here(DecodeMetrics.HANDOVER_BYTES), WORKER), OF_WORKER),
        Query(q.rate(nixl("bytes_transferred_sum"), WORKER), f"{OF_WORKER}, NIXL"),
    ]
    causes = ("rejected", "lost", "expired")
    failed = [Query(q.rate(here(PrefillMetrics.OFFERS, outcome=cause)), cause) for cause in causes]
    failed += [Query(q.rate(nixl(f"num_{what}_total")), f"NIXL, {name}") for what, name in _NIXL_FAILURES.items()]
    reranks = [
        Query(q.rate(here(RetrievingMetrics.RERANKS), ("outcome",)), "{{outcome}}"),
        Query(q.rate(here(RetrievingMetrics.RERANK_PAIRS)), "pairs"),
    ]
    return Row(
        "Latency",
        lines("TTFT by stage (mean)", "Mean time of each stage before the first token", means, "s", 8, stacked=True),
        percentiles("Time to first token", "Time from the request's arrival to its first token", DecodeMetrics.TTFT),
        percentiles("Inter-token latency", "Time between two consecutive tokens", DecodeMetrics.INTER_TOKEN),
        lines("Prompts", "Prompts computed per second, by role", computed, "reqps", 8),
        lines("KV handed over", "Bytes of KV that decode received per second", handed_over, "Bps", 8),
        lines("Failed hand-overs", "Failed KV hand-overs per second, by cause", failed, "reqps", 8),
        percentiles("Reranking", "Time of reranking a search's passages", RetrievingMetrics.RERANK_TIME),
        lines("Reranks", "Lists reranked per second by outcome, and their texts", reranks, "reqps", 16),
    )


def searches() -> Row:
    """Return the row of searches without generation, and of embedding."""
    there = f'{HERE},worker=~"{_FRONTENDS}"'
    searching = [stage for stage in STAGES if stage.time in METRICS["frontend"] and stage.name != "decode"]
    means = [Query(q.mean(stage.time, there), stage.name) for stage in searching]
    embedded, reused = (q.rate(here(one)) for one in (RetrievingMetrics.TEXTS_EMBEDDED, RetrievingMetrics.TEXTS_REUSED))
    texts = [Query(embedded, "embedded"), Query(reused, "reused")]
    texts.append(Query(f"sum({here(RetrievingMetrics.TEXTS_WAITING)})", "waiting"))
    hits = [
        Query(f"{reused} / ({embedded} + {reused})", "reused"),
        Query(f"{embedded} / {q.rate(here(RetrievingMetrics.EMBEDDING_BATCHES))}", "texts a batch"),
    ]
    return Row(
        "Searches",
        percentiles("Search requests", "Time from a search's arrival to its response", FrontendMetrics.SEARCH_TIME),
        lines("Search by stage (mean)", "Mean time of each stage of a search", means, "s", 8, stacked=True),
        lines("Texts", "Texts embedded and found in the cache per second, and those that wait", texts, "short", 4),
        lines("Embedding", "Share of queries' texts found in the cache, and texts a batch", hits, "short", 4),
    )
