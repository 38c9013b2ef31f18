"""Stamps of a request, set where they happen, and the stage times computed as their differences."""

from collections.abc import Iterator
from typing import NamedTuple

from runtime.node.metrics.kinds import Histogram
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import METRICS, DecodeMetrics, FrontendMetrics, PrefillMetrics
from runtime.retrieval.passages import SearchTimes

RECEIVED = "received"  # the frontend has read the request, or all of a search has arrived
DEQUEUED = "dequeued"  # a prefill worker starts on it, or the frontend on a search
BATCHED = "batched"  # a batch of texts begins with its question
EMBEDDED = "embedded"  # its query vector is ready
FOUND = "found"  # the pool has returned its result
SEARCHED = "searched"  # its passages are read
RERANKED = "reranked"  # the passages are reranked, or stay in their order
PREFILL_BEGIN = "prefill_begin"  # the first chunk goes through the model
PREFILL_END = "prefill_end"  # the first token is sampled
HANDOVER_BEGIN = "handover_begin"  # decode has free KV blocks and starts to pull
HANDOVER_END = "handover_end"  # decode has pulled them
FIRST_TOKEN = "first_token"  # the first token leaves decode
RESPONDED = "responded"  # the response to a search is written
END = "end"  # the last token leaves decode, or the frontend ends the request


class Stage(NamedTuple):
    """Time between two stamps: it begins at the first of `begins` that was set. `meaning` is its description."""

    name: str
    begins: tuple[str, ...]
    end: str
    time: Histogram
    meaning: str


TO_FIRST_TOKEN = (
    Stage("queue", (RECEIVED,), DEQUEUED, PrefillMetrics.QUEUE_TIME, "frontend … prefill worker"),
    Stage("batch", (DEQUEUED, RECEIVED), BATCHED, PrefillMetrics.BATCH_TIME, "question … a batch of texts with it"),
    Stage("embed", (BATCHED, DEQUEUED, RECEIVED), EMBEDDED, PrefillMetrics.EMBED_TIME, "… its vector"),
    Stage("retrieval", (EMBEDDED,), FOUND, PrefillMetrics.RETRIEVAL_TIME, "vector … result of the pool"),
    Stage("passages", (FOUND,), SEARCHED, PrefillMetrics.PASSAGES_TIME, "… its passages read"),
    Stage("rerank", (SEARCHED,), RERANKED, PrefillMetrics.RERANK_TIME, "… passages in their final order"),
    Stage(
        "admission",
        (RERANKED, SEARCHED, DEQUEUED),
        PREFILL_BEGIN,
        PrefillMetrics.ADMISSION_TIME,
        "… KV blocks in prefill",
    ),
    Stage("prefill", (PREFILL_BEGIN,), PREFILL_END, PrefillMetrics.PREFILL_TIME, "first chunk … first token sampled"),
    Stage("room", (PREFILL_END,), HANDOVER_BEGIN, DecodeMetrics.ROOM_TIME, "KV offered … KV blocks in decode"),
    Stage("pull", (HANDOVER_BEGIN,), HANDOVER_END, DecodeMetrics.PULL_TIME, "… KV pulled by decode"),
)
DECODE = Stage("decode", (FIRST_TOKEN,), END, DecodeMetrics.DECODE_TIME, "first token … last token")
RESPOND = Stage(
    "respond", (RERANKED, SEARCHED), RESPONDED, FrontendMetrics.RESPOND_TIME, "passages … response of a search"
)
STAGES = (*TO_FIRST_TOKEN, DECODE, RESPOND)
"""In the order of a request's life cycle."""
SUMS = (
    Stage("handover", (PREFILL_END,), HANDOVER_END, DecodeMetrics.HANDOVER_TIME, "room and pull"),
    Stage("ttft", (RECEIVED,), FIRST_TOKEN, DecodeMetrics.TTFT, "request … first token"),
    Stage("e2e", (RECEIVED,), END, DecodeMetrics.E2E, "request … last token"),
)
TPOT = Stage("tpot", (FIRST_TOKEN,), END, DecodeMetrics.TPOT, "each later token")
ALL = (*STAGES, *SUMS, TPOT)


def stamp_search_end(stamps: dict[str, int], times: SearchTimes, now_ns: int) -> None:
    """Set the stamps at the end of a search."""
    if times.batched_ns:
        stamps[BATCHED] = times.batched_ns
    searched_ns = times.read_ns or now_ns
    stamps[FOUND] = times.found_ns or searched_ns
    stamps[SEARCHED] = searched_ns
    if times.read_ns:
        stamps[RERANKED] = now_ns


def completed_stages(stamps: dict[str, int], stages: tuple[Stage, ...] = STAGES) -> Iterator[tuple[Stage, int, int]]:
    """Yield begin and end, in ns, of every completed stage, in the order of a request's life cycle."""
    for stage in stages:
        if stage.end in stamps:
            for begin in stage.begins:
                if begin in stamps:
                    yield stage, stamps[begin], stamps[stage.end]
                    break


def stage_seconds(stamps: dict[str, int], completion_tokens: int) -> dict[str, float]:
    """Return stage times in seconds from stamps in ns, without skipped stages. `tpot` is per output token."""
    seconds = {stage.name: (end - begin) / 1e9 for stage, begin, end in completed_stages(stamps, STAGES + SUMS)}
    if completion_tokens > 1 and FIRST_TOKEN in stamps and END in stamps:
        seconds[TPOT.name] = (stamps[END] - stamps[FIRST_TOKEN]) / 1e9 / (completion_tokens - 1)
    return seconds


def observe(table: WorkerTable, stamps: dict[str, int], completion_tokens: int = 0, *, computed: bool = True) -> None:
    """Record the times of the stages for which the worker's table has a histogram.

    `computed`: this worker has computed the prompt; otherwise another one has recorded the prefill times. The time of
    reranking is recorded where it is done.
    """
    seconds = stage_seconds(stamps, completion_tokens)
    for stage in ALL:
        if (
            stage.name in seconds
            and stage.time in table
            and stage.end != RERANKED
            and (computed or stage.end not in (PREFILL_BEGIN, PREFILL_END))
        ):
            table.observe(stage.time, seconds[stage.name])


_OF_SEARCH = tuple(stage for stage in STAGES if stage.time in METRICS["frontend"] and stage.end != RERANKED)


def observe_search(table: WorkerTable, stamps: dict[str, int]) -> None:
    """Record the times of a search by text or vector in the table of the frontend."""
    for _, begins, end, histogram, _ in _OF_SEARCH:  # as `completed_stages`: every search passes here
        if end in stamps and (end != EMBEDDED or BATCHED in stamps):
            for begin in begins:
                if begin in stamps:
                    table.observe(histogram, (stamps[end] - stamps[begin]) / 1e9)
                    break
