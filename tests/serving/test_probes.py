"""Tests that probes insert passages, time out, are dropped and are retried without changing a token."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.messages import Retrieval
from runtime.testing.reference import Reference
from tests.serving.workers import PASSAGES, FakePool, Start, ragged


@pytest.mark.parametrize("mode", ["wait", "prefetch"])
def test_an_answer_with_inserted_passages_equals_a_fresh_run_on_the_same_tokens(
    start: Start, reference: Reference, mode: Any
) -> None:
    workers = start(context=2048, decode={"slots": 3, "chunk_tokens": 64, "kv_blocks": 300})
    workers.play_pool(FakePool(PASSAGES), FakePool(PASSAGES, polls=3))
    retrieval = Retrieval("docs", k=2, every_tokens=8, probe_mode=mode, probe_tokens=90)
    prompts = ragged(6, seed=3)
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 40, retrieval=retrieval)
    workers.run()
    for number in range(len(prompts)):
        output = workers.outputs[f"r{number}"]
        inserted = [search for search in output.searches if search.inserted]
        assert inserted, "some probe inserted a new passage"
        assert all(len(search.inserted) <= 90 for search in inserted)
        ids = [passage.id for search in output.searches for passage in search.passages]
        assert not any(passage.text for search in output.searches for passage in search.passages), "texts stay here"
        assert len(ids) == len(set(ids)), "no passage is inserted twice"
        # Between two insertions the answer must equal a fresh run on the tokens before.
        places = [search.at_token for search in inserted]
        for begin, end in zip([0, *places], [*places, len(output.tokens)], strict=True):
            if end > begin:
                before = output.sequence(begin)
                assert output.tokens[begin:end] == reference.generate(before, end - begin)
        assert output.last is not None
        assert output.last.stalled_ns == sum(probe.stalled_ns for probe in output.probes)
        assert len(output.probes) >= len(inserted)
        for probe in output.probes:
            assert probe.at_token % 8 == 0
            waited = probe.end_ns - probe.begin_ns
            assert probe.stalled_ns == (waited if mode == "wait" else 0)
        assert sum(probe.passages for probe in output.probes) == sum(len(search.passages) for search in inserted)
    workers.assert_nothing_held()


def test_a_row_probes_only_where_the_model_is_uncertain(start: Start) -> None:
    workers = start(decode={"slots": 3})
    workers.play_pool(FakePool(PASSAGES), FakePool(PASSAGES))
    for name, nats in (("never", 90.0), ("always", 1e-6)):
        retrieval = Retrieval("docs", 1, every_tokens=4, trigger="unsure", threshold=nats, probe_tokens=40)
        workers.submit(name, [5, 6, 7], 14, retrieval=retrieval)
    workers.run()
    assert workers.outputs["never"].probes == []
    assert [probe.at_token for probe in workers.outputs["always"].probes] == [4, 8, 12]
    workers.assert_nothing_held()


def test_an_unanswered_probe_times_out_after_two_seconds_without_delaying_others(start: Start) -> None:
    workers = start()
    workers.play_pool(FakePool(PASSAGES[:2]), FakePool(PASSAGES[2:], polls=1 << 60))
    now_ns = [10**9]
    workers.decodes["decode-0"].probes.clock = lambda: now_ns[0]
    workers.submit("asks", [5, 6, 7], 6, retrieval=Retrieval("docs", 1, every_tokens=4))
    workers.submit("writes", [7, 6, 5], 30)
    while not workers.outputs["writes"].ended:
        workers.round()
    assert len(workers.outputs["asks"].tokens) == 4
    now_ns[0] += 2 * 10**9
    for _ in range(5):
        workers.round()
    assert len(workers.outputs["asks"].tokens) == 4
    now_ns[0] += 1
    workers.run()
    (probe,) = workers.outputs["asks"].probes
    assert (probe.outcome, probe.passages, probe.stalled_ns) == ("late", 0, 2 * 10**9 + 1)
    workers.assert_nothing_held()


def test_a_probe_outstanding_at_its_rows_end_is_reported_as_dropped(start: Start) -> None:
    workers = start()
    workers.play_pool(FakePool(PASSAGES[:2]), FakePool(PASSAGES[2:], polls=100))
    workers.submit("r", [5, 6, 7], 6, retrieval=Retrieval("docs", 1, every_tokens=4, probe_mode="prefetch"))
    workers.run()
    (probe,) = workers.outputs["r"].probes
    assert (probe.at_token, probe.outcome, probe.passages) == (4, "dropped", 0)
    workers.assert_nothing_held()


@pytest.mark.parametrize(("trigger", "rounds"), [("every", 0), ("every", 2), ("every", 4), ("every", 7), ("unsure", 3)])
def test_a_probe_outstanding_at_its_workers_death_is_retried_without_changing_a_token(
    start: Start, rounds: int, trigger: Any
) -> None:
    workers = start(decodes=2, context=1024)
    for worker in ("decode-0", "decode-1"):
        workers.decodes[worker].probes.retriever = FakePool(PASSAGES, polls=3, by_text=True)  # type: ignore[assignment]
    workers.prefill.retriever = FakePool(PASSAGES[:1])  # type: ignore[assignment]
    retrieval = Retrieval("docs", 1, every_tokens=4, probe_tokens=40, trigger=trigger, threshold=1e-6)
    workers.submit("undisturbed", [5, 6, 7], 30, retrieval=retrieval, decode="decode-1")
    workers.submit("cut", [5, 6, 7], 30, retrieval=retrieval)
    while len(workers.outputs["cut"].tokens) < 8:
        workers.round()
    for _ in range(rounds):  # before the probe, during it, or after it
        workers.round()
    workers.lose("decode-0")
    workers.restart("cut", "decode-1")
    workers.run()
    cut, undisturbed = workers.outputs["cut"], workers.outputs["undisturbed"]
    assert undisturbed.inserted, "probes insert passages"
    assert (cut.tokens, cut.text, cut.inserted) == (undisturbed.tokens, undisturbed.text, undisturbed.inserted)
    workers.assert_nothing_held()
