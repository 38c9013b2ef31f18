"""The named moments of a request, stamped where they happen, and the stage times that are their differences."""

from collections.abc import Iterator
from typing import NamedTuple

from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics, Histogram, PrefillMetrics

RECEIVED = "received"  # the frontend has read the request, or the search alone
DEQUEUED = "dequeued"  # a prefill worker takes it up
EMBEDDED = "embedded"  # its query vector is ready
SEARCHED = "searched"  # the pool has answered
PREFILL_BEGIN = "prefill_begin"  # the first chunk goes through the model
PREFILL_END = "prefill_end"  # the first token is sampled
HANDOVER_BEGIN = "handover_begin"  # decode has room, and begins to pull the KV blocks
HANDOVER_END = "handover_end"  # decode has pulled them
FIRST_TOKEN = "first_token"  # the first token leaves decode
END = "end"  # the last token leaves decode, or the frontend gives the request up


class Stage(NamedTuple):
    """A time between two stamps: it begins with the first of `begins` that was stamped. `meaning` is for people."""

    name: str
    begins: tuple[str, ...]
    end: str
    time: Histogram
    meaning: str


TO_FIRST_TOKEN = (
    Stage("queue", (RECEIVED,), DEQUEUED, PrefillMetrics.QUEUE_TIME, "frontend … prefill worker"),
    Stage("embed", (DEQUEUED, RECEIVED), EMBEDDED, PrefillMetrics.EMBED_TIME, "question … its vector"),
    Stage("retrieval", (EMBEDDED,), SEARCHED, PrefillMetrics.RETRIEVAL_TIME, "vector … passages from the pool"),
    Stage("admission", (SEARCHED, DEQUEUED), PREFILL_BEGIN, PrefillMetrics.ADMISSION_TIME, "… KV blocks in prefill"),
    Stage("prefill", (PREFILL_BEGIN,), PREFILL_END, PrefillMetrics.PREFILL_TIME, "first chunk … first token sampled"),
    Stage("room", (PREFILL_END,), HANDOVER_BEGIN, DecodeMetrics.ROOM_TIME, "KV offered … KV blocks in decode"),
    Stage("pull", (HANDOVER_BEGIN,), HANDOVER_END, DecodeMetrics.PULL_TIME, "… KV pulled by decode"),
)
DECODE = Stage("decode", (FIRST_TOKEN,), END, DecodeMetrics.DECODE_TIME, "first token … last token")
STAGES = (*TO_FIRST_TOKEN, DECODE)
"""In the order of a request's life."""
SUMS = (
    Stage("handover", (PREFILL_END,), HANDOVER_END, DecodeMetrics.HANDOVER_TIME, "room and pull"),
    Stage("ttft", (RECEIVED,), FIRST_TOKEN, DecodeMetrics.TTFT, "request … first token"),
    Stage("e2e", (RECEIVED,), END, DecodeMetrics.E2E, "request … last token"),
)
TPOT = Stage("tpot", (FIRST_TOKEN,), END, DecodeMetrics.TPOT, "each later token")
ALL = (*STAGES, *SUMS, TPOT)


def completed_stages(stamps: dict[str, int], stages: tuple[Stage, ...] = STAGES) -> Iterator[tuple[Stage, int, int]]:
    """Begin and end in ns of every stage that is over, in the order of a request's life."""
    for stage in stages:
        begin = next((stamps[begin] for begin in stage.begins if begin in stamps), None)
        if begin is not None and stage.end in stamps:
            yield stage, begin, stamps[stage.end]


def stage_seconds(stamps: dict[str, int], completion_tokens: int) -> dict[str, float]:
    """Stage times in seconds from stamps in ns; a stage that did not happen is left out. `tpot` is per output token."""
    spans = {stage.name: (end - begin) / 1e9 for stage, begin, end in completed_stages(stamps, STAGES + SUMS)}
    if completion_tokens > 1 and FIRST_TOKEN in stamps and END in stamps:
        spans[TPOT.name] = (stamps[END] - stamps[FIRST_TOKEN]) / 1e9 / (completion_tokens - 1)
    return spans


def observe(table: WorkerTable, stamps: dict[str, int], completion_tokens: int = 0, *, computed: bool = True) -> None:
    """Write the times of those stages that a worker's table has a histogram of. `computed`: the prompt was, by this
    worker; else another one has written the times of that."""
    spans = stage_seconds(stamps, completion_tokens)
    for stage in ALL:
        if stage.name in spans and stage.time in table and (computed or stage.end not in (PREFILL_BEGIN, PREFILL_END)):
            table.observe(stage.time, spans[stage.name])
