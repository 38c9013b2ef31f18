"""The answer cache: hits for similar questions with equal parameters and tenant, until they expire."""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.errors import CollectionBusy
from runtime.retrieval.answer_store import NewAnswer
from runtime.retrieval.collections.disk import Disk, acquire_lock
from runtime.retrieval.passages import Passage
from runtime.serving.frontend.answer_cache import CacheKey
from runtime.serving.frontend.requests import Relayed
from runtime.serving.http.service import Settings
from runtime.serving.messages import Message, Retrieval, Retrieved, Sampling, Tokens
from runtime.testing.waiting import until
from tests.frontend.answer_cache_harness import CacheHarness, LetterEmbedder
from tests.frontend.cluster import Cluster

GREEDY = Sampling(8)
ONE = (Tokens("a", "one", (1, 2), "stop", 3),)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[CacheHarness]:
    made = CacheHarness(tmp_path / "answers")
    yield made
    made.answers.close()


def asked(prompt: Any = "why?", tenant: str = "", sampling: Sampling = GREEDY, **options: Any) -> CacheKey:
    model, seeded = options.get("model", "m"), options.get("seeded", False)
    made = CacheKey.of(tenant, model, prompt, sampling, options.get("retrieval"), seeded=seeded)
    assert made is not None
    return made


def test_a_similar_question_hits_and_a_dissimilar_one_misses(harness: CacheHarness) -> None:
    harness.store(asked("why not say so?"), ONE)
    harness.now.s += 4
    hit = harness.find(asked("why not say so so?"))
    assert hit is not None
    assert (hit.pieces, hit.age_s) == (ONE, 4.0)
    assert 0.9 < hit.similarity < 1
    assert harness.find(asked("because")) is None
    assert harness.counts == {"stored": 1, "hit": 1, "miss": 1}


def test_a_hit_returns_the_answer_as_stored_with_passages_and_choices(harness: CacheHarness) -> None:
    passage = Passage("p", "t", 0.25, "", {"page": 3, "tags": ["x", "y"]})
    choices = ({"index": 0, "delta": {"content": "é", "reasoning": "r"}, "finish_reason": "stop"},)
    pieces = (
        Retrieved("a", (passage,), 0),
        Relayed("a", "é", (), "stop", choices=choices, usage={"total_tokens": 4}, completion_tokens=2),
    )
    harness.store(asked(), pieces)
    hit = harness.find(asked())
    assert hit is not None
    assert msgspec.to_builtins(hit.pieces) == msgspec.to_builtins(pieces)


@pytest.mark.parametrize(
    "other",
    [
        asked(tenant="Bearer b"),
        asked(model="n"),
        asked(prompt=(Message("user", "why?"),)),
        asked(prompt=(Message("system", "be brief"), Message("user", "why?"))),
        asked(prompt="why 2?"),
        asked(sampling=Sampling(9)),
        asked(sampling=Sampling(8, temperature=0.5)),
        asked(sampling=Sampling(8, top_p=0.5)),
        asked(sampling=Sampling(8, stop=("x",))),
        asked(sampling=Sampling(8, ignore_eos=True)),
        asked(retrieval=Retrieval("docs")),
        asked(retrieval=Retrieval("docs", filter=b"tenant")),
        asked(retrieval=Retrieval("docs", hybrid=0.5)),
    ],
)
def test_any_other_difference_is_a_miss(harness: CacheHarness, other: CacheKey) -> None:
    harness.store(asked(), ONE)
    assert harness.find(other) is None
    assert harness.find(asked()) is not None


def test_an_expired_answer_is_not_found_and_is_deleted(harness: CacheHarness) -> None:
    harness.store(asked(), ONE)
    harness.now.s += 9.9
    assert harness.find(asked()) is not None
    harness.now.s += 0.1
    assert harness.find(asked()) is None, "expired but not yet deleted"
    harness.stored.maintain()
    assert harness.counts["expired"] == 1


def test_the_oldest_answer_is_evicted(tmp_path: Path) -> None:
    harness = CacheHarness(tmp_path / "answers", entries=2)
    for number in range(4):
        harness.store(asked(f"why {number}?"), ONE)
    until(lambda: harness.counts["evicted"] == 2)
    found = [harness.find(asked(f"why {number}?")) is not None for number in range(4)]
    assert found == [False, False, True, True]
    harness.answers.close()


def test_answers_with_their_age_and_order_survive_a_restart(tmp_path: Path) -> None:
    harness = CacheHarness(tmp_path / "answers", entries=2)
    for number in range(2):
        harness.store(asked(f"why {number}?"), ONE)
    harness.answers.close()
    after = CacheHarness(tmp_path / "answers", entries=2)  # waits for the one before: the lock goes with its process
    until(lambda: after.find(asked("why 0?")) is not None, after.stored.maintain)
    after.now.s = harness.now.s + 5
    hit = after.find(asked("why 1?"))
    assert hit is not None
    assert hit.age_s == 5
    after.store(asked("why 2?"), ONE)
    until(lambda: after.counts["evicted"] == 1)
    assert [after.find(asked(f"why {number}?")) is not None for number in range(3)] == [False, True, True]
    after.answers.close()


def test_stored_answers_are_readable_only_by_their_owner(harness: CacheHarness) -> None:
    assert stat.S_IMODE(harness.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["collection.json", "MANIFEST", "log", ""])
def test_a_missing_or_damaged_collection_is_a_miss_and_is_created_again(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = CacheHarness(tmp_path / "answers")
    first.store(asked(), ONE)
    first.answers.close()
    until(lambda: _unlocked(first.directory))
    damaged = first.directory / name
    if damaged.is_dir():
        shutil.rmtree(damaged)
    else:
        damaged.write_bytes(b"{}")
    after = CacheHarness(tmp_path / "answers")
    assert after.find(asked()) is None
    after.store(asked(), ONE)
    assert after.find(asked()) is not None
    assert caplog.text.count("answer cache is reset") == (1 if name else 0)
    after.answers.close()


def test_a_full_disk_stops_storing_and_is_logged_once_until_space_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness = CacheHarness(tmp_path / "answers")
    answer = NewAnswer("a", asked().digest, LetterEmbedder().embed(["why?"])[0], "[]")
    with monkeypatch.context() as full:
        full.setattr(Disk, "write", _no_room)
        for _ in range(3):
            harness.stored.store([answer])
        assert harness.find(asked()) is None
    assert caplog.text.count("answers are not stored") == 1
    harness.store(asked(), ONE)
    assert harness.find(asked()) is not None
    harness.answers.close()


def _no_room(disk: Disk, fd: int, content: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_slow_disk_delays_no_answer_and_its_queue_is_bounded(
    harness: CacheHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, others = threading.Event(), set(threading.enumerate())
    sync = Disk.sync

    def slow(disk: Disk, fd: int) -> None:
        assert wait.wait(60)
        sync(disk, fd)

    monkeypatch.setattr(Disk, "sync", slow)
    vector = LetterEmbedder().embed(["why?"])[0]
    for number in range(200):
        harness.answers.store(asked(f"why {number}?"), vector, ONE)  # returns
    wait.set()
    until(lambda: harness.counts["evicted"] > 0)
    harness.answers.close()
    until(lambda: not any(one.name.startswith("store-answer") for one in set(threading.enumerate()) - others))
    assert 64 <= harness.counts["stored"] <= 129, "64 are queued, in addition to those being written"


def _unlocked(directory: Path) -> bool:
    with suppress(CollectionBusy):
        os.close(acquire_lock(directory))
        return True
    return False


@contextmanager
def cluster(directory: Path, **settings: Any) -> Iterator[tuple[Cluster, CacheHarness]]:
    harness = CacheHarness(directory / "answers", ttl_s=1000.0)
    settings_ = Settings(model="tiny", collections={"docs": 4}, **settings)
    with Cluster(settings=settings_, answers=harness.answers) as node:
        yield node, harness
    harness.answers.close()


BODY = {"model": "tiny", "prompt": "what say=3 now", "max_tokens": 8, "temperature": 0}


def test_a_hit_returns_the_stored_answer_and_is_marked(tmp_path: Path) -> None:
    with cluster(tmp_path) as (node, harness), node.http() as http:
        first = http.post("/v1/completions", json=BODY)
        assert "cached" not in first.json()
        until(lambda: harness.counts["stored"] == 1)
        second = http.post("/v1/completions", json=BODY | {"prompt": "now what say=3"})
        assert second.headers["x-trinity-cache"] == "hit"
        answer = second.json()
        assert answer["choices"] == first.json()["choices"]
        counts = [answer["usage"] | {"prompt_tokens_details": None} for answer in (answer, first.json())]
        assert counts[0] == counts[1]
        assert answer["id"] != first.json()["id"]
        assert answer["cached"] == {"similarity": 1.0, "age_s": 0.0}
        assert len(node.players["prefill-0"].prefills) == 1, "the model ran again"
        assert harness.counts == {"miss": 1, "stored": 1, "hit": 1}


def test_a_streamed_answer_is_stored_and_replayed_as_a_stream(tmp_path: Path) -> None:
    with cluster(tmp_path) as (node, harness):
        client = node.client()
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "what say=3 now"}],
            "temperature": 0,
        }
        retrieval = {"retrieval": {"collection": "docs", "k": 2}}
        texts = []
        for _ in range(2):
            chunks = list(
                client.chat.completions.create(
                    **body, stream=True, stream_options={"include_usage": True}, extra_body=retrieval
                )
            )
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
            assert chunks[-1].usage.completion_tokens == 3
            assert len(chunks[0].retrieval["passages"]) == 2
            until(lambda: harness.counts["stored"] == 1)
        assert texts[0] == texts[1] == "w0 w1 w2 "
        assert chunks[0].cached["similarity"] == 1.0
        assert len(node.players["prefill-0"].prefills) == 1


def test_tenants_never_see_each_others_answers(tmp_path: Path) -> None:
    with cluster(tmp_path, api_keys=("a", "b")) as (node, harness), node.http() as http:
        for number, tenant in enumerate(("a", "b", "a")):
            until(lambda number=number: harness.counts["stored"] == number)  # type: ignore[misc]
            answer = http.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {tenant}"})
            assert answer.status_code == 200
        assert harness.counts == {"miss": 2, "stored": 2, "hit": 1}
        assert len(node.players["prefill-0"].prefills) == 2


def test_a_request_can_bypass_the_cache_and_a_failed_answer_is_not_stored(tmp_path: Path) -> None:
    with cluster(tmp_path) as (node, harness), node.http() as http:
        http.post("/v1/completions", json=BODY | {"answer_cache": False})
        assert harness.counts == {}
        http.post("/v1/completions", json=BODY | {"prompt": "fail=2"})
        http.post("/v1/completions", json=BODY | {"prompt": "fail=2", "stream": True})
        assert harness.counts == {"miss": 2}
