"""Tests that prefill and decode together return the tokens of `generate()`, under evictions, restarts and probes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.errors import WorkerLost
from runtime.node.config import HandoverMode
from runtime.node.metrics.worker_metrics import DecodeMetrics, PrefillMetrics
from runtime.serving import stages
from runtime.serving.frontend.cached_blocks import PrefixKeys, WorkerBlocks
from runtime.serving.kv.blocks import block_keys
from runtime.serving.kv.tiers import Tiers
from runtime.serving.messages import ListCached, Retrieval
from runtime.serving.model.language_model import LanguageModel, SampledToken
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.reference import Reference
from tests.serving.workers import PASSAGES, VOCABULARY, FakePool, Start, Workers, ragged


def answers(workers: Workers, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, max_tokens)
    workers.run()
    return [workers.outputs[f"r{number}"].tokens for number in range(len(prompts))]


@pytest.mark.parametrize(
    ("start", "host_mib", "mode"),
    [("CPU", 64, "p2p"), ("GPU", 0, "p2p"), ("CPU", 64, "pool"), ("GPU", 64, "pool")],
    indirect=["start"],
)
def test_answers_equal_generate_when_blocks_run_out_and_rows_are_preempted(
    start: Start, reference: Reference, host_mib: int, mode: HandoverMode, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Tiers, "swap_out", Tiers.save)  # whatever this machine measures
    workers = start(
        node={"run_dir": str(tmp_path)},
        kv={"host_mib": host_mib},
        handover={"mode": mode, "disaggregate": "always"},
        context=320,
        prefill={"slots": 3, "chunk_tokens": 48, "kv_blocks": 60},
        decode={"slots": 6, "kv_blocks": 44, "chunk_tokens": 32},
        slice_ns=1_000,
        waiting_share=0.7,
    )
    random = np.random.default_rng(2)
    crowd = [random.integers(0, VOCABULARY, 100).tolist() for _ in range(3)]  # 3 * 140 tokens: more than 44 blocks
    prompts = [*crowd, *ragged(24, seed=1)]
    for number, prompt in enumerate(crowd):
        workers.submit(f"r{number}", prompt, 40)
    workers.offer("r0", "r1", "r2")  # all three decode concurrently, even if later hand-overs are slower than answers
    for number, prompt in enumerate(prompts[3:], start=3):
        workers.submit(f"r{number}", prompt, 40)
    workers.run()
    found = [workers.outputs[f"r{number}"].tokens for number in range(len(prompts))]
    assert found == [reference.generate(prompt, 40) for prompt in prompts]
    assert workers.metric("decode-0", DecodeMetrics.PREEMPTIONS) > 0
    assert (workers.metric("decode-0", DecodeMetrics.SWAPPED) > 0) == (host_mib > 0)
    assert (workers.metric("decode-0", DecodeMetrics.TIER_LOADED["host"]) > 0) == (host_mib > 0)
    assert workers.metric("prefill-0", PrefillMetrics.HANDOVERS[mode]) == len(prompts)
    assert workers.metric("decode-0", DecodeMetrics.HANDOVER_BYTES) > 0
    workers.assert_nothing_held()
    if host_mib:
        assert not any(file.stat().st_mode & 0o777 == 0o400 for file in (tmp_path / "kv").iterdir()), "none is held"


def test_a_common_prefix_is_computed_once_and_pulled_once(start: Start, reference: Reference) -> None:
    workers = start()
    prefix = list(range(3, 203))
    prompts = [[*prefix, 210 + number] for number in range(4)]
    found = []
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 6)
        workers.run()
        found.append(workers.outputs[f"r{number}"].tokens)
    assert found == [reference.generate(prompt, 6) for prompt in prompts]
    assert workers.metric("prefill-0", PrefillMetrics.PREFIX_HIT_TOKENS) == 3 * 200
    assert workers.metric("decode-0", DecodeMetrics.PREFIX_HIT_TOKENS) == 3 * 200
    model = workers.plan.config.own_model
    assert model is not None
    block_bytes = ModelInfo.read(model.name).kv_bytes(1, workers.plan.block_tokens)
    assert workers.metric("decode-0", DecodeMetrics.HANDOVER_BYTES) == block_bytes * (26 + 1 + 1 + 1)
    workers.assert_nothing_held()


def test_workers_publish_the_blocks_that_they_have_cached_under_the_same_keys(start: Start) -> None:
    workers = start()
    views = {name: WorkerBlocks(PrefixKeys(), 1000, lambda key: False) for name in ("prefill-0", "decode-0")}

    def receive_until(batches: Callable[[], bool]) -> None:
        for _ in range(1_000_000):  # batches have a least distance
            if batches():
                return
            workers.round()
            while workers.cached:
                batch = workers.cached.pop(0)
                views[batch.worker].apply(batch)
        raise AssertionError(f"they have published {[len(view) for view in views.values()]} blocks")

    workers.submit("r", [*range(3, 203), 210], 6)
    workers.run()
    receive_until(lambda: all(len(view) == 25 for view in views.values()))  # of eight tokens
    keys = list(block_keys(list(range(3, 203)), 8, workers.identity))
    assert all(view.current and view.share(key) == 1.0 for view in views.values() for key in keys)
    decode = views["decode-0"] = WorkerBlocks(PrefixKeys(), 1000, lambda key: False)
    workers.send("decode-0", ListCached())
    receive_until(lambda: decode.current)
    assert all(decode.share(key) == 1.0 for key in keys)


def test_the_first_and_the_last_piece_carry_timestamps(start: Start) -> None:
    workers = start()
    workers.play_pool(FakePool(PASSAGES[:2]), FakePool(PASSAGES[2:]))
    workers.submit("r", [5, 6, 7], 6, retrieval=Retrieval("docs", 1))
    workers.run()
    output = workers.outputs["r"]
    assert list(output.searches[0].stages) == [
        stages.RECEIVED, stages.DEQUEUED, stages.EMBEDDED, stages.FOUND, stages.SEARCHED,
    ]  # fmt: skip
    assert stages.FIRST_TOKEN in output.stages[0]
    assert stages.END not in output.stages[0]
    assert output.last is not None
    stamps = list(output.last.stages.values())
    assert stamps[1:] == sorted(stamps[1:])
    assert list(output.last.stages)[-5:] == [
        stages.PREFILL_END, stages.HANDOVER_BEGIN, stages.HANDOVER_END, stages.FIRST_TOKEN, stages.END,
    ]  # fmt: skip
    assert len(output.stages) == 2


@pytest.mark.parametrize(("rounds", "disaggregate"), [(0, "auto"), (1, "never"), (3, "auto"), (6, "never")])
def test_a_cancelled_request_releases_all_resources(start: Start, disaggregate: str, rounds: int) -> None:
    chunks = {"chunk_tokens": 32}
    workers = start(prefill=chunks, decode=chunks, handover={"disaggregate": disaggregate}, slice_ns=1_000)
    workers.submit("stays", [1, 2, 3], 60)
    for number in range(3):
        workers.submit(f"r{number}", list(range(3, 150)), 200)
    for _ in range(rounds):
        workers.round()
    for number in range(3):
        workers.cancel(f"r{number}")
        del workers.outputs[f"r{number}"]
    workers.run()
    assert len(workers.outputs["stays"].tokens) == 60
    workers.assert_nothing_held()


def test_a_prompt_with_a_head_start_is_prefilled_before_shorter_ones(start: Start) -> None:
    workers = start(prefill={"slots": 1, "chunk_tokens": 16})
    workers.submit("first", [9] * 40, 1)
    workers.offer("first")  # it occupies the only slot until decode has pulled it
    for number, head_start_s in enumerate((0.0, 2.0, -1.0, 1.0)):
        workers.submit(f"r{number}", [number + 1] * (10 + 30 * (number == 1)), 1, head_start_s=head_start_s)
    while workers.metric("prefill-0", PrefillMetrics.WAITING) < 4:
        workers.prefill.step()
    while len(workers.ended) < 5:
        workers.round()
    assert workers.ended == ["first", "r1", "r3", "r0", "r2"]


def test_a_long_hand_over_is_pulled_in_slices_while_the_batch_continues(
    start: Start,
) -> None:
    workers = start(slice_ns=1)
    workers.submit("short", [1, 2, 3], 200)
    while not workers.outputs["short"].tokens:
        workers.round()
    decode = workers.decodes["decode-0"]
    workers.submit("long", list(range(250)), 2)
    workers.offer("long")  # the batch is stopped until then, because it could finish meanwhile
    seen = set()
    while not workers.outputs["long"].ended:
        before = workers.metric("decode-0", DecodeMetrics.GENERATION_TOKENS)
        workers.round()
        if decode.handovers.pulling:
            seen.add(workers.metric("decode-0", DecodeMetrics.GENERATION_TOKENS) - before)
    assert seen == {1}, "each round of the pull was a step of the batch too"


def test_a_row_whose_logits_are_not_finite_ends_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    step = LanguageModel.step

    def broken(model: LanguageModel, chunks: Any, *more: Any) -> Any:
        sampled = step(model, chunks, *more)
        return [
            SampledToken(None, None) if chunk.start == 7 else one for chunk, one in zip(chunks, sampled, strict=True)
        ]

    monkeypatch.setattr(LanguageModel, "step", broken)
    workers = start()
    workers.submit("broken", [1] * 5, 10)
    workers.submit("whole", [2] * 20, 10)
    workers.run()
    failed = workers.outputs["broken"].failed
    assert failed is not None
    assert failed.message == "the model returned no finite logit"
    assert len(workers.outputs["broken"].tokens) == 3
    assert len(workers.outputs["whole"].tokens) == 10
    workers.assert_nothing_held()


@pytest.mark.parametrize("start", ["GPU"], indirect=True)
def test_a_decode_worker_with_another_kv_type_rejects_hand_overs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(("bfloat16", "bfloat16", "float32"))  # prefill's type, and those of two decode workers
    monkeypatch.setattr("runtime.serving.model.language_model.kv_type", lambda weights, kernels: next(kinds))
    workers = start(weights="bfloat16", decodes=2)
    workers.submit("r", list(range(3, 60)), 4, decode="decode-1")
    workers.run()
    failed = workers.outputs["r"].failed
    assert isinstance(failed, WorkerLost)
    assert "its KV is of another model or type" in failed.message


@pytest.mark.parametrize(("disaggregate", "undelivered"), [("auto", 0), ("auto", 1), ("auto", 3), ("never", 1)])
def test_an_answer_continues_unchanged_on_another_decode_worker(
    start: Start, reference: Reference, disaggregate: str, undelivered: int
) -> None:
    """Also if the lost worker's last messages arrive after the next one was asked to continue, and if the next one
    computes the context."""
    workers = start(decodes=2, context=1024, handover={"disaggregate": disaggregate})
    workers.play_pool(FakePool(PASSAGES[:2]), FakePool(PASSAGES[2:], polls=2))
    retrieval = Retrieval("docs", 2, every_tokens=8)
    prompts = ragged(5, seed=4)
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 40)
    workers.submit("injected", [5, 6, 7], 40, retrieval=retrieval)
    workers.submit("sampled", [8, 9], 40, sampling=sampled)
    workers.submit("undisturbed", [8, 9], 40, sampling=sampled, decode="decode-1")
    while len(workers.outputs["injected"].tokens) < 20:
        workers.round()
    text = workers.outputs["sampled"].text
    assert text
    workers.lose("decode-0", undelivered)
    lost = [name for name, output in workers.outputs.items() if not output.ended and name != "undisturbed"]
    assert "injected" in lost
    for name in lost:
        workers.restart(name, "decode-1")
    workers.run()
    outputs = workers.outputs
    assert [outputs[f"r{n}"].tokens for n in range(5)] == [reference.generate(prompt, 40) for prompt in prompts]
    moved, undisturbed = outputs["sampled"], outputs["undisturbed"]
    assert (moved.tokens, moved.text) == (undisturbed.tokens, undisturbed.text)
    injected = outputs["injected"]
    assert len(injected.tokens) == 40
    assert len(injected.passages) == len(set(injected.passages))
    places = sorted(injected.inserted)
    for begin, end in zip([0, *places], [*places, 40], strict=True):
        assert injected.tokens[begin:end] == reference.generate(injected.sequence(begin), end - begin)
    assert injected.last is not None
    assert injected.last.prompt_tokens == len(injected.prompt)
    workers.assert_nothing_held()


def test_ragged_prompts_equal_generate_through_all_paths_combined(
    start: Start, reference: Reference, tmp_path: Path
) -> None:
    """Thirty: chunked prefill, shared prefixes, joins mid-decode, preempted rows, a small host
    tier, a lost worker."""
    random = np.random.default_rng(6)
    workers = start(
        decodes=2,
        context=320,
        prefill={"slots": 4, "chunk_tokens": 64, "kv_blocks": 80},
        decode={"slots": 8, "kv_blocks": 44, "chunk_tokens": 48},
        node={"run_dir": str(tmp_path)},
        kv={"host_mib": 1},
        slice_ns=10_000,
        waiting_share=0.9,
    )
    prompts = ragged(30, seed=5)
    for number, size in zip((0, 2, 4, 6), (130, 130, 40, 10), strict=True):  # these are preempted for the former
        prompts[number] = random.integers(0, VOCABULARY, size).tolist()
        workers.submit(f"r{number}", prompts[number], 24)
    workers.offer("r0", "r2", "r4", "r6")
    others = [number for number in range(30) if number not in (0, 2, 4, 6)]
    while not workers.metric("decode-0", DecodeMetrics.PREEMPTIONS):
        number = others.pop(0)
        workers.submit(f"r{number}", prompts[number], 24, decode=f"decode-{number % 2}")
        for _ in range(int(random.integers(0, 4))):
            workers.round()
    while not workers.outputs["r0"].tokens:
        workers.receive()
    lost = [
        f"r{number}" for number in range(0, 30, 2) if number not in others and not workers.outputs[f"r{number}"].ended
    ]
    assert any(workers.outputs[name].tokens for name in lost), "some answers are incomplete"
    workers.lose("decode-0", undelivered=2)
    for name in lost:
        workers.restart(name, "decode-1")
    for number in others:
        workers.submit(f"r{number}", prompts[number], 24, decode="decode-1")
        for _ in range(int(random.integers(0, 4))):
            workers.round()
    workers.run()
    assert workers.metric("prefill-0", PrefillMetrics.PREFIX_HIT_TOKENS) > 0
    found = [workers.outputs[f"r{number}"].tokens for number in range(30)]
    assert found == [reference.generate(prompt, 24) for prompt in prompts]
    workers.assert_nothing_held()
