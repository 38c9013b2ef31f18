"""Prompts that decode computes itself: which ones those are, and that their answers are what `generate()` gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model needs the extra [llm]")

from benchmarks.model.reference import Reference
from runtime.node.metrics.worker_metrics import DecodeMetrics, Histogram, PrefillMetrics
from runtime.retrieval.passages import Passage
from runtime.serving import stages
from runtime.serving.messages import DecodeLoad, Retrieval
from runtime.serving.prefill.job import Disaggregation, should_prefill_on_decode, virtual_deadline_ns
from tests.serving.workers import FakePool, Start, Workers

VOCABULARY = 259
PASSAGES = [Passage(f"p{n}", f"Title {n}", 0.1 * n, f"What passage {n} says of it.") for n in range(12)]
NEVER: dict[str, Any] = {"disaggregate": "never"}
IDLE, FULL = DecodeLoad(0, 8, 0), DecodeLoad(8, 8, 0)


def drawn(count: int, longest: int, seed: int = 3) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, random.integers(1, longest)).tolist() for _ in range(count)]


def computed(workers: Workers) -> tuple[float, float]:
    """Prompts computed by prefill, and by decode."""
    by = PrefillMetrics.PROMPTS
    return workers.metric("prefill-0", by["prefill"]), workers.metric("prefill-0", by["decode"])


def seen(workers: Workers, name: str, histogram: Histogram) -> float:
    """How many times a worker has observed."""
    return sum(workers.tables[name].read(histogram)[:-1])


def nothing_is_held(workers: Workers) -> None:
    workers.settle()
    assert set(workers.held().values()) == {(0, 0)}


# ---- the rule

ROWS = DecodeLoad(3, 8, 20_000_000)
MS = 1_000_000


@pytest.mark.parametrize(
    ("chunk_s", "beside_s", "ahead_s", "sent_s", "load", "by_decode"),
    [
        (0.05, 0.0, 0.0, 0.0, IDLE, True),  # nobody is disturbed, and nothing is handed over
        (0.05, 0.0, 0.0, 0.01, IDLE, False),  # prefill is free sooner
        (0.05, 0.0, 0.02, 0.01, IDLE, True),
        (0.05, 0.0, 9.0, 0.0, FULL, False),  # prefill's pass need not wait for a row
        (0.05, 0.0, 9.0, 0.0, DecodeLoad(), False),  # nothing is known of decode
        (0.05, 0.02, 0.0, 0.0, ROWS, False),  # a free prefill worker keeps it away from the batch
        (0.05, 0.02, 0.03, 0.0, ROWS, True),  # a busy one does not
        (0.09, 0.02, 9.0, 0.0, ROWS, False),  # the batch's step would take longer than a token may
    ],
)
def test_a_prompt_is_computed_where_it_is_decoded_if_that_is_done_no_later_and_no_step_takes_too_long(
    chunk_s: float, beside_s: float, ahead_s: float, sent_s: float, load: DecodeLoad, by_decode: bool
) -> None:
    assert should_prefill_on_decode(chunk_s, beside_s, ahead_s, sent_s, load, tpot_s=0.1) is by_decode


def test_what_was_sent_to_a_decode_worker_counts_until_it_will_have_computed_it() -> None:
    rule = Disaggregation("auto", 0.1, chunk_tokens=64)
    assert not rule.route_to_decode(0, "decode-0", 40, 0, IDLE), "no pass was timed yet"
    rule.record_pass(100, 0.1)  # a token takes a millisecond
    assert rule.route_to_decode(0, "decode-0", 40, 0, IDLE)
    assert not rule.route_to_decode(0, "decode-0", 40, 39, IDLE)
    assert rule.route_to_decode(0, "decode-0", 40, 41, IDLE)
    assert rule.route_to_decode(0, "decode-1", 40, 0, IDLE), "each worker has a queue of its own"
    assert not rule.route_to_decode(80 * MS - 1, "decode-0", 40, 0, IDLE)
    assert rule.route_to_decode(80 * MS, "decode-0", 40, 0, IDLE)


def test_a_long_prompt_is_prefills_unless_its_queue_is_longer_than_the_steps_beside_the_prompts_chunks() -> None:
    for load, ahead in ((ROWS, 100), (DecodeLoad(0, 8, 20 * MS), 80)):  # five chunks of 64 tokens, steps of 20 ms
        for tokens, by_decode in ((ahead - 1, False), (ahead, True)):
            rule = Disaggregation("auto", 0.1, chunk_tokens=64)
            rule.record_pass(100, 0.1)
            assert rule.route_to_decode(0, "decode-0", 300, tokens, load) is by_decode


def test_a_node_may_compute_all_or_none_where_they_are_decoded() -> None:
    for mode, by_decode in (("never", True), ("always", False)):
        rule = Disaggregation(mode, 0.1, 64)  # type: ignore[arg-type]
        for tokens, load in ((1, IDLE), (100_000, FULL)):
            assert rule.route_to_decode(0, "decode-0", tokens, 0, load) is by_decode
            rule.record_pass(100, 0.1)


# ---- the workers


@pytest.mark.parametrize("disaggregate", ["auto", "never"])
@pytest.mark.parametrize("order", ["prefill_first", "decode_first"])
@pytest.mark.parametrize("host_mib", [0, 64])
def test_answers_equal_generate_wherever_prompts_are_computed_and_when_rows_make_room(
    start: Start, reference: Reference, disaggregate: str, order: str, host_mib: int, tmp_path: Path
) -> None:
    workers = start(
        node={"run_dir": str(tmp_path)},
        kv={"host_mib": host_mib},
        context=320,
        prefill={"slots": 3, "chunk_tokens": 48, "kv_blocks": 60},
        decode={"slots": 6, "kv_blocks": 44, "chunk_tokens": 32},
        handover={"order": order, "disaggregate": disaggregate, "waiting_share": 0.7, "slice_s": 1e-6},
        slo={"tpot_s": 60.0},
    )
    prompts = [*([number] * 100 for number in range(1, 4)), *drawn(20, 120)]  # 3 * 140 tokens: more than 44 blocks
    workers.submit("first", [1, 2, 3], 1)  # now it is known what a pass takes
    workers.run()
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 40, decode_load=FULL if number % 3 == 2 else IDLE)
    workers.run()
    found = [workers.told[f"r{number}"].tokens for number in range(len(prompts))]
    assert found == [reference.generate(prompt, 40) for prompt in prompts]
    by_prefill, by_decode = computed(workers)
    assert by_prefill + by_decode == 1 + len(prompts)
    assert by_decode > 0
    assert (by_prefill > 0) == (disaggregate == "auto")
    assert workers.metric("decode-0", DecodeMetrics.PREEMPTIONS) > 0
    nothing_is_held(workers)


def test_prompts_are_computed_in_chunks_beside_the_batch_which_goes_on(start: Start, reference: Reference) -> None:
    workers = start(decode={"chunk_tokens": 16}, handover=NEVER)
    workers.submit("short", [1, 2, 3], 60)
    while not workers.told["short"].tokens:
        workers.round()
    workers.submit("long", list(range(160)), 5)
    while not workers.decodes["decode-0"].busy or workers.metric("decode-0", DecodeMetrics.RUNNING) < 2:
        workers.round()
    generated = [workers.metric("decode-0", DecodeMetrics.GENERATION_TOKENS)]
    while len(generated) < 2 or generated[-1] - generated[-2] < 2:  # until the long prompt's first token
        workers.round()
        generated.append(workers.metric("decode-0", DecodeMetrics.GENERATION_TOKENS))
    assert np.diff(generated).tolist() == [1.0] * 8 + [2.0], "one of the short one's with each of nine more chunks"
    workers.run()
    assert workers.told["short"].tokens == reference.generate([1, 2, 3], 60)
    assert workers.told["long"].tokens == reference.generate(list(range(160)), 5)
    nothing_is_held(workers)


def test_a_prefix_that_decode_has_is_not_computed_again_whoever_computed_it(start: Start, reference: Reference) -> None:
    workers = start(slo={"tpot_s": 60.0})
    prefix = list(range(3, 203))
    for number, load in enumerate((FULL, IDLE, IDLE)):
        workers.submit(f"r{number}", [*prefix, 210 + number], 6, decode_load=load)
        workers.run()
        assert workers.told[f"r{number}"].tokens == reference.generate([*prefix, 210 + number], 6)
    assert computed(workers) == (1, 2)
    assert workers.metric("decode-0", DecodeMetrics.PREFIX_HIT_TOKENS) == 2 * 200
    nothing_is_held(workers)


def test_the_stages_of_a_prompt_that_decode_computes_are_its_own_and_nothing_is_handed_over(start: Start) -> None:
    workers = start(handover=NEVER)
    workers.play_pool(FakePool(PASSAGES[:2]), FakePool(PASSAGES[2:]))
    workers.submit("r", [5, 6, 7], 6, retrieval=Retrieval("docs", 1))
    workers.run()
    last = workers.told["r"].last
    assert last is not None
    assert list(last.stages) == [
        stages.RECEIVED, stages.DEQUEUED, stages.EMBEDDED, stages.SEARCHED, stages.PREFILL_BEGIN, stages.PREFILL_END,
        stages.FIRST_TOKEN, stages.END,
    ]  # fmt: skip
    stamps = list(last.stages.values())
    assert stamps[1:] == sorted(stamps[1:])
    assert seen(workers, "prefill-0", PrefillMetrics.PREFILL_TIME) == 0
    assert seen(workers, "decode-0", DecodeMetrics.ADMISSION_TIME) == 1
    assert seen(workers, "decode-0", DecodeMetrics.PREFILL_TIME) == 1
    assert seen(workers, "decode-0", DecodeMetrics.HANDOVER_TIME) == 0
    assert seen(workers, "decode-0", DecodeMetrics.INTER_TOKEN) == 5, "the first token follows none"


def test_the_times_of_a_prompt_that_prefill_computed_are_not_written_by_decode_too(start: Start) -> None:
    workers = start(handover={"disaggregate": "always"})
    workers.submit("r", [5, 6, 7], 6, decode_load=IDLE)
    workers.run()
    assert seen(workers, "prefill-0", PrefillMetrics.PREFILL_TIME) == 1
    assert seen(workers, "decode-0", DecodeMetrics.HANDOVER_TIME) == 1
    assert seen(workers, "decode-0", DecodeMetrics.PREFILL_TIME) == 0


@pytest.mark.parametrize("mode", ["wait", "prefetch"])
def test_probes_bring_passages_into_answers_whose_prompt_decode_computed(
    start: Start, reference: Reference, mode: Any
) -> None:
    workers = start(context=2048, decode={"slots": 3, "chunk_tokens": 64, "kv_blocks": 300}, handover=NEVER)
    workers.play_pool(FakePool(PASSAGES), FakePool(PASSAGES, polls=3))
    retrieval = Retrieval("docs", k=2, every_tokens=8, probe_mode=mode, probe_tokens=90)
    for number, prompt in enumerate(drawn(5, 150)):
        workers.submit(f"r{number}", prompt, 40, retrieval=retrieval)
    workers.run()
    for number in range(5):
        told = workers.told[f"r{number}"]
        places = sorted(told.inserted)
        assert places, "some probe brought something new"
        for begin, end in zip([0, *places], [*places, 40], strict=True):
            assert told.tokens[begin:end] == reference.generate(told.sequence(begin), end - begin)
    nothing_is_held(workers)


@pytest.mark.parametrize("unheard", [0, 1, 3])
def test_an_answer_goes_on_with_another_decode_worker_that_computes_its_context(
    start: Start, reference: Reference, unheard: int
) -> None:
    workers = start(decodes=2, context=1024, handover=NEVER)
    workers.play_pool(FakePool(PASSAGES[:2]), FakePool(PASSAGES[2:], polls=2))
    prompts = drawn(5, 150, seed=4)
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 40)
    workers.submit("injected", [5, 6, 7], 40, retrieval=Retrieval("docs", 2, every_tokens=8))
    while len(workers.told["injected"].tokens) < 20:
        workers.round()
    workers.lose("decode-0", unheard)
    lost = [name for name, told in workers.told.items() if not told.ended]
    assert "injected" in lost
    for name in lost:
        workers.restart(name, "decode-1")
    workers.run()
    told = workers.told
    assert [told[f"r{n}"].tokens for n in range(5)] == [reference.generate(prompt, 40) for prompt in prompts]
    injected = told["injected"]
    places = sorted(injected.inserted)
    for begin, end in zip([0, *places], [*places, 40], strict=True):
        assert injected.tokens[begin:end] == reference.generate(injected.sequence(begin), end - begin)
    nothing_is_held(workers)


def test_the_death_of_prefill_does_not_touch_what_decode_computes(start: Start, reference: Reference) -> None:
    workers = start(handover=NEVER, decode={"chunk_tokens": 16})
    prompts = drawn(4, 150)
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 12)
    while computed(workers)[1] < len(prompts) or workers.prefill.busy:
        workers.round()
    workers.prefill.step = lambda: None  # type: ignore[method-assign]
    workers.prefill.close()
    workers.run()
    found = [workers.told[f"r{number}"].tokens for number in range(len(prompts))]
    assert found == [reference.generate(prompt, 12) for prompt in prompts]


# ---- hand-overs that fail


@pytest.mark.parametrize(("policy", "code"), [("recompute", "worker_lost"), ("fail", "unavailable")])
@pytest.mark.parametrize("disaggregate", ["always", "never"])
def test_a_hand_over_that_decode_refuses_is_counted_and_started_again_or_not(
    start: Start, policy: str, code: str, disaggregate: str
) -> None:
    """The frontend starts again what is lost, and nothing else."""
    workers = start(handover={"failure_policy": policy, "disaggregate": disaggregate})
    workers.decodes["decode-0"].handovers.cancel("r")
    workers.submit("r", [5, 6, 7], 6)
    workers.run()
    failed = workers.told["r"].failed
    assert failed is not None
    assert failed.code == code
    assert failed.message == "decode-0 rejected the hand-over: cancelled"
    assert workers.metric("prefill-0", PrefillMetrics.OFFERS["rejected"]) == 1
    nothing_is_held(workers)


# ---- the order of prompts


def test_a_prompt_has_its_turn_after_six_times_what_it_takes_alone() -> None:
    document, chat = virtual_deadline_ns(1_000, 2000, 1e-4), virtual_deadline_ns(1_000_000_000, 100, 1e-4)
    assert (document, chat) == (1_200_001_000, 1_060_000_000), "the chat came a second later and goes first"
    assert virtual_deadline_ns(1_200_000_000, 100, 1e-4) > document, "but none overtakes that came too late for it"
    assert virtual_deadline_ns(5, 2000, 0.0) < virtual_deadline_ns(6, 1, 0.0), (
        "as long as no time is known, who comes first goes first"
    )


def test_a_short_prompt_is_run_before_the_rest_of_a_long_one(start: Start, reference: Reference) -> None:
    workers = start(
        context=1024, prefill={"slots": 3, "chunk_tokens": 16}, handover={"disaggregate": "always"}, kv={"host_mib": 0}
    )
    (long,), (short,) = drawn(1, 2), drawn(1, 2)
    long, short = (long * 400)[:400], [7, 8, 9, 10]
    workers.submit("first", [5, 6, 7], 2)  # so that times are known
    workers.run()
    workers.submit("long", long, 2)
    for _ in range(3):
        workers.round()
    workers.submit("short", short, 2)
    while not workers.told["short"].ended:
        workers.round()
    assert not workers.told["long"].tokens
    workers.run()
    assert workers.told["long"].tokens == reference.generate(long, 2)
    assert workers.told["short"].tokens == reference.generate(short, 2)


# ---- what the planner counts by


def test_prefill_counts_the_time_of_its_passes_and_the_tokens_that_it_leaves_to_decode(start: Start) -> None:
    kept, left = start(handover={"disaggregate": "always"}), start(handover=NEVER)
    for workers in (kept, left):
        workers.submit("one", list(range(3, 43)), 2)
        workers.run()
    assert 0 < kept.metric("prefill-0", PrefillMetrics.PASS_SECONDS) < 60
    assert left.metric("prefill-0", PrefillMetrics.PASS_SECONDS) == 0
    tokens = [
        [one.metric("prefill-0", m) for m in (PrefillMetrics.PROMPT_TOKENS, PrefillMetrics.NEW_TOKENS["decode"])]
        for one in (kept, left)
    ]
    assert tokens == [[40, 0], [40, 40]]
