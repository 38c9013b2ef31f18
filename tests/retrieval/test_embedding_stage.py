"""The embedding stage: batches of what has arrived, turns between keys, deadlines, errors of one text, the cache."""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from runtime.errors import (
    DeadlineExceeded,
    EmbedderUnreachable,
    InvalidRequest,
    ModelError,
    Overloaded,
    Unavailable,
)
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.embedding.stage import EmbeddingStage
from runtime.retrieval.embedding.text_queue import TextQueue, Texts
from runtime.retrieval.embedding.vector_cache import VectorCache
from runtime.testing.waiting import until
from tests.retrieval.embedding_harness import COST_NS, KINDS, PARTS, SOON_S, Embedder, Harness, Words, value
from tests.thread_limit import permit_threads

# ---- batches


def test_what_has_arrived_goes_into_the_next_batch_and_nobody_waits_for_company(harness: Harness) -> None:
    asked = [harness.ask("a" * number) for number in range(1, 4)]
    assert harness.after(*asked) == [["a", "aa", "aaa"]]
    assert [value(one) for one in asked] == [1.0, 2.0, 3.0]
    assert value(harness.ask("alone")) == 5.0
    assert harness.embedder.batches[-1] == ["alone"]


def test_texts_for_which_no_thread_can_be_started_are_refused_and_later_ones_embedded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = EmbeddingStage(1)
    embedder = Embedder(Harness(threads=0))
    embedder.gate.set()
    with monkeypatch.context() as limited:
        permit_threads(limited)
        with pytest.raises(Overloaded, match="embedding_0: can't start new thread"):
            stage.submit(embedder, ["refused"], "query", part="prefill")
    assert value(stage.submit(embedder, ["abc"], "query", part="prefill")) == 3.0
    assert embedder.batches == [["abc"]]
    assert stage.close(SOON_S)


def test_the_threads_that_could_be_started_embed_all_until_there_can_be_more(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, permitted = EmbeddingStage(2, clock=lambda: 1), permit_threads(monkeypatch, 1)
    embedder = Embedder(Harness(threads=0))
    embedder.gate.set()
    assert value(stage.submit(embedder, ["a"], part="prefill")) == 1.0
    permitted.append(None)
    assert value(stage.submit(embedder, ["bc"], part="decode")) == 2.0  # on a thread that is not niced, prefill is near
    permitted += [None] * 3
    assert value(stage.submit(embedder, ["def"], part="decode")) == 3.0
    assert not permitted
    assert stage.close(SOON_S)


def test_a_batch_is_a_turn_of_few_texts_and_characters(harness: Harness) -> None:
    asked = [harness.ask(f"short {number}") for number in range(40)]
    asked += [harness.ask(f"{number}" * 700) for number in range(3)]
    assert [len(batch) for batch in harness.after(*asked)] == [32, 10, 1]


def test_a_thread_leaves_the_others_their_share(make: Callable[..., Harness]) -> None:
    harness = make(threads=2)
    assert [len(batch) for batch in harness.after(*[harness.ask(f"text {n}") for n in range(4)])][:1] == [2]


def test_the_share_of_a_thread_is_by_length(make: Callable[..., Harness]) -> None:
    harness = make(threads=2)
    asked = harness.ask(*["short"] * 30, *["length" * 15] * 9)
    assert len(harness.after(asked)[0]) == 30


def test_a_thread_takes_what_others_that_are_busy_for_long_would_not_begin_earlier(
    make: Callable[..., Harness],
) -> None:
    harness = make(threads=2)
    harness.after(*harness.held)
    harness.embedder.gate.clear()
    harness.hold("second")
    busy = Embedder(harness)
    long = harness.stage.submit(busy, ["long" * 500], part="prefill")
    until(lambda: bool(busy.batches))
    asked = [harness.ask(f"text {n}") for n in range(4)]
    assert [len(batch) for batch in harness.after(*asked)] == [1, 4]
    busy.gate.set()
    assert value(long) == 2000.0


def test_a_list_has_its_vectors_in_order_over_several_batches_and_its_tokens(make: Callable[..., Harness]) -> None:
    harness = make(part="bulk")
    texts = [f"{'t' * number}" for number in range(1, 41)]
    found = harness.ask(*texts, kind="passage", count_tokens=True)
    harness.open()
    assert found.result(SOON_S).vectors[:, 0].tolist() == list(range(1, 41))
    assert found.result().tokens == sum(range(1, 41))
    assert harness.stage.submit(harness.embedder, [], "passage").result().vectors.shape == (0, 1)


def test_texts_of_a_list_are_embedded_beside_those_of_similar_length(make: Callable[..., Harness]) -> None:
    harness = make(part="bulk")
    found = harness.ask(*["a" * (10 + number % 4 * 10) for number in range(128)])
    assert [sorted(set(map(len, batch))) for batch in harness.after(found)] == [[10], [20], [30], [40]]
    assert found.result().vectors[:5, 0].tolist() == [10, 20, 30, 40, 10]


def test_queries_are_embedded_beside_those_of_similar_length(harness: Harness) -> None:
    asked = [harness.ask(f"{number:0{10 + number % 2 * 30}}") for number in range(64)]
    assert [sorted(set(map(len, batch))) for batch in harness.after(*asked)] == [[10], [40]]


def test_texts_with_as_many_tokens_are_embedded_in_one_forward_pass_however_many_characters_they_have(
    harness: Harness,
) -> None:
    words = harness.embedder.tokenizing = Words(harness.embedder)
    texts = ["wwww wwww", "w w w w w w", "w w", "wwwwwwwwww www", "w w w w w wwwwww"]
    asked = [harness.ask(text) for text in texts]
    assert harness.after(*asked) == [[texts[0], texts[2], texts[3]], [texts[1], texts[4]]]
    assert [value(one) for one in asked] == list(map(len, texts))
    assert words.tokenized == len(texts)


def test_tokens_of_texts_that_were_embedded_by_them_are_counted_without_another_look(
    make: Callable[..., Harness],
) -> None:
    harness = make(part="bulk")
    words = harness.embedder.tokenizing = Words(harness.embedder)
    found = harness.ask("wwww wwww", "w w w", count_tokens=True)
    harness.open()
    assert found.result(SOON_S).tokens == 5
    assert words.tokenized == 2


def test_a_forward_pass_has_a_bounded_number_of_tokens_and_little_padding(harness: Harness) -> None:
    harness.embedder.tokenizing = Words(harness.embedder)
    asked = [harness.ask("w " * words + f"{number:05}") for words in (1, 3, 9) for number in range(2)]
    batches = harness.after(*asked)
    assert [[len(text.split()) for text in batch] for batch in batches] == [[2, 2], [4, 4], [10], [10]]


def test_texts_share_a_forward_pass_while_all_of_its_padding_is_within_the_bound(harness: Harness) -> None:
    harness.embedder.tokenizing = Words(harness.embedder)
    asked = [harness.ask("w " * words + f"{number:05}") for number, words in enumerate((2, 2, 1, 1, 4))]
    batches = harness.after(*asked)
    assert [[len(text.split()) for text in batch] for batch in batches] == [[3, 3, 2, 2], [5]]


def test_a_text_without_tokens_fails_alone(harness: Harness) -> None:
    harness.embedder.tokenizing = Words(harness.embedder)
    asked = [harness.ask(text) for text in ("w", "bad", "ww")]
    harness.after(*asked)
    assert isinstance(asked[1].exception(SOON_S), InvalidRequest)
    assert [value(asked[0]), value(asked[2])] == [1.0, 2.0]


def test_a_text_that_is_due_is_overtaken_a_bounded_number_of_times() -> None:
    queue, embedder = TextQueue(), HashingEmbedder(16)
    for number, text in enumerate(["short", "of another length", *["short"] * 100]):
        queue.push(Texts(embedder, [text], "query", 0, "prefill", 0, number, [Future()]))
    first = queue.pop()
    assert first is not None
    taken = [queue.pop([first], 10_000) for _ in range(80)]
    assert [one is not None and one.text for one in taken].index("of another length") == 64


def test_queries_and_passages_are_not_embedded_in_one_call(make: Callable[..., Harness]) -> None:
    harness = make(part="bulk")
    asked = [harness.ask(f"{kind} {n}", kind=kind) for n in range(3) for kind in KINDS]
    assert all(len({text.split()[0] for text in batch}) == 1 for batch in harness.after(*asked))


# ---- whose turn it is


def test_a_key_with_many_waiting_goes_after_one_that_has_used_less(harness: Harness) -> None:
    storm = [harness.ask(f"storm {number}", flow=1) for number in range(40)]
    other = harness.ask("other", flow=2)
    batches = harness.after(*storm, other)
    assert "other" in batches[0][:2]
    assert value(other) == 5.0


def test_a_key_s_long_texts_cost_it_its_turn(make: Callable[..., Harness]) -> None:
    harness = make(part="bulk")
    storm = harness.ask(*["long " * 200] * 12, kind="passage", flow=1)
    others = [harness.ask(f"other {number}", flow=2) for number in range(12)]
    batches = harness.after(storm, *others)
    before = batches[: next(place for place, batch in enumerate(batches) if "other 11" in batch)]
    assert sum("long" in text for batch in before for text in batch) <= 2


def test_of_a_key_s_texts_in_a_queue_those_of_prefill_go_first_and_none_starve() -> None:
    queue, embedder = TextQueue(), HashingEmbedder(16)
    for part in PARTS:
        for number in range(32):
            queue.push(Texts(embedder, [part], "query", 0, part, 0, number, [Future()]))
    order = []
    while (one := queue.pop()) is not None:
        queue.begun(one)
        order.append(one.text)
    assert order[:10].count("prefill") >= 7
    assert order[:30].count("decode") >= 2
    assert order[:30].count("bulk") >= 2


def test_a_short_list_does_not_wait_for_the_end_of_a_long_one(make: Callable[..., Harness]) -> None:
    harness = make(part="bulk")
    harness.after(*[harness.ask(f"measured {n}") for n in range(4)])
    harness.embedder.gate.clear()
    harness.hold("second")
    long = harness.ask(*[f"long {n}" for n in range(200)])
    short = harness.ask("short")
    ended: list[str] = []
    long.add_done_callback(lambda _: ended.append("long"))
    short.add_done_callback(lambda _: ended.append("short"))
    harness.after(long, short)
    assert ended == ["short", "long"]


def test_earlier_deadlines_go_first(harness: Harness) -> None:
    asked = [harness.ask(f"by {by}", deadline_ns=by * 10**9) for by in (30, 10, 20)]
    assert harness.after(*asked) == [["by 10", "by 20", "by 30"]]


# ---- deadlines and limits


def test_a_text_that_is_late_is_not_embedded(harness: Harness) -> None:
    late, other = harness.ask("late", deadline_ns=COST_NS // 2), harness.ask("other")
    assert harness.after(late, other) == [["other"]]
    with pytest.raises(DeadlineExceeded, match="not embedded in time"):
        late.result()


def test_a_text_that_could_not_be_embedded_in_time_is_refused_at_once(harness: Harness) -> None:
    harness.after(*[harness.ask(f"measured {n}") for n in range(8)])
    harness.embedder.gate.clear()
    harness.hold("second")
    waiting = [harness.ask(f"waiting {n}") for n in range(100)]
    soon = harness.now + 20 * COST_NS
    with pytest.raises(Overloaded, match=r"100 texts wait for embedding, .* about 0\.1.* s, .* has 0\.02 s left"):
        harness.ask("too late", deadline_ns=soon)
    asked = [harness.ask("another key", deadline_ns=soon, flow=7), harness.ask("later", deadline_ns=10 * soon)]
    harness.after(*waiting, *asked)
    assert [value(one) for one in asked] == [11.0, 5.0]


def test_a_query_that_would_wait_too_long_is_refused_at_once_and_documents_are_not(
    make: Callable[..., Harness],
) -> None:
    harness = make(max_wait_ns=10 * COST_NS)
    harness.after(*harness.held, *[harness.ask(f"measured {n}") for n in range(8)])
    harness.embedder.gate.clear()
    harness.hold("second")
    at_twice_the_capacity, refused = [], []
    for n in range(20):
        try:
            at_twice_the_capacity.append(harness.ask(f"storm {n:04}"))
        except Overloaded as error:
            refused.append(error)
    assert 8 <= len(at_twice_the_capacity) <= 10
    assert all(error.status == 503 and "the limit is 0.01 s; try again later" in error.message for error in refused)
    others = [harness.ask("another key", flow=7), harness.ask("document", kind="passage", part="bulk")]
    begin = harness.now
    harness.after(*at_twice_the_capacity, *others)
    ends = [one.result().end_ns - begin for one in at_twice_the_capacity]
    assert max(ends) <= 13 * COST_NS  # with the text before them, and those of others


def test_a_query_behind_nobody_is_embedded_however_long_it_takes(make: Callable[..., Harness]) -> None:
    harness = make(max_wait_ns=COST_NS // 2)
    harness.after(*harness.held)
    assert value(harness.ask("alone")) == 5.0


def test_what_waits_is_bounded_and_dropped_at_the_end(make: Callable[..., Harness]) -> None:
    harness = make(limit=3)
    waiting = [harness.ask(f"waits {number}") for number in range(3)]
    with pytest.raises(Overloaded, match="3 requests wait for embedding, the limit"):
        harness.ask("too many")
    assert not harness.stage.close(0.0)
    assert all(one.cancelled() for one in waiting)
    with pytest.raises(Unavailable, match="the node is stopping"):
        harness.ask("later")


def test_a_cancelled_text_is_not_embedded(harness: Harness) -> None:
    dropped, kept = harness.ask("dropped"), harness.ask("kept")
    part = harness.ask(*["part"] * 40)
    assert (dropped.cancel(), part.cancel()) == (True, True)
    assert harness.after(kept) == [["kept"]]


# ---- errors


def test_a_text_that_fails_does_not_fail_those_beside_it(harness: Harness) -> None:
    bad, good, broken = harness.ask("bad"), harness.ask("good"), harness.ask("broken")
    harness.after(bad, good, broken)
    assert isinstance(bad.exception(), InvalidRequest)
    assert value(good) == 4.0
    with pytest.raises(ModelError, match="the embedder lengths failed: a broken library"):
        broken.result()
    assert value(harness.ask("next")) == 4.0


def test_a_text_that_fails_is_not_counted_and_its_thread_goes_on(make: Callable[..., Harness]) -> None:
    harness = make(part="bulk")
    harness.open()
    failed = harness.ask("bad", count_tokens=True)
    assert isinstance(failed.exception(SOON_S), InvalidRequest)
    assert harness.ask("good", count_tokens=True).result(SOON_S).tokens == 4


def test_a_server_that_does_not_answer_is_asked_once_for_a_batch(harness: Harness) -> None:
    gone, other = harness.ask("gone"), harness.ask("other")
    assert len(harness.after(gone, other)) == 1
    assert isinstance(other.exception(), EmbedderUnreachable)


# ---- the same text again


def test_the_same_text_is_embedded_once_and_then_found_in_the_cache(harness: Harness) -> None:
    asked = [harness.ask("same") for _ in range(3)]
    assert harness.after(*asked) == [["same"]]
    assert [value(one) for one in (*asked, harness.ask("same"), harness.ask("same", flow=5))] == [4.0] * 5
    statistics = harness.stage.statistics()
    assert (statistics.embedded, statistics.batches, statistics.reused) == (2, 2, 4)
    assert statistics.cache_bytes > 0


def test_a_text_is_embedded_again_as_another_kind_by_another_embedder_and_in_a_list(harness: Harness) -> None:
    harness.after(harness.ask("same"))
    other = Embedder(harness)
    other.name = "other"
    other.gate.set()
    for asked in (
        harness.ask("same", kind="passage"), harness.stage.submit(other, ["same"], part="prefill"),
        harness.ask("same", part="bulk"),
    ):  # fmt: skip
        assert value(asked) == 4.0
    assert harness.stage.statistics().reused == 0


def test_a_caller_that_leaves_does_not_take_the_text_from_another(harness: Harness) -> None:
    first, second = harness.ask("same"), harness.ask("same")
    first.cancel()
    harness.after(second)
    assert value(second) == 4.0


def test_keys_do_not_wait_for_each_other_s_same_text(harness: Harness) -> None:
    storm = [harness.ask(f"storm {number}", flow=1) for number in range(40)]
    asked = [harness.ask("same", flow=1), harness.ask("same", flow=2)]
    assert "same" in harness.after(*storm, *asked)[0]


def test_the_cache_keeps_the_last_found_within_its_bytes() -> None:
    cache = VectorCache(limit_bytes=3 * 600)
    for name in "abc":
        cache.put(("e", name), np.zeros(16, np.float32))
    assert cache.find(("e", "a")) is not None
    cache.put(("e", "d"), np.ones(16, np.float32))
    assert [cache.find(("e", name)) is not None for name in "abcd"] == [True, False, True, True]
    assert cache.size_bytes <= 3 * 600
    found = cache.find(("e", "d"))
    assert found is not None
    assert not found.flags.writeable
