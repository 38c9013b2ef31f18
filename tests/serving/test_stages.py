"""Tests of stage times: differences of timestamps in the order of a request's life."""

import itertools

from runtime.serving import stages
from runtime.serving.stages import completed_stages, stage_seconds

WHOLE = {
    stages.RECEIVED: 0,
    stages.DEQUEUED: 10,
    stages.BATCHED: 20,
    stages.EMBEDDED: 30,
    stages.FOUND: 50,
    stages.SEARCHED: 60,
    stages.PREFILL_BEGIN: 100,
    stages.PREFILL_END: 150,
    stages.HANDOVER_BEGIN: 210,
    stages.HANDOVER_END: 280,
    stages.FIRST_TOKEN: 280,
    stages.END: 1280,
}

RETRIEVAL = (stages.BATCHED, stages.EMBEDDED, stages.FOUND, stages.SEARCHED)


def test_the_stages_of_a_request_are_contiguous() -> None:
    found = list(completed_stages(WHOLE))
    assert [stage.name for stage, _, _ in found] == [
        "queue", "batch", "embed", "retrieval", "passages", "admission", "prefill", "room", "pull", "decode",
    ]  # fmt: skip
    for (_, _, end), (_, begin, _) in itertools.pairwise(found):
        assert begin == end
    assert (found[0][1], found[-1][2]) == (0, 1280)


def test_without_retrieval_the_wait_for_admission_begins_when_prefill_receives_the_request() -> None:
    stamps = {name: at for name, at in WHOLE.items() if name not in RETRIEVAL}
    assert ("admission", 10, 100) in [(stage.name, begin, end) for stage, begin, end in completed_stages(stamps)]
    assert "retrieval" not in stage_seconds(stamps, 1)


def test_spans_are_seconds_and_tpot_is_per_later_token() -> None:
    spans = stage_seconds(WHOLE, 11)
    assert spans["handover"] == spans["room"] + spans["pull"] == 130e-9
    assert (spans["ttft"], spans["e2e"], spans["tpot"]) == (280e-9, 1280e-9, 100e-9)
    assert "tpot" not in stage_seconds(WHOLE, 1)


def test_a_missing_timestamp_gives_no_span() -> None:
    assert stage_seconds({stages.RECEIVED: 0}, 0) == {}
