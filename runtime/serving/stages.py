"""The named moments of a request, stamped where they happen, and the stage times that are their differences."""

from collections.abc import Iterator

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

# In the order of a request's life: name, where it begins (the first of these that was stamped), where it ends.
STAGES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("queue", (RECEIVED,), DEQUEUED),
    ("embed", (DEQUEUED, RECEIVED), EMBEDDED),
    ("retrieval", (EMBEDDED,), SEARCHED),
    ("admission", (SEARCHED, DEQUEUED), PREFILL_BEGIN),  # until prefill has KV blocks for it
    ("prefill", (PREFILL_BEGIN,), PREFILL_END),
    ("room", (PREFILL_END,), HANDOVER_BEGIN),  # until decode has KV blocks for it
    ("pull", (HANDOVER_BEGIN,), HANDOVER_END),
    ("decode", (FIRST_TOKEN,), END),
)
# Differences that span several stages.
_SUMS = (
    ("handover", (PREFILL_END,), HANDOVER_END),
    ("ttft", (RECEIVED,), FIRST_TOKEN),
    ("e2e", (RECEIVED,), END),
)


def stages_of(stamps: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Name, begin and end in ns of every stage that is over, in the order of a request's life."""
    yield from _between(stamps, STAGES)


def spans_seconds(stamps: dict[str, int], completion_tokens: int) -> dict[str, float]:
    """Stage times in seconds from stamps in ns; a stage that did not happen is left out. `tpot` is per output token."""
    spans = {name: (end - begin) / 1e9 for name, begin, end in _between(stamps, STAGES + _SUMS)}
    if completion_tokens > 1 and FIRST_TOKEN in stamps and END in stamps:
        spans["tpot"] = (stamps[END] - stamps[FIRST_TOKEN]) / 1e9 / (completion_tokens - 1)
    return spans


def _between(
    stamps: dict[str, int], spans: tuple[tuple[str, tuple[str, ...], str], ...]
) -> Iterator[tuple[str, int, int]]:
    for name, begins, end in spans:
        begin = next((stamps[begin] for begin in begins if begin in stamps), None)
        if begin is not None and end in stamps:
            yield name, begin, stamps[end]
