"""Lanes of the embedding stage: threads of prefill's texts, of others, of embedders on GPUs and on servers."""

import os
from collections.abc import Callable

import pytest

from runtime.errors import (
    DeviceFailed,
)
from runtime.retrieval.embedding.embedder import ON_GPU, SENT
from runtime.retrieval.embedding.text_queue import Part
from runtime.testing.waiting import until
from tests.retrieval.embedding_harness import (
    SOON_S,
    Embedder,
    Harness,
    value,
)


def test_a_text_of_prefill_does_not_wait_for_probes_and_documents(harness: Harness) -> None:
    busy = Embedder(harness)
    others = harness.stage.submit(busy, ["document"] * 8), harness.stage.submit(busy, ["probe"], part="decode")
    until(lambda: bool(busy.batches))
    harness.after(*harness.held)
    assert value(harness.ask("prompt")) == 6.0
    assert not any(other.done() for other in others)
    busy.gate.set()
    assert [value(other) for other in others] == [8.0, 5.0]


def test_probes_and_documents_do_not_starve_while_texts_of_prefill_keep_all_threads_busy(harness: Harness) -> None:
    busy = Embedder(harness)
    harness.stage.submit(busy, ["occupies the others' thread"], part="bulk")
    until(lambda: bool(busy.batches))
    documents = harness.ask("document 1", "document 2", kind="passage", part="bulk")
    order = harness.after(documents, *[harness.ask(f"prompt {n}") for n in range(700)])
    assert [place for place, batch in enumerate(order) if batch[0].startswith("document")] == [8, 17]
    busy.gate.set()


def test_probes_and_documents_are_embedded_by_niced_threads_while_texts_of_prefill_come(harness: Harness) -> None:
    harness.open()
    parts: list[Part] = ["bulk", "decode", "prefill", "bulk", "decode", "bulk", "prefill", "bulk"]
    for number, part in enumerate(parts):
        harness.now += 1_500_000_000
        value(harness.ask(f"text {number}", part=part))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert harness.embedder.niceness[1:] == [19, own, own, 19, own, own, own, 19]


def test_what_niced_threads_leave_is_embedded_by_the_others_when_texts_of_prefill_come_no_more(
    make: Callable[..., Harness],
) -> None:
    harness = make(part="bulk")
    harness.after(*harness.held, harness.ask("prompt", part="prefill"))
    harness.embedder.gate.clear()
    harness.hold("by a niced thread")
    waiting = harness.ask("by another")
    harness.now += 3_000_000_000
    harness.after(waiting)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert harness.embedder.niceness == [own, own, 19, own]


def test_one_thread_less_embeds_probes_and_documents_while_texts_of_prefill_come_fast(
    make: Callable[..., Harness],
) -> None:
    harness = make(threads=2)
    harness.hold("by the niced thread that may", part="decode")
    waiting = [harness.ask(f"probe {number}", part="decode") for number in range(4)]
    assert harness.after(*waiting)[1:] == [[f"probe {number}" for number in range(4)]]
    harness.embedder.gate.clear()
    harness.now += 200_000_000
    for number in range(2):
        harness.hold(f"by niced thread {number}", part="decode")
    harness.open()
    assert set(harness.embedder.niceness[2:]) == {19}


def test_a_gpu_that_fails_fails_its_batch_and_ends_the_worker_that_reports_statistics(harness: Harness) -> None:
    lost, other = harness.ask("lost"), harness.ask("other")
    assert len(harness.after(lost, other)) == 1, "the next batch would fail too"
    assert isinstance(other.exception(), DeviceFailed)
    with pytest.raises(DeviceFailed, match="an illegal memory access"):
        harness.stage.statistics()


def test_an_embedder_on_a_gpu_takes_more_texts_at_once_and_has_its_own_thread(harness: Harness) -> None:
    on_gpu = Embedder(harness, turn=ON_GPU)
    first = harness.stage.submit(on_gpu, ["first"])
    until(lambda: len(on_gpu.batches) == 1)
    asked = [harness.stage.submit(on_gpu, [f"text {number}"]) for number in range(300)]
    on_gpu.gate.set()
    for one in (first, *asked):
        one.result(SOON_S)
    assert [len(batch) for batch in on_gpu.batches] == [1, 256, 44]
    assert not harness.held[0].done()


def test_an_embedder_that_waits_for_a_server_delays_no_other(harness: Harness) -> None:
    server = Embedder(harness, max_concurrency=2, turn=SENT)
    server.gate.set()
    assert float(harness.stage.submit(server, ["text"]).result(SOON_S).vectors[0, 0]) == 4.0
    assert not harness.held[0].done()
