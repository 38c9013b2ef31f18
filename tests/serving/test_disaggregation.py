"""Tests of conditional disaggregation: which prompts decode computes, and that answers equal those of `generate()`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.node.metrics.worker_metrics import DecodeMetrics, PrefillMetrics
from runtime.retrieval.passages import Passage
from runtime.serving.messages import DecodeLoad
from runtime.serving.prefill.job import Disaggregation, virtual_deadline_ns
from runtime.testing.reference import Reference
from tests.serving.workers import Start, Workers

VOCABULARY = 259
PASSAGES = [Passage(f"p{n}", f"Title {n}", 0.1 * n, f"What passage {n} says of it.") for n in range(12)]
NEVER: dict[str, Any] = {"disaggregate": "never"}
IDLE, FULL = DecodeLoad(0, 8, 0), DecodeLoad(8, 8, 0)


def drawn(count: int, longest: int, seed: int = 3) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, random.integers(1, longest)).tolist() for _ in range(count)]


def computed(workers: Workers) -> tuple[float, float]:
    """Return the numbers of prompts computed by prefill and by decode."""
    by = PrefillMetrics.PROMPTS
    return workers.metric("prefill-0", by["prefill"]), workers.metric("prefill-0", by["decode"])


# ---- the rule

ROWS = DecodeLoad(3, 8, 20_000_000)
MS = 1_000_000


@pytest.mark.parametrize(
    ("tokens", "ahead", "load", "by_decode"),
    [
        (50, 0, IDLE, True),  # no row is delayed, and no hand-over is needed
        (50, 9000, FULL, False),  # prefill's pass need not wait for a row
        (50, 9000, DecodeLoad(), False),  # decode's times are unknown
        (50, 0, ROWS, False),  # a free prefill worker avoids delaying the batch
        (50, 30, ROWS, True),  # a busy one is no better
        (90, 9000, ROWS, False),  # the batch's step would exceed the time per token
    ],
)
def test_decode_computes_a_prompt_if_it_finishes_no_later_and_no_step_takes_too_long(
    tokens: int, ahead: int, load: DecodeLoad, by_decode: bool
) -> None:
    rule = Disaggregation("auto", 0.1, chunk_tokens=128)
    rule.record_pass(100, 0.1)  # a token takes a millisecond
    assert rule.route_to_decode(0, "decode-0", tokens, ahead, load) is by_decode


def test_prompts_sent_to_a_decode_worker_count_until_their_expected_completion() -> None:
    rule = Disaggregation("auto", 0.1, chunk_tokens=64)
    assert not rule.route_to_decode(0, "decode-0", 40, 0, IDLE), "no pass has been timed yet"
    rule.record_pass(100, 0.1)  # a token takes a millisecond
    assert rule.route_to_decode(0, "decode-0", 40, 0, IDLE)
    assert not rule.route_to_decode(0, "decode-0", 40, 39, IDLE)
    assert rule.route_to_decode(0, "decode-0", 40, 41, IDLE)
    assert rule.route_to_decode(0, "decode-1", 40, 0, IDLE), "each worker has its own queue"
    assert not rule.route_to_decode(80 * MS - 1, "decode-0", 40, 0, IDLE)
    assert rule.route_to_decode(80 * MS, "decode-0", 40, 0, IDLE)


def test_prefill_computes_a_long_prompt_unless_its_queue_is_longer_than_decodes_chunked_steps() -> None:
    for load, ahead in ((ROWS, 100), (DecodeLoad(0, 8, 20 * MS), 80)):  # five chunks of 64 tokens, steps of 20 ms
        for tokens, by_decode in ((ahead - 1, False), (ahead, True)):
            rule = Disaggregation("auto", 0.1, chunk_tokens=64)
            rule.record_pass(100, 0.1)
            assert rule.route_to_decode(0, "decode-0", 300, tokens, load) is by_decode


# ---- the workers


@pytest.mark.parametrize(("disaggregate", "host_mib"), [("auto", 0), ("never", 64)])
def test_answers_equal_generate_wherever_prompts_are_computed_and_under_preemption(
    start: Start, reference: Reference, disaggregate: str, host_mib: int, tmp_path: Path
) -> None:
    workers = start(
        node={"run_dir": str(tmp_path)},
        kv={"host_mib": host_mib},
        context=320,
        prefill={"slots": 3, "chunk_tokens": 48, "kv_blocks": 60},
        decode={"slots": 6, "kv_blocks": 44, "chunk_tokens": 32},
        handover={"disaggregate": disaggregate},
        slice_ns=1_000,
        waiting_share=0.7,
        slo={"tpot_s": 60.0},
    )
    prompts = [*([number] * 100 for number in range(1, 4)), *drawn(20, 120)]  # 3 * 140 tokens: more than 44 blocks
    workers.submit("first", [1, 2, 3], 1)  # now the time of a pass is known
    workers.run()
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 40, decode_load=FULL if number % 3 == 2 else IDLE)
    workers.run()
    found = [workers.outputs[f"r{number}"].tokens for number in range(len(prompts))]
    assert found == [reference.generate(prompt, 40) for prompt in prompts]
    by_prefill, by_decode = computed(workers)
    assert by_prefill + by_decode == 1 + len(prompts)
    assert by_decode > 0
    assert (by_prefill > 0) == (disaggregate == "auto")
    assert workers.metric("decode-0", DecodeMetrics.PREEMPTIONS) > 0
    workers.assert_nothing_held()


def test_prompts_are_computed_in_chunks_while_the_batch_continues(start: Start, reference: Reference) -> None:
    workers = start(decode={"chunk_tokens": 16}, handover=NEVER)
    workers.submit("short", [1, 2, 3], 60)
    while not workers.outputs["short"].tokens:
        workers.round()
    workers.submit("long", list(range(160)), 5)
    while not workers.decodes["decode-0"].busy or workers.metric("decode-0", DecodeMetrics.RUNNING) < 2:
        workers.round()
    generated = [workers.metric("decode-0", DecodeMetrics.GENERATION_TOKENS)]
    while len(generated) < 2 or generated[-1] - generated[-2] < 2:  # until the long prompt's first token
        workers.round()
        generated.append(workers.metric("decode-0", DecodeMetrics.GENERATION_TOKENS))
    assert np.diff(generated).tolist() == [1.0] * 8 + [2.0], "a token of the short answer with each of nine chunks"
    workers.run()
    assert workers.outputs["short"].tokens == reference.generate([1, 2, 3], 60)
    assert workers.outputs["long"].tokens == reference.generate(list(range(160)), 5)
    workers.assert_nothing_held()


def test_the_death_of_prefill_does_not_affect_prompts_computed_by_decode(start: Start, reference: Reference) -> None:
    workers = start(handover=NEVER, decode={"chunk_tokens": 16})
    prompts = drawn(4, 150)
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 12)
    while computed(workers)[1] < len(prompts) or workers.prefill.busy:
        workers.round()
    workers.prefill.step = lambda: None  # type: ignore[method-assign]
    workers.prefill.close()
    workers.run()
    found = [workers.outputs[f"r{number}"].tokens for number in range(len(prompts))]
    assert found == [reference.generate(prompt, 12) for prompt in prompts]


# ---- hand-overs that fail


@pytest.mark.parametrize("disaggregate", ["always", "never"])
def test_a_hand_over_rejected_by_decode_is_counted_and_restarted(start: Start, disaggregate: str) -> None:
    """The frontend restarts only requests that are lost."""
    workers = start(handover={"disaggregate": disaggregate})
    workers.decodes["decode-0"].handovers.cancel("r")
    workers.submit("r", [5, 6, 7], 6)
    workers.run()
    failed = workers.outputs["r"].failed
    assert failed is not None
    assert failed.code == "worker_lost"
    assert failed.message == "decode-0 rejected the hand-over: cancelled"
    assert workers.metric("prefill-0", PrefillMetrics.OFFERS["rejected"]) == 1
    workers.assert_nothing_held()


# ---- the order of prompts


def test_a_prompts_virtual_deadline_is_six_times_its_service_time() -> None:
    document, chat = virtual_deadline_ns(1_000, 2000, 1e-4), virtual_deadline_ns(1_000_000_000, 100, 1e-4)
    assert (document, chat) == (1_200_001_000, 1_060_000_000), "the chat arrived a second later and runs first"
    assert virtual_deadline_ns(1_200_000_000, 100, 1e-4) > document, "but one that arrives too late does not overtake"
    assert virtual_deadline_ns(5, 2000, 0.0) < virtual_deadline_ns(6, 1, 0.0), (
        "without known times, prompts run in order of arrival"
    )


def test_a_short_prompt_runs_before_the_remaining_chunks_of_a_long_one(start: Start, reference: Reference) -> None:
    workers = start(
        context=1024, prefill={"slots": 3, "chunk_tokens": 16}, handover={"disaggregate": "always"}, kv={"host_mib": 0}
    )
    (long,), (short,) = drawn(1, 2), drawn(1, 2)
    long, short = (long * 400)[:400], [7, 8, 9, 10]
    workers.submit("first", [5, 6, 7], 2)  # so that times are known beforehand
    workers.run()
    workers.submit("long", long, 2)
    for _ in range(3):
        workers.round()
    workers.submit("short", short, 2)
    while not workers.outputs["short"].ended:
        workers.round()
    assert not workers.outputs["long"].tokens
    workers.run()
    assert workers.outputs["long"].tokens == reference.generate(long, 2)
    assert workers.outputs["short"].tokens == reference.generate(short, 2)
