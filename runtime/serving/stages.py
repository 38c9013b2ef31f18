"""The named moments of a request, stamped where they happen, and the stage times that are their differences."""

RECEIVED = "received"  # the frontend has read the request
DEQUEUED = "dequeued"  # a prefill worker takes it up
EMBEDDED = "embedded"  # its query vector is ready
SEARCHED = "searched"  # the pool has answered
PREFILL_BEGIN = "prefill_begin"  # the first chunk goes through the model
PREFILL_END = "prefill_end"  # the first token is sampled
HANDOVER_END = "handover_end"  # decode has pulled the KV rows
FIRST_TOKEN = "first_token"  # the first token leaves decode
END = "end"  # the last token leaves decode

_SPANS = {
    "queue": (RECEIVED, DEQUEUED),
    "embed": (DEQUEUED, EMBEDDED),
    "retrieval": (EMBEDDED, SEARCHED),
    "prefill": (PREFILL_BEGIN, PREFILL_END),
    "handover": (PREFILL_END, HANDOVER_END),
    "ttft": (RECEIVED, FIRST_TOKEN),
    "e2e": (RECEIVED, END),
}


def spans_seconds(stages: dict[str, int], completion_tokens: int) -> dict[str, float]:
    """Stage times in seconds from stamps in ns; a stage that did not happen is left out. `tpot` is per output token."""
    spans = {
        name: (stages[end] - stages[begin]) / 1e9
        for name, (begin, end) in _SPANS.items()
        if begin in stages and end in stages
    }
    if completion_tokens > 1 and FIRST_TOKEN in stages and END in stages:
        spans["tpot"] = (stages[END] - stages[FIRST_TOKEN]) / 1e9 / (completion_tokens - 1)
    return spans
